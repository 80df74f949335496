"""When fragments are sent and finished."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core import SyncSchedule, UserError

schedules = st.builds(
    lambda interval, fragments, overlap, warm: SyncSchedule(
        interval * fragments, fragments, min(overlap, interval * fragments), warm
    ),
    st.integers(1, 7),
    st.integers(1, 5),
    st.integers(0, 35),
    st.integers(0, 6),
)


@given(schedules, st.integers(1, 100))
def test_identity_10_any_window_of_h_steps_sends_every_fragment_once(schedule: SyncSchedule, start: int) -> None:
    first = schedule.warm_start_steps + start
    sent = [index for step in range(first, first + schedule.local_steps) for index in schedule.begins(step)]
    assert sorted(sent) == list(range(schedule.num_fragments))


@given(schedules)
def test_identity_10_no_two_in_flight_while_tau_is_below_h_over_p(schedule: SyncSchedule) -> None:
    in_flight: list[int] = []
    most = 0
    for step in range(1, schedule.warm_start_steps + 4 * schedule.local_steps):
        begun = schedule.begins(step)
        in_flight += begun
        if not schedule.warm(step):
            most = max(most, len(in_flight))
        for index in schedule.finishes(step):
            if schedule.overlap_steps < schedule.local_steps:
                in_flight.remove(index)  # raises when it was never sent
    if schedule.overlap_steps < schedule.local_steps // schedule.num_fragments:
        assert most == 1


@given(schedules)
def test_what_is_sent_is_finished_exactly_tau_steps_later(schedule: SyncSchedule) -> None:
    after = range(schedule.warm_start_steps + 1, schedule.warm_start_steps + 3 * schedule.local_steps)
    for step in after:
        assert schedule.finishes(step + schedule.overlap_steps) == schedule.begins(step)


def test_diloco_blocks_every_h_steps() -> None:
    schedule = SyncSchedule(local_steps=3)
    assert [step for step in range(1, 10) if schedule.begins(step)] == [3, 6, 9]
    assert all(schedule.begins(step) == schedule.finishes(step) and schedule.blocking(step) for step in range(1, 10))


def test_streaming_spreads_fragments_over_the_round() -> None:
    schedule = SyncSchedule(local_steps=6, num_fragments=3, overlap_steps=1)
    assert [schedule.begins(step) for step in range(1, 9)] == [[], [0], [], [1], [], [2], [], [0]]
    assert [schedule.finishes(step) for step in range(1, 9)] == [[], [], [0], [], [1], [], [2], []]


def test_a_full_delay_finishes_an_empty_sync_at_the_first_boundary() -> None:
    schedule = SyncSchedule(local_steps=4, overlap_steps=4, warm_start_steps=3)
    assert [step for step in range(1, 13) if schedule.finishes(step)] == [1, 2, 3, 7, 11]
    assert [schedule.blocking(step) for step in (3, 4, 7)] == [True, False, False]


def test_the_start_ends_with_a_sync() -> None:
    schedule = SyncSchedule(local_steps=4, num_fragments=2, warm_start_steps=5, warm_start_every=2)
    assert [step for step in range(1, 8) if schedule.begins(step) == [0, 1]] == [2, 4, 5]
    assert [schedule.begins(step) for step in (6, 7, 8, 9)] == [[], [0], [], [1]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"local_steps": 0}, "at least 1"),
        ({"local_steps": 10, "num_fragments": 3}, "local_steps 10 is not divisible by num_fragments 3"),
        ({"local_steps": 10, "warm_start_lr": 0}, "warm_start_lr is 0; choose a positive number, such as 1"),
        ({"local_steps": 10, "warm_start_lr": float("nan")}, "warm_start_lr is nan; choose a positive number"),
        ({"local_steps": 10, "overlap_steps": 11}, "overlap_steps 11 is more than local_steps 10"),
    ],
)
def test_impossible_schedules_are_refused_in_one_line(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        SyncSchedule(**fields)
    assert "\n" not in str(refused.value)
