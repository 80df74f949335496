"""Who is left out of a sync, that all agree on it, and that nothing of them reaches the mean or anybody's memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from isthmus.compress import Cast, Compressor
from isthmus.compress.dct import DCT
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.lowrank import LowRank
from isthmus.compress.momentum import SharedMomentum
from isthmus.compress.quantize import Quantize
from isthmus.compress.robust import Median
from isthmus.compress.topk import TopK
from isthmus.core import Tensors, UserError
from isthmus.outer.guard import ContributionReport, Guard, Screened, describe_left_out, judge, of_worker
from isthmus.transport.local import LocalWorld, run_workers

QUARTERS = [0.25] * 4
FINE = ContributionReport(scale=1.0, typical=1.0, version=5, num_elements=10, layout=7)


def gradient(rank: int) -> Tensors:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(40, 30, generator=generator), torch.randn(7, generator=generator)]


def screen(
    inputs: list[Tensors],
    versions: list[int] | None = None,
    histories: list[list[float]] | None = None,
    weights: list[float] | None = None,
) -> list[tuple[Screened, dict[str, Any], int]]:
    """Everybody's verdict, the memory after it, and the bytes it cost."""

    def work(rank: int, transport: Any) -> Any:
        peers = transport.quorum(0)
        state = {"peer_scales": histories[rank]} if histories else {}
        version = versions[rank] if versions else 0
        return Guard().screen(inputs[rank], 1, version, state, peers), state, peers.sent_bytes

    return run_workers(LocalWorld(len(inputs), weights=weights), work)


def spoil(rank: int, value: float) -> list[Tensors]:
    """Four workers, one of which has a bad number."""
    inputs = [gradient(rank) for rank in range(4)]
    inputs[rank][0][3, 4] = value
    return inputs


def test_good_contributions_pass_as_they_are_for_40_bytes_to_each_of_the_others() -> None:
    inputs = [gradient(rank) for rank in range(4)]
    for rank, (screened, _, sent_bytes) in enumerate(screen(inputs)):
        assert screened.own is inputs[rank]
        assert (screened.weights, screened.left_out, screened.refusal) == (QUARTERS, {}, "")
        assert sent_bytes == 3 * 40


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e6, 3e38])
def test_all_agree_on_who_is_left_out_and_it_sends_zeros(value: float) -> None:
    verdicts = [screened for screened, _, _ in screen(spoil(2, value))]
    reason = verdicts[0].left_out[2]
    assert ("above 10 times" if value == 1e6 else "not finite") in reason
    for rank, screened in enumerate(verdicts):
        assert screened.left_out == {2: reason}
        assert screened.weights == [1 / 3, 1 / 3, 0, 1 / 3]
        assert all(tensor.any() for tensor in screened.own) == (rank != 2)


METHODS: dict[str, Compressor] = {
    "cast": Cast(),
    "quantize": Quantize(8),
    "topk": TopK(keep=8, chunk=64, values=Cast()),
    "dct": ErrorFeedback(DCT(TopK(keep=8, chunk=64, values=Cast()), tile=8), decay=0.95),
    "lowrank": ErrorFeedback(LowRank(2, factors=Quantize(8))),
    "momentum": SharedMomentum(Quantize(8)),
    "median": Median(),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_mean_is_that_of_the_others_and_no_memory_keeps_a_bad_number(name: str) -> None:
    """Two syncs: bad values in the first, good ones in the second."""

    def average(inputs: list[Tensors], weights: list[float]) -> list[tuple[Tensors, dict[str, Any]]]:
        def work(rank: int, transport: Any) -> tuple[Tensors, dict[str, Any]]:
            state: dict[str, Any] = {}
            peers = transport.quorum(0)
            screened = Guard().screen(inputs[rank], 1, 0, state, peers)
            peers.weights = screened.weights
            first, _ = METHODS[name].average(screened.own, state, peers)
            METHODS[name].average(gradient(rank), state, transport.quorum(1))
            return first, state

        return run_workers(LocalWorld(4, weights=weights), work)

    with_it = average(spoil(1, math.nan), QUARTERS)
    without = average([gradient(rank) for rank in range(4)], [1 / 3, 0, 1 / 3, 1 / 3])
    for rank, (mean, state) in enumerate(with_it):
        assert all(tensor.isfinite().all() for tensor in [*mean, *tensors_in(state)])
        if rank != 1 or name != "momentum":  # its result holds the worker's own
            assert all(torch.equal(a, b) for a, b in zip(mean, without[rank][0], strict=True))


def tensors_in(state: Any) -> Tensors:
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_in(value)]
    if isinstance(state, list):
        return [tensor for value in state for tensor in tensors_in(value)]
    return [state] if isinstance(state, torch.Tensor) and state.is_floating_point() else []


