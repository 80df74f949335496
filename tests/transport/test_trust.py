"""Whom a worker lets in: by a list of keys that is read again, by a secret, or everybody that the rendezvous names."""

import json
import os
from pathlib import Path

import pytest

from isthmus.core import UserError
from isthmus.link import Identity
from isthmus.transport.trust import SECRET, Trust

WORD = "a secret of at least sixteen letters"


@pytest.fixture
def keys(tmp_path: Path) -> list[Path]:
    """Three files with a key each."""
    paths = [tmp_path / f"{name}.key" for name in "abc"]
    for path in paths:
        Identity.generate().save(path)
    return paths


def write(path: Path, *fingerprints: str) -> str:
    """Write a list with comments, such that its time differs from that of the list before."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text("# workers of this run\n" + "".join(f"{each}  somebody\n\n" for each in fingerprints))
    os.utime(path, ns=(before + 10**9, before + 10**9))
    return str(path)


def test_a_list_admits_and_revokes_without_a_restart(keys, tmp_path, caplog):
    a, b, c = [Identity.load(path).fingerprint for path in keys]
    listed = tmp_path / "trusted"
    trust = Trust(str(keys[0]), write(listed, a, b))
    assert trust.identity.fingerprint == a
    assert trust.among([a, b, c]) == [a, b]
    write(listed, a, c)
    assert trust.among([a, b, c]) == [a, c]
    write(listed, "nonsense")
    assert trust.among([a, b, c]) == [a, c]  # as it was, and a line in the log
    assert "'nonsense' is no fingerprint" in caplog.text
    assert not trust.is_open


def test_all_who_know_the_secret_share_a_key(monkeypatch):
    monkeypatch.setenv(SECRET, WORD)
    one, other = Trust(), Trust()
    assert one.read("w", other.sign("w", {"version": 3})) == {"version": 3}
    monkeypatch.setenv(SECRET, WORD + "!")
    with pytest.raises(ValueError, match="its key ed25519:.* is not trusted"):
        one.read("w", Trust().sign("w", {}))


def test_with_neither_whoever_is_named_is_let_in():
    one, other = Trust(), Trust()
    assert one.is_open
    assert one.identity.fingerprint != other.identity.fingerprint
    assert one.read("w", other.sign("w", [1])) == [1]


def test_a_word_cannot_be_changed_nor_told_by_another_name():
    trust = Trust()
    signed = trust.sign("w", {"version": 3})
    for change in ({"told": json.dumps({"version": 4})}, {"signature": "A" * 88}, {"signature": "no base64 ="}):
        with pytest.raises(ValueError, match=r"its signature is wrong|base64|padding"):
            trust.read("w", signed | change)
    with pytest.raises(ValueError, match="its signature is wrong"):
        trust.read("v", signed)
    for junk in (None, [], "text", {}, {"told": 1, "key": 2, "signature": 3}):
        with pytest.raises(ValueError, match="it told something unreadable"):
            trust.read("w", junk)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"identity": "KEY"}, "outer.transport.trusted is missing: name both"),
        ({"trusted": "KEY"}, "outer.transport.identity is missing: name both"),
        (
            {"identity": "nowhere", "trusted": "LIST"},
            "nowhere cannot be read .*: make it with isthmus identity nowhere",
        ),
        ({"identity": "KEY", "trusted": "nowhere"}, "outer.transport.trusted: nowhere cannot be read"),
        ({"identity": "KEY", "trusted": "KEY"}, "trusted, file .*: .* is no fingerprint: isthmus identity prints them"),
    ],
)
def test_what_is_wrong_is_one_line(keys, tmp_path, options, message):
    files = {"KEY": str(keys[0]), "LIST": write(tmp_path / "trusted", Identity.load(keys[1]).fingerprint)}
    given = {name: files.get(value, value) for name, value in options.items()}
    with pytest.raises(UserError, match=message) as caught:
        Trust(**given)
    assert "\n" not in str(caught.value)


def test_a_short_secret_is_refused(monkeypatch):
    monkeypatch.setenv(SECRET, "guess me")
    with pytest.raises(UserError, match=f"{SECRET} is shorter than 16 letters: take a random one"):
        Trust()
