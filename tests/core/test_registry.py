"""Names and import paths."""

import collections
from collections.abc import Iterator

import pytest

from isthmus.core import Registry, UserError
from isthmus.core.imports import own_code

CODES = Registry("shelf", {"ordered": "collections:OrderedDict", "missing": "no.such:Thing"})


@pytest.fixture(autouse=True)
def _own_code() -> Iterator[None]:
    with own_code():
        yield


def test_a_name_and_an_import_path_find_the_component_and_back() -> None:
    assert CODES.get("ordered") is collections.OrderedDict
    assert CODES.get("collections:Counter") is collections.Counter
    assert CODES.name_of(collections.OrderedDict) == "ordered"
    assert CODES.name_of(collections.Counter) == "collections:Counter"


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown shelf 'orderd': did you mean 'ordered'"):
        CODES.get("orderd")
    with pytest.raises(UserError, match="known: missing, ordered"):
        CODES.get("zzz")


def test_what_cannot_be_imported_is_said_in_one_line() -> None:
    with pytest.raises(UserError, match="shelf 'missing' cannot be imported: No module named 'no'"):
        CODES.get("missing")
    with pytest.raises(UserError, match="cannot be imported"):
        CODES.get("collections:Nothing")


def test_what_cannot_do_what_its_kind_does_is_refused() -> None:
    sized = Registry("shelf", {"ordered": "collections:OrderedDict"}, methods=("keys", "sort"))
    with pytest.raises(UserError, match="'ordered' cannot be used as shelf: it has no method sort"):
        sized.get("ordered")
