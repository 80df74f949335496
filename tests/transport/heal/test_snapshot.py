import json
import tracemalloc
from random import Random

import pytest
import torch
from fuzzing import mutate_bytes, mutate_json
from safetensors.torch import load

from isthmus.core.flatten import unflatten
from isthmus.transport import TransportError
from isthmus.transport.heal.snapshot import MAX_MANIFEST_BYTES, Incoming, Manifest, Outgoing, Snapshot

PARAMETER = torch.nn.Parameter(torch.randn(3, 7))
STATE = {
    "anchors": [PARAMETER, torch.randn(4, 6).t(), torch.randn(10)[::3], torch.randn(5).to(torch.bfloat16)],
    "outer": {0: {"momentum": torch.randint(-128, 127, (9,), dtype=torch.int8), "betas": (0.9, 0.95)}},
    "small": [torch.tensor(True), torch.tensor(2.5, dtype=torch.float64), torch.zeros(0), torch.empty(3, 0, 2).half()],
    "bits": torch.tensor([True, False, True]),
    "counts": [torch.tensor([1, 2], dtype=dtype) for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)],
    "expanded": torch.ones(1).expand(4),
    "ledger": {"corpus/0": ["worker-1", 128], "unread": None},
}
MAX_BYTES = 10_000


def equal(one, other) -> bool:
    """Deep equality, tensors by dtype, shape and bits."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and (one.dtype, one.shape) == (other.dtype, other.shape)
        return same and torch.equal(bits(one), bits(other))
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def transfer(outgoing: Outgoing, order=list) -> Incoming:
    incoming = Incoming(Manifest.parse(outgoing.manifest, MAX_BYTES))
    for index in order(range(len(incoming.manifest.chunks))):
        data = memoryview(b"".join(outgoing.chunk(index)))
        assert incoming.check(index, data)
        incoming.write(index, data)
    return incoming


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("order", [list, reversed])
def test_roundtrip_in_chunks_of_any_size_and_order(chunk_bytes, order):
    incoming = transfer(Outgoing(Snapshot("v1", STATE), chunk_bytes), order)
    result = incoming.finish()
    assert equal(STATE, result)
    assert incoming.manifest.id == "v1"
    assert result["anchors"][1].is_contiguous()


def test_a_state_without_tensors():
    assert transfer(Outgoing(Snapshot("v1", {"step": 3}))).finish() == {"step": 3}


def test_what_travels_is_a_safetensors_file():
    outgoing = Outgoing(Snapshot("v1", STATE), 64)
    manifest = json.loads(outgoing.manifest)
    header = json.dumps(manifest["tensors"]).encode()
    body = b"".join(bytes(view) for index in range(len(manifest["chunks"])) for view in outgoing.chunk(index))
    tensors = load(len(header).to_bytes(8, "little") + header + body)
    assert equal(STATE, unflatten(manifest["state"], [tensors[str(number)] for number in range(len(tensors))]))


def test_equal_states_give_equal_bytes():
    one = Outgoing(Snapshot("v1", STATE), 64)
    other = Outgoing(Snapshot("v1", dict(reversed(STATE.items()))), 64)
    assert one.manifest == other.manifest
    changed = STATE | {"bits": ~STATE["bits"]}
    assert Outgoing(Snapshot("v1", changed), 64).manifest != one.manifest
    assert Outgoing(Snapshot("v2", STATE), 64).manifest != one.manifest


def test_a_large_contiguous_state_is_not_copied():
    values = torch.zeros(100)
    outgoing = Outgoing(Snapshot("v1", {"a": values}))
    values[0] = 1
    assert bytes(outgoing.chunk(0)[0][:4]) == b"\x00\x00\x80\x3f"


def test_a_damaged_chunk_is_noticed():
    outgoing = Outgoing(Snapshot("v1", STATE), 64)
    incoming = Incoming(Manifest.parse(outgoing.manifest, MAX_BYTES))
    data = bytearray(b"".join(outgoing.chunk(0)))
    data[5] ^= 1
    assert not incoming.check(0, memoryview(data))


def test_a_bool_that_is_neither_true_nor_false_is_refused():
    outgoing = Outgoing(Snapshot("v1", {"bits": torch.tensor([1, 2], dtype=torch.uint8)}))
    forged = Outgoing(Snapshot("v1", {"bits": torch.tensor([True, True])})).manifest
    incoming = Incoming(Manifest.parse(forged, MAX_BYTES))
    incoming.write(0, memoryview(b"".join(outgoing.chunk(0))))
    with pytest.raises(TransportError, match="neither 0 nor 1"):
        incoming.finish()


def test_what_cannot_be_sent_is_an_error_of_the_donor():
    with pytest.raises(TypeError, match="complex64"):
        Outgoing(Snapshot("v1", {"a": torch.zeros(2, dtype=torch.complex64)}))
    with pytest.raises(ValueError, match="8 MiB"):
        Outgoing(Snapshot("v1", {"a": "x" * MAX_MANIFEST_BYTES}))


def forge(**changes) -> bytes:
    plain = json.loads(Outgoing(Snapshot("v1", {"a": torch.zeros(2, 3)}), 16).manifest)
    plain["tensors"]["0"] |= changes.pop("tensor", {})
    return json.dumps(plain | changes).encode()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "not JSON"),
        (b"[]", "lacks a field"),
        (forge(id=3), "lacks a field"),
        (forge(id="x" * 201), "impossible id"),
        (forge(chunk_bytes=0), "chunk size"),
        (forge(chunk_bytes=True), "chunk size"),
        (forge(chunk_bytes=1 << 40), "chunk size"),
        (forge(chunks=[]), "number of chunks"),
        (forge(chunks=["00", "00"]), "no hash"),
        (forge(chunks=[None, None]), "no hash"),
        (forge(state={}), "are not in the skeleton"),
        (forge(tensors={"1": {}}), "a kind unknown"),
        (forge(tensor={"dtype": "OBJECT"}), "a kind unknown"),
        (forge(tensor={"shape": [-1, 3]}), "a kind unknown"),
        (forge(tensor={"shape": [1] * 17}), "a kind unknown"),
        (forge(tensor={"shape": [2.0, 3]}), "a kind unknown"),
        (forge(tensor={"shape": [1 << 40, 3]}), "more than the 10000 bytes expected"),
        (forge(tensor={"shape": [1 << 62, 1 << 62, 0]}), "more than the 10000 bytes expected"),
        (forge(tensor={"data_offsets": [8, 32]}), "gaps or overlaps"),
    ],
)
def test_impossible_manifests_are_refused(text, reason):
    with pytest.raises(TransportError, match=reason):
        Manifest.parse(text, MAX_BYTES)


@pytest.mark.parametrize("mutate", [mutate_bytes, mutate_json])
def test_5000_mutated_manifests_are_refused_or_understood_within_the_limit(mutate):
    random = Random(0)
    state = {key: STATE[key] for key in ("outer", "bits", "counts")}
    original = Outgoing(Snapshot("v1", state), 16).manifest
    digest = Manifest.parse(original, MAX_BYTES).digest
    texts = [mutate(original, random) for _ in range(5000)]
    refused = 0
    tracemalloc.start()
    try:
        for text in texts:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                manifest = Manifest.parse(text, MAX_BYTES)
            except TransportError:
                refused += 1
            else:
                assert (manifest.digest == digest) == (text == original)
                assert Incoming(manifest).num_bytes == manifest.num_bytes <= MAX_BYTES
            assert tracemalloc.get_traced_memory()[1] - before < 40 * len(text) + 100_000
    finally:
        tracemalloc.stop()
    assert 2000 < refused < 5000
