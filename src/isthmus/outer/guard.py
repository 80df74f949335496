"""Contributions are checked before they are averaged: a bad one is left out, its weight with it.

Every worker sends a report of 40 bytes before its message. All apply the same pure function to the same reports, so
they agree on who is left out without another vote. A worker of several ranks is judged as a whole: they put their
reports together first, and each sends the whole worker's to its peers.

Workers may have taken unequal numbers of inner steps. The norm of a pseudo-gradient grows between sqrt(n), where steps
point anywhere, and n, where they follow one another, so what is compared is norm / sqrt(n): of two honest workers the
faster one looks longer by at most sqrt(ratio of steps), and the slower one never does.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median_low

import torch

from isthmus.core.types import Peers, State, Tensors, UserError

_HISTORY = 10  # commits over which a typical norm is remembered
_ENOUGH = 3  # of two norms nobody knows which is the odd one
_NO_VERSION = -1  # of a worker whose ranks disagree


@dataclass(frozen=True)
class ContributionReport:
    """A worker's report about its contribution, sent before the contribution itself."""

    scale: float  # norm / sqrt(inner steps) of its pseudo-gradient; infinite or NaN where that is not finite
    typical: float  # median over the last commits of the median scale of all contributions; NaN: knows of none
    version: int  # committed outer steps of the fragment
    num_elements: int
    layout: int  # hash of all shapes
    asks_rollback: bool = False  # its evaluation has exploded: all are to go back (`rollback.py`)


@dataclass(frozen=True)
class Screened:
    """The contributions of a sync after the check.

    The caller sets `peers.weights = screened.weights` before it averages `screened.own`: so whoever asks later whose
    contribution is in the commit gets the right answer too.
    """

    own: Tensors  # this worker's pseudo-gradient; zeros where it is left out, so that no compressor remembers it
    weights: list[float]  # each worker's share, 0 for those left out, summing to 1
    left_out: dict[int, str]  # rank: why
    refusal: str = ""  # why nothing can be averaged at all; empty where it can
    asking: int | None = None  # rank whose report asks all to go back, so that nothing is averaged


@dataclass(frozen=True)
class Guard:
    """Leaves out what is not finite, too long, or of another version.

    Too long means: norm / sqrt(inner steps) above `max_norm_factor` times both the median of this sync and that of the
    last commits. A worker's memory of the latter may differ from the others' (it may have joined just now): it is part
    of the report, and the median of what they remember counts, so nothing has to be equal beforehand.
    """

    max_norm_factor: float | None = 10.0  # None: no norm check

    def __post_init__(self) -> None:
        if self.max_norm_factor is not None and not self.max_norm_factor > 1:
            raise UserError(f"guard: max_norm_factor {self.max_norm_factor} must be above 1, or null for no norm check")

    def screen(
        self,
        own: Tensors,
        num_steps: int,
        version: int,
        state: State,
        peers: Peers,
        faulty: bool = False,
        asks_rollback: bool = False,
        remembers_largest: bool = False,
    ) -> Screened:
        """Exchange reports, and judge them alike on all workers.

        Args:
            own: this worker's pseudo-gradient.
            num_steps: inner steps in it.
            version: of the fragment.
            state: the copy of the fragment's memory that is adopted only if the sync commits; the guard keeps the
                scales of the last commits there, under "peer_scales".
            peers: before anything is averaged.
            faulty: this worker's message proved bad in an earlier attempt at this sync (`NotFinite`).
            asks_rollback: this worker's evaluation has exploded.
            remembers_largest: keep the largest median scale of all commits, not those of the last ones. Gradients need
                it: little is left of them where workers have learnt their own data, so that the gradient of the one
                with a class still to learn looks too long; left out, it forgets the class, and its gradient grows.
        """
        state.pop("peer_norms", None)  # which former versions kept, without regard to steps
        history: list[float] = state.get("peer_scales", [])
        report = replace(_report(own, num_steps, version, history), asks_rollback=asks_rollback)
        of_ranks = _exchange(replace(report, scale=math.nan) if faulty else report, peers.worker_group.all_gather)
        reports = _exchange(of_worker(of_ranks), peers.all_gather)
        mismatched = _mismatched_layouts(reports)
        if mismatched:
            return Screened(own, peers.weights, {}, mismatched)
        asking = next((rank for rank, report in enumerate(reports) if report.asks_rollback), None)
        if asking is not None:
            return Screened(own, peers.weights, {}, asking=asking)
        left_out = judge(reports, peers.weights, self.max_norm_factor or math.inf)
        if peers.rank in left_out:
            own = [torch.zeros_like(tensor) for tensor in own]
        weights = _without(left_out, peers.weights)
        if not any(weights):
            return Screened(own, peers.weights, left_out, f"nobody is left: {describe_left_out(left_out)}")
        moved = _moved(reports, weights)
        if moved:
            scales = [*history, median_low(moved)]
            state["peer_scales"] = [max(scales)] if remembers_largest else scales[-_HISTORY:]
        return Screened(own, weights, left_out)