def test_a_worker_whose_message_was_bad_in_an_earlier_attempt_says_so() -> None:
    def work(rank: int, transport: Any) -> Screened:
        return Guard().screen(gradient(rank), 1, 0, {}, transport.quorum(0), faulty=rank == 1)

    for rank, screened in enumerate(run_workers(LocalWorld(3), work)):
        assert screened.left_out == {1: "its contribution is not finite"}
        assert any(tensor.any() for tensor in screened.own) == (rank != 1)


def test_weights_stay_in_proportion_and_a_joiner_stays_at_zero() -> None:
    for screened, _, _ in screen(spoil(0, math.nan), weights=[0.5, 0.2, 0.3, 0.0]):
        assert screened.weights == pytest.approx([0, 0.4, 0.6, 0])
        assert list(screened.left_out) == [0]


def test_a_joiner_with_bad_values_is_told_too() -> None:
    weights = [0.5, 0.2, 0.3, 0.0]
    for rank, (screened, _, _) in enumerate(screen(spoil(3, math.nan), weights=weights)):
        assert list(screened.left_out) == [3]
        assert screened.weights == weights
        assert any(tensor.any() for tensor in screened.own) == (rank != 3)


def test_nobody_is_left() -> None:
    inputs = [[torch.full((3,), math.nan)]] * 2
    for screened, state, _ in screen(inputs):
        assert screened.refusal.startswith("nobody is left: worker 0: its contribution is not finite; worker 1: ")
        assert screened.weights == [0.5, 0.5]
        assert not screened.own[0].any()
        assert state == {}


def test_another_layout_is_refused_by_all_before_any_message_is_sent() -> None:
    inputs = [gradient(0), [torch.ones(7), torch.ones(40, 30)], gradient(2)]
    for screened, _, _ in screen(inputs):
        assert screened.refusal.startswith("worker 1: it syncs 1207 values in other shapes")
        assert screened.left_out == {}


@pytest.mark.parametrize(
    ("versions", "left_out"),
    [([5, 5, 4, 5], [2]), ([5, 5, 9, 5], [2]), ([5, 5, 6, 6], [0, 1]), ([5, 5, 5, 5], [])],
    ids=str,
)
def test_the_majoritys_version_counts_and_in_a_tie_the_newer(versions: list[int], left_out: list[int]) -> None:
    for screened, _, _ in screen([gradient(rank) for rank in range(4)], versions=versions):
        assert list(screened.left_out) == left_out
    if left_out == [2]:
        assert screened.left_out[2] == f"it is at version {versions[2]}, the others at 5"


def norms(*values: float, typical: float | list[float] = math.nan) -> list[ContributionReport]:
    remembered = typical if isinstance(typical, list) else [typical] * len(values)
    return [replace(FINE, scale=norm, typical=t) for norm, t in zip(values, remembered, strict=True)]


@pytest.mark.parametrize(
    ("reports", "left_out"),
    [
        (norms(1, 1, 11), [2]),
        (norms(1, 1, 9), []),
        (norms(1, 1, 11, typical=1.2), []),  # as usual
        (norms(1, 90, 90, typical=0.1), []),  # all grew together
        (norms(1, 11), []),  # of two nobody knows
        (norms(1, 11, typical=1), [1]),  # but for what they remember
        (norms(1, 11, typical=[math.nan, 1]), [1]),  # or one of them
        (norms(100, 200, typical=1), []),  # after a warm start: more steps to a sync
        (norms(1, 11, 1, typical=[1, math.inf, 1]), [1]),  # who lies about the past is outvoted
        (norms(1, 11, 1, typical=[1, 1e9, 1]), [1]),
        (norms(0, 0, 5), []),  # two have not begun
        (norms(0, 0, 0), []),
        (norms(1, 1, 20, 20), [2, 3]),  # half may be bad
    ],
    ids=str,
)
def test_the_norm_is_compared_with_peers_now_and_before(reports: list[ContributionReport], left_out: list[int]) -> None:
    assert list(judge(reports, [1 / len(reports)] * len(reports), 10.0)) == left_out


def test_norms_of_joiners_do_not_count() -> None:
    """Two that have just healed made hardly any progress: beside them the others are not long."""
    reports = norms(0.01, 0.01, 0.01, 1, 1, 1)
    assert list(judge(reports, [1 / 6] * 6, 10.0)) == [3, 4, 5]
    assert judge(reports, [0, 0, 0, 1 / 3, 1 / 3, 1 / 3], 10.0) == {}


@pytest.mark.parametrize("norm", [-1.0, math.nan, math.inf, 1e300])
def test_no_report_can_make_the_judge_fail_or_spare_everybody(norm: float) -> None:
    reports = [replace(FINE, scale=norm, typical=norm, version=-(2**63)), *norms(1, 1, 50, typical=1)]
    assert {0, 3} <= judge(reports, QUARTERS, 10.0).keys()


