"""What `benchmarks.house` counts, on a house of a few lines, and what this house must never have again."""

import pytest
from benchmarks import house
from benchmarks.house import ROOT, House, Module

FILES = {
    "pkg.one": "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
    "    from pkg.two import Two\n\nclass One: ...\ndef describe(): ...\n",
    "pkg.two": "from pkg.one import One\n\nclass Two:\n    card_bytes: int\ndef describe(meeting): ...\n",
    "pkg.three": "def lazy():\n    from pkg import two\n",
}


@pytest.fixture
def small() -> House:
    return House([Module(name, ROOT / f"{name}.py", text) for name, text in FILES.items()], ["pkg.one"])


def test_circles_at_run_time_and_those_of_types_alone(small):
    assert house.circles(small) == []
    assert house.circles(small, type_only=True) == [["pkg.one", "pkg.two"]]
    small.modules[0] = Module("pkg.one", ROOT / "pkg.one.py", "def late():\n    from pkg import two\n")
    assert house.circles(small, type_only=True) == []
    assert house.circles(small, inside_functions=True) == [["pkg.one", "pkg.two"]]


def test_names_with_two_homes_and_words_of_the_house(small):
    assert house.ambiguous_names(small) == ["describe: pkg.one, pkg.two"]
    assert house.private_names(small) == ["card_bytes", "meeting"]
    assert house.words("NumFP8_card2") == ["num", "fp", "8", "card", "2"]
    assert house.unchecked_files(small) == [str(ROOT / "pkg.two.py"), str(ROOT / "pkg.three.py")]


@pytest.mark.parametrize("docstring", ["Itself.", "See X for more.", "Of this rank alone.", "Return the mean", ""])
def test_no_sentences(docstring):
    assert not house.is_sentence(docstring)


@pytest.mark.parametrize("docstring", ["The batch size.", "Return the mean of all\nworkers.\n\nMore."])
def test_sentences(docstring):
    assert house.is_sentence(docstring)


def test_long_functions_are_found():
    module = Module("pkg.long", ROOT / "long.py", "def long():\n" + "    x = 1\n" * 60)
    assert house.long_functions(House([module], [])) == [f"{ROOT / 'long.py'}:1: long"]


def test_this_house_has_no_circles_no_long_functions_and_a_small_transport():
    now = House.read(ROOT)
    assert house.circles(now, type_only=True, inside_functions=True) == []
    assert house.unchecked_files(now) == []
    assert house.long_functions(now) == []
    assert 8 <= len(house.members(now, "Transport")) <= 10


def test_a_former_revision_is_counted_beside_this_one(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["house", "--at", "HEAD"])
    house.main()
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["HEAD", "working", "tree"]
    assert len(rows) == len(house.MEASURES) + len(house.FOLDERS)