def judge(reports: list[ContributionReport], weights: list[float], max_norm_factor: float) -> dict[int, str]:
    """Return whom to leave out, and why; all workers judge the same reports, so all come to the same result."""
    weighted = [report for report, weight in zip(reports, weights, strict=True) if weight > 0]
    versions = Counter(report.version for report in weighted if report.version != _NO_VERSION)
    version = max(versions, key=lambda candidate: (versions[candidate], candidate), default=_NO_VERSION)
    typical = _typical(reports, weights)
    left_out = {}
    for rank, report in enumerate(reports):
        if not math.isfinite(report.scale):
            left_out[rank] = "its contribution is not finite"
        elif report.version == _NO_VERSION:
            left_out[rank] = "its ranks are at different versions"
        elif report.version != version:
            left_out[rank] = f"it is at version {report.version}, the others at {version}"
        elif report.scale > max_norm_factor * typical:
            left_out[rank] = (
                f"its norm / sqrt(inner steps) is {report.scale:.3g}, above {max_norm_factor:g} times the usual "
                f"{typical:.3g}"
            )
    return left_out


def of_worker(of_ranks: list[ContributionReport]) -> ContributionReport:
    """Return the report of a whole worker, given those of its ranks."""
    if len(of_ranks) == 1:
        return of_ranks[0]
    return ContributionReport(
        scale=math.hypot(*(report.scale for report in of_ranks)),  # they take the same steps
        typical=of_ranks[0].typical,  # all remember the same scales, which were those of whole workers
        version=of_ranks[0].version if len({report.version for report in of_ranks}) == 1 else _NO_VERSION,
        num_elements=sum(report.num_elements for report in of_ranks),
        layout=_hash(str([report.layout for report in of_ranks])),
        asks_rollback=any(report.asks_rollback for report in of_ranks),
    )


def describe_left_out(left_out: dict[int, str]) -> str:
    """Return one line: "worker 1: its contribution is not finite; worker 3: ..."."""
    return "; ".join(f"worker {rank}: {reason}" for rank, reason in left_out.items())


def _report(own: Tensors, num_steps: int, version: int, history: list[float]) -> ContributionReport:
    norms = torch._foreach_norm(own) if own else []  # float32: what is too large to be squared in it counts as infinite
    norm = float(torch.linalg.vector_norm(torch.stack(list(norms)))) if norms else 0.0
    layout = _hash(str([tuple(tensor.shape) for tensor in own]))
    typical = median_low(history) if history else math.nan
    scale, num_elements = norm / math.sqrt(max(1, num_steps)), sum(tensor.numel() for tensor in own)
    return ContributionReport(scale, typical, version, num_elements, layout)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _exchange(report: ContributionReport, gather: Callable[[Tensors], list[Tensors]]) -> list[ContributionReport]:
    """Return everybody's report in rank order."""
    floats = torch.tensor([report.scale, report.typical], dtype=torch.float64)
    integers = torch.tensor([2 * report.version + report.asks_rollback, report.num_elements, report.layout])
    return [_read_report(*f.tolist(), *i.tolist()) for f, i in gather([floats, integers])]


def _read_report(scale: float, typical: float, version: int, num_elements: int, layout: int) -> ContributionReport:
    """Return the report that came; the last bit of its version says whether it asks for a rollback."""
    return ContributionReport(scale, typical, version // 2, num_elements, layout, bool(version % 2))


def _mismatched_layouts(reports: list[ContributionReport]) -> str:
    """Return why these workers cannot exchange messages at all: one of another size could not be received."""
    layouts = [(report.num_elements, report.layout) for report in reports]
    usual, _ = Counter(layouts).most_common(1)[0]  # of a tie the lowest rank's
    mismatched = {
        rank: f"it syncs {elements} values in other shapes than the {usual[0]} of the others: another model or split"
        for rank, (elements, layout) in enumerate(layouts)
        if (elements, layout) != usual
    }
    return describe_left_out(mismatched)


def _typical(reports: list[ContributionReport], weights: list[float]) -> float:
    """Return the larger of this sync's median scale and the remembered one; infinite where little is known.

    The lower median: of an even number half may lie. Both have to be exceeded, for all scales grow together after a
    warm start or a refused sync, and one worker's looks large beside others that have just begun.
    """
    moved = _moved(reports, weights)
    remembered = [r.typical for r, weight in zip(reports, weights, strict=True) if weight > 0 and r.typical > 0]
    if not moved or (len(moved) < _ENOUGH and not remembered):
        return math.inf
    return max(median_low(moved), median_low(remembered) if remembered else 0.0)


def _moved(reports: list[ContributionReport], weights: list[float]) -> list[float]:
    """Return the scales of the contributions that count and are not zero."""
    pairs = zip(reports, weights, strict=True)
    return [report.scale for report, weight in pairs if weight > 0 and 0 < report.scale < math.inf]


def _without(left_out: dict[int, str], weights: list[float]) -> list[float]:
    """Return the weights with those of some ranks shared out among the others; all zero where nobody is left."""
    kept = [0.0 if rank in left_out else weight for rank, weight in enumerate(weights)]
    total = sum(kept)
    return kept if kept == weights or total == 0 else [weight / total for weight in kept]
