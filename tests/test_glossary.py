"""The glossary of ARCHITECTURE.md against the code."""

import re
from collections import defaultdict

import pytest
from benchmarks.house import House, identifiers, words

from tests.test_docs import ROOT
from tests.test_docs_names import SPAN, exists

# identifiers that hold a word of the column "not" because somebody else calls the thing so
FOREIGN = {
    "model_card": "what the Hub calls the page of a model",
    "node": "what hivemind calls its part of the DHT",
    "_node": "the same",
    "Node": "the same",
    "NodeSettings": "the same",
    "client": "the other end of an HTTP connection",
    "_client": "the same",
    "client_address": "a parameter of Python's http.server",
    "client_class": "the class in torchft",
}


def glossary() -> list[list[str]]:
    """Return the rows of the glossary: word, meaning, names in the code, words that are not used."""
    section = (ROOT / "ARCHITECTURE.md").read_text().split("## Words\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"][2:]


@pytest.fixture(scope="module")
def names() -> dict[str, list[str]]:
    """Every identifier that src gives, with where."""
    found = defaultdict(list)
    for module in House.read(ROOT).modules:
        for name, line in identifiers(module.tree):
            found[name].append(f"{module.path}:{line}")
    return found


def test_the_glossary_has_at_most_25_words_with_a_meaning_each():
    rows = glossary()
    assert 15 <= len(rows) <= 25
    assert all(len(row) == 4 and row[0] and row[1] and SPAN.findall(row[2]) for row in rows)


def test_every_word_names_something_in_the_code(names):
    for word, _, code, _ in glossary():
        for name in SPAN.findall(code):
            assert set(name.split(".")) <= names.keys(), f"{word}: {name}"
            assert exists(name), f"{word}: {name}"


def test_what_is_not_the_word_is_no_name(names):
    refused = {word for row in glossary() for word in re.findall(r"\w+", row[3])}
    assert len(refused) > 10
    forms = refused | {f"{word}s" for word in refused}
    found = {name: where for name, where in names.items() if forms & set(words(name)) and name not in FOREIGN}
    assert not found


def test_every_exception_is_needed(names):
    assert names.keys() >= FOREIGN.keys()
