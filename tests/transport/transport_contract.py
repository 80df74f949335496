"""What every transport must do. Each check runs on all workers at once: collectives first, then assertions."""

import traceback

import pytest
import torch

from isthmus.transport import Drift


def inputs(rank):
    """Tensors of one worker: odd sizes, a scalar, an empty one, one that is not contiguous."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(7,), (3, 5), (), (0, 4), (2, 3, 2)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [*tensors, torch.randn(4, 6, generator=generator).t()]


def messages(rank):
    """Mixed dtypes, so that float32 stands at an odd offset."""
    dtypes = [torch.uint8, torch.float32, torch.bool, torch.int16, torch.bfloat16, torch.int64]
    return [(torch.arange(3) + 10 * rank).to(dtype) for dtype in dtypes] + [torch.zeros(0), torch.tensor(rank)]


def part(sender, receiver):
    """What `sender` has for `receiver`: another size for each receiver, nothing for worker 1."""
    return [torch.full((2 * receiver + 1 if receiver != 1 else 0,), 100 * sender + receiver, dtype=torch.uint8)]


def naive_mean(everybody, weights):
    return [
        sum(w * t.double() for w, t in zip(weights, ts, strict=True) if w > 0) for ts in zip(*everybody, strict=True)
    ]


def all_equal(left, right):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True))


def check_membership(transport, rank, size):
    peers = transport.quorum(0)
    assert (peers.rank, peers.size, transport.num_workers) == (rank, size, size)
    assert len(peers.weights) == size
    assert abs(sum(peers.weights) - 1) < 1e-9
    assert (peers.sent_bytes, peers.received_bytes) == (0, 0)


def check_mean_equals_naive_and_is_bitwise_equal_everywhere(transport, rank, size):
    peers = transport.quorum(1)
    own = inputs(rank)
    mean = peers.all_reduce_mean(own)
    everywhere = peers.all_gather(mean)
    torch.testing.assert_close(mean, [t.float() for t in naive_mean([inputs(r) for r in range(size)], peers.weights)])
    assert all(all_equal(mean, other) for other in everywhere)
    assert all_equal(own, inputs(rank)), "inputs must not change"


def check_large_mean_is_bitwise_equal_everywhere(transport, rank, size):
    peers = transport.quorum(2)
    mean = peers.all_reduce_mean([torch.randn(300_007, generator=torch.Generator().manual_seed(rank))])
    assert all(all_equal(mean, other) for other in peers.all_gather(mean))


def check_identity_20_weights_and_zero_weight_is_excluded(transport, rank, size):
    peers = transport.quorum(3)
    total = sum(range(size)) or 1
    peers.weights = [r / total for r in range(size)] if size > 1 else [1.0]
    own = [torch.full((5,), float("nan"))] if size > 1 and rank == 0 else [torch.full((5,), float(rank))]
    mean = peers.all_reduce_mean(own)
    expected = sum(w * r for r, w in enumerate(peers.weights))
    torch.testing.assert_close(mean, [torch.full((5,), expected)])


def check_mean_refuses_other_dtypes(transport, rank, size):
    peers = transport.quorum(4)
    with pytest.raises(TypeError, match="float32"):
        peers.all_reduce_mean([torch.zeros(3, dtype=torch.float16)])


def check_gather(transport, rank, size):
    gathered = transport.quorum(5).all_gather(messages(rank))
    assert len(gathered) == size
    assert all(all_equal(gathered[r], messages(r)) for r in range(size))


def check_exchange(transport, rank, size):
    received = transport.quorum(6).all_to_all([part(rank, r) for r in range(size)])
    assert len(received) == size
    assert all(all_equal(received[r], part(r, rank)) for r in range(size))


def check_parts_cross_as_whole_messages_do_also_where_one_exchange_feeds_the_next(transport, rank, size):
    peers, numbers = transport.quorum(6), range(1, 5)

    def outgoing(number, sender):
        return [[torch.full((number,), 100 * sender + receiver + number)] for receiver in range(size)]

    exchanged = peers.all_to_all_parts(outgoing(number, rank) for number in numbers)
    gathered = list(peers.all_gather_parts([torch.cat([a for (a,) in theirs])] for theirs in exchanged))
    assert len(gathered) == len(numbers)
    for number, everybody in zip(numbers, gathered, strict=True):
        for receiver, (theirs,) in enumerate(everybody):
            assert torch.equal(theirs, torch.cat([outgoing(number, sender)[receiver][0] for sender in range(size)]))
    values = sum(numbers) * (size - 1)
    assert peers.sent_bytes == peers.received_bytes == 8 * values + 8 * values * size
    assert list(peers.all_gather_parts([])) == list(peers.all_to_all_parts([])) == []


def check_empty_tensors(transport, rank, size):
    peers = transport.quorum(7)
    empty = [torch.zeros(0, 3), torch.zeros(0)]
    results = [
        peers.all_reduce_mean([]),
        peers.all_reduce_mean(empty),
        peers.all_gather(empty),
        peers.all_to_all([empty] * size),
    ]
    assert results[0] == []
    assert all_equal(results[1], empty)
    assert all(all_equal(other, empty) for result in results[2:] for other in result)
    assert (peers.sent_bytes, peers.received_bytes) == (0, 0)


def check_identity_35_bytes(transport, rank, size):
    peers, counted = transport.quorum(8), []
    for call in (
        lambda: peers.all_reduce_mean([torch.zeros(30), torch.zeros(2, 3)]),  # 36 values: divisible by 1, 2, 3 and 4
        lambda: peers.all_gather([torch.zeros(5), torch.zeros(3, dtype=torch.uint8)]),
        lambda: peers.all_to_all([part(rank, r) for r in range(size)]),
    ):
        sent, received = peers.sent_bytes, peers.received_bytes
        call()
        counted.append((peers.sent_bytes - sent, peers.received_bytes - received))
    ring, sizes = 2 * (size - 1) * 36 * 4 // size, [part(0, r)[0].numel() for r in range(size)]
    assert counted[0] == (ring, ring)
    assert counted[1] == ((size - 1) * 23, (size - 1) * 23)
    assert counted[2] == (sum(sizes) - sizes[rank], (size - 1) * sizes[rank])


def check_results_belong_to_the_caller(transport, rank, size):
    peers = transport.quorum(9)
    mean, gathered = peers.all_reduce_mean([torch.ones(4)]), peers.all_gather([torch.ones(4)])
    for tensors in (mean, *gathered):
        tensors[0].mul_(rank + 2)
    peers.all_gather([torch.ones(1)])  # everybody has written
    for tensors in (mean, *gathered):
        torch.testing.assert_close(tensors[0], torch.full((4,), rank + 2.0))


def check_commit(transport, rank, size):
    peers = transport.quorum(10)
    assert transport.commit(peers, True) is True
    assert transport.commit(peers, True, b"12345678") is True
    assert peers.sent_bytes == 2 * 9 * (size - 1)


def check_one_refusal_refuses_for_everybody(transport, rank, size):
    answers = [transport.commit(transport.quorum(11 + r), rank != r) for r in range(size)]
    assert answers == [False] * size


def check_identity_34_drift_names_the_minority(transport, rank, size):
    for r in range(1, size):
        with pytest.raises(Drift, match=f"worker {r} differ from those of worker"):
            transport.commit(transport.quorum(20 + r), True, b"drifted!" if rank == r else b"original")


def check_drift_of_a_zero_weight_worker_is_ignored(transport, rank, size):
    peers = transport.quorum(30)
    if size > 1:
        peers.weights = [0.0] + [1 / (size - 1)] * (size - 1)
        assert transport.commit(peers, True, b"joining!" if rank == 0 else b"original") is True


def check_pairs_exchange_what_they_like(transport, rank, size):
    peers = transport.quorum(32)

    def payload(sender, receiver):
        count = 0 if sender == receiver else 3000 * sender + 5 * receiver
        return torch.full((count,), 10 * sender + receiver, dtype=torch.uint8)

    for num_connections in (None, 1) if size > 1 else ():
        incoming = [torch.zeros_like(payload(r, rank)) for r in range(size)]
        peers.exchange([payload(rank, r) for r in range(size)], incoming, num_connections)
        assert all_equal(incoming, [payload(r, rank) for r in range(size)])
    assert all(peers.connections_to(r) >= 1 for r in range(size) if r != rank)
    assert (peers.sent_bytes, peers.received_bytes) == (0, 0)


def check_clock(transport, rank, size):
    before = transport.now()
    transport.quorum(31).all_gather([torch.zeros(3)])
    assert transport.now() >= before
    transport.wait_until(before)
    assert transport.now() >= before


CHECKS = [name for name in list(globals()) if name.startswith("check_")]


def run_checks(transport, rank, size):
    """Run all checks on this worker; return {name: traceback, empty when it held}."""
    outcomes = {}
    transport.join(None)
    for name in CHECKS:
        try:
            globals()[name](transport, rank, size)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    transport.leave()
    transport.leave()
    return outcomes
