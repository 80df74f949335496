import json

import pytest
import torch

from isthmus.core.flatten import flatten, unflatten

STATE = {
    "plain": [1, -2.5, float("inf"), "text", None, True, 2**80],
    "optimizer": {0: {"betas": (0.9, (0.5,)), "step": torch.tensor(3)}, "0": "another key", 10: {}, 9: []},
    "$": {"marks": {"$": "tensor"}},
    "é\ud800": torch.arange(3),
    "a/b": torch.zeros(1),
    "a": {"b": torch.ones(1)},
}


def test_roundtrip_through_json():
    skeleton, tensors = flatten(STATE)
    result = unflatten(json.loads(json.dumps(skeleton)), range(len(tensors)))
    numbers = [
        result["optimizer"][0].pop("step"),
        *(result.pop(key) for key in ("é\ud800", "a/b")),
        result["a"].pop("b"),
    ]
    assert sorted(numbers) == [0, 1, 2, 3]
    expected = [STATE["optimizer"][0]["step"], STATE["é\ud800"], STATE["a/b"], STATE["a"]["b"]]
    assert all(tensors[number] is tensor for number, tensor in zip(numbers, expected, strict=True))
    step = STATE["optimizer"][0] | {}
    step.pop("step")
    assert result == {"plain": STATE["plain"], "optimizer": STATE["optimizer"] | {0: step}, "$": STATE["$"], "a": {}}


def test_the_order_of_insertion_does_not_matter():
    first, second = torch.zeros(1), torch.ones(1)
    one = flatten({"a": first, "b": {10: second, 9: 0}})
    other = flatten({"b": {9: 0, 10: second}, "a": first})
    assert json.dumps(one[0]) == json.dumps(other[0])
    assert [id(tensor) for tensor in one[1]] == [id(tensor) for tensor in other[1]]


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": [0, {"b": {1}}]}, r"state\['a'\]\[1\]\['b'\]: set"),
        ({"a": {(1, 2): 0}}, r"state\['a'\]\[\(1, 2\)\]: keys"),
    ],
)
def test_what_cannot_be_sent_is_named(state, where):
    with pytest.raises(TypeError, match=where):
        flatten(state)


def nest(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("skeleton", "num_tensors"),
    [
        ([], 0),
        ({}, 1),
        ({"a": {"$": "tensor", "number": 0}}, 0),
        ({"a": {"$": "tensor", "number": 0}, "b": {"$": "tensor", "number": 0}}, 1),
        ({"a": {"$": "tensor", "number": [0]}}, 1),
        ({"a": {"$": "tensor", "number": 0, "more": 0}}, 1),
        ({"a": {"$": "object", "items": []}}, 0),
        ({"a": {"$": "dict", "items": [[[], 0]]}}, 0),
        ({"a": {"$": "dict", "items": [[1]]}}, 0),
        ({"a": {"$": "tuple", "items": 3}}, 0),
        ({"$": ["tensor"]}, 0),
        (nest(64), 0),
    ],
)
def test_malformed_skeletons_are_refused(skeleton, num_tensors):
    with pytest.raises(ValueError, match="state"):
        unflatten(skeleton, range(num_tensors))


def test_the_deepest_that_is_allowed():
    assert unflatten(nest(63), []) == nest(63)