def test_what_is_remembered_is_the_median_of_those_who_took_part_over_ten_commits() -> None:
    inputs = [[torch.full((4,), float(value))] for value in (1, 2, 3, 1e6)]
    assert [state["peer_scales"] for _, state, _ in screen(inputs)] == [[4.0]] * 4
    histories = [list(map(float, range(1, 11)))] * 4
    for _, state, _ in screen(inputs, histories=histories):
        assert state["peer_scales"] == [*map(float, range(2, 11)), 4.0]


def test_the_old_memory_is_not_touched_where_a_sync_is_refused() -> None:
    history = [2.0]

    def work(rank: int, transport: Any) -> None:
        Guard().screen([torch.ones(4)], 1, 0, {"peer_scales": history}, transport.quorum(0))

    run_workers(LocalWorld(1), work)
    assert history == [2.0]


@pytest.mark.parametrize("tensors", [[], [torch.zeros(0)], [torch.tensor(2.0)]], ids=["none", "empty", "scalar"])
def test_odd_fragments(tensors: Tensors) -> None:
    for screened, _, _ in screen([tensors] * 3):
        assert screened.left_out == {}


@pytest.mark.parametrize("factor", [1.0, 0.0, -3.0, math.nan])
def test_a_factor_that_would_leave_out_half_is_refused(factor: float) -> None:
    with pytest.raises(UserError, match="max_norm_factor"):
        Guard(max_norm_factor=factor)


def test_the_norm_check_can_be_switched_off() -> None:
    inputs = [[torch.full((4,), value)] for value in (1.0, 1.0, 1e9)]

    def work(rank: int, transport: Any) -> dict[int, str]:
        return Guard(max_norm_factor=None).screen(inputs[rank], 1, 0, {}, transport.quorum(0)).left_out

    assert run_workers(LocalWorld(3), work) == [{}] * 3


@pytest.mark.parametrize("growth", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("steps", [(60, 3, 3), (60, 60, 3), (60, 3, 3, 3), (100, 60, 2), (32, 1, 1)], ids=str)
def test_steps_are_no_reason_to_be_left_out_and_no_excuse(steps: tuple[int, ...], growth: float) -> None:
    """Norms of honest workers grow between the root of the steps and the steps.

    The fastest one may be no ten times too long for its steps, and nobody ten times as long as all others are.
    """
    honest = [n**growth for n in steps]
    assert left_out(honest, steps) == []
    for rank, norm in enumerate(honest):
        too_long = 10.01 * (norm if steps[rank] == max(steps) else max(honest))
        assert left_out([too_long if other == rank else honest[other] for other in range(len(steps))], steps) == [rank]


def left_out(norms: list[float], steps: tuple[int, ...]) -> list[int]:
    """Whom all leave out, of workers that have no memory."""

    def work(rank: int, transport: Any) -> dict[int, str]:
        return Guard().screen([torch.tensor(norms[rank])], steps[rank], 0, {}, transport.quorum(0)).left_out

    (verdict,) = {tuple(verdict) for verdict in run_workers(LocalWorld(len(steps)), work)}
    return list(verdict)


def test_the_report_of_a_worker_of_several_ranks() -> None:
    shards = [replace(FINE, scale=3.0, num_elements=10), replace(FINE, scale=4.0, num_elements=7, layout=8)]
    whole = of_worker(shards)
    assert replace(whole, layout=0) == ContributionReport(scale=5.0, typical=1.0, version=5, num_elements=17, layout=0)
    assert of_worker(shards).layout == whole.layout != of_worker(shards[::-1]).layout
    assert of_worker(shards[:1]) == shards[0]


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_bad_shard_makes_a_bad_worker(norm: float) -> None:
    bad = of_worker([FINE, replace(FINE, scale=norm)])
    assert judge([of_worker([FINE, FINE]), bad], [0.5, 0.5], 10.0) == {1: "its contribution is not finite"}


@pytest.mark.parametrize("reports", [[0, 1], [1, 0, 1], [1, 1]], ids=str)
def test_ranks_of_one_worker_at_different_versions(reports: list[int]) -> None:
    workers = [of_worker([FINE, FINE]), of_worker([FINE, replace(FINE, version=6)])]
    left_out = judge([workers[i] for i in reports], [1 / len(reports)] * len(reports), 10.0)
    assert left_out == {i: "its ranks are at different versions" for i, mixed in enumerate(reports) if mixed}


def test_a_line_for_people() -> None:
    assert describe_left_out({1: "it is late", 3: "so is it"}) == "worker 1: it is late; worker 3: so is it"
