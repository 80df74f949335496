"""AdaptiveSchedule whose length follows the compressor's message_fraction."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.outer.test_identities import Shift
from tests.toy import Lazy, averaging, toy_run

from isthmus.core import SyncSchedule
from isthmus.outer import KeepProgress, Replace
from isthmus.outer.adaptive_schedule import AdaptiveSchedule


def boundaries(
    schedule: AdaptiveSchedule, until: int, message_fractions: dict[int, float]
) -> tuple[list[int], list[int]]:
    """Steps at which something begins and finishes, with message_fractions that are known from some step on."""
    begins, finishes = [], []
    for step in range(1, until + 1):
        schedule.message_fraction = message_fractions.get(step, schedule.message_fraction)
        finishes += [step] * bool(schedule.finishes(step))
        begins += [step] * bool(schedule.begins(step))
        schedule.adapt(step)
    return begins, finishes


def test_a_round_is_as_long_as_the_message_fraction_of_the_one_before_is_large() -> None:
    schedule = AdaptiveSchedule(SyncSchedule(8, warm_start_steps=2))
    assert boundaries(schedule, 40, {10: 0.5, 22: 0.26, 26: 1.0})[0] == [1, 2, 10, 14, 18, 22, 24, 26, 34]


def test_with_a_full_delay_what_begins_at_a_boundary_lands_at_the_next() -> None:
    schedule = AdaptiveSchedule(SyncSchedule(8, overlap_steps=8))
    begins, finishes = boundaries(schedule, 30, {8: 0.5, 20: 0.75})
    assert begins == finishes == [8, 12, 16, 20, 26]


def test_with_a_short_overlap_the_next_boundary_decides() -> None:
    schedule = AdaptiveSchedule(SyncSchedule(8, overlap_steps=3))
    assert boundaries(schedule, 27, {11: 0.5}) == ([8, 16, 20, 24], [11, 19, 23, 27])


def test_fragments_keep_their_rounds() -> None:
    planned = SyncSchedule(8, num_fragments=4)
    changed = boundaries(AdaptiveSchedule(planned), 40, {8: 0.5})
    assert changed == boundaries(AdaptiveSchedule(planned), 40, {})


@pytest.mark.parametrize("stop", [9, 12, 15])
def test_a_saved_round_goes_on(stop: int) -> None:
    planned = SyncSchedule(8, overlap_steps=8)
    whole, first, second = AdaptiveSchedule(planned), AdaptiveSchedule(planned), AdaptiveSchedule(planned)
    expected = boundaries(whole, 40, {8: 0.5})
    begun = boundaries(first, stop, {8: 0.5})
    second.load_state_dict(first.state_dict())
    rest = [[step for step in range(stop + 1, 41) if ask(step)] for ask in (second.begins, second.finishes)]
    assert [a + b for a, b in zip(begun, rest, strict=True)] == list(expected)


@pytest.mark.parametrize(
    ("schedule", "merge"),
    [
        (SyncSchedule(8), Replace()),
        (SyncSchedule(8, overlap_steps=8), KeepProgress()),
    ],
)
def test_the_outer_loop_syncs_more_often_and_loses_nothing(schedule, merge) -> None:
    workers = toy_run(
        2,
        steps=40,
        inner=partial(Shift, amount=0.125),
        schedule=schedule,
        compressor=Lazy(),
        merge=merge,
        outer_optimizer=averaging,
        finish=True,
    )
    for worker in workers:
        assert len(worker.reports) > 40 / 8 + 5
        assert torch.equal(worker.params, worker.anchor)
        assert torch.equal(worker.anchor, workers[0].anchor)
        assert worker.loop.state.schedule.schedule.local_steps == 2
