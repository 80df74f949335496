from __future__ import annotations

import pytest

from isthmus.outer.dynamic_local_steps import DynamicLocalSteps


@pytest.mark.parametrize("speed", [1.0, 0.5, 1 / 3, 0.71, 0.01])
def test_a_round_takes_its_share_of_the_steps_whatever_the_speed(speed):
    local_steps = DynamicLocalSteps(30)
    local_steps.adapt(speed, 30)
    own_steps = max(1, round(30 * speed))
    for _ in range(3):
        assert sum(local_steps.end_step(0.0) for _ in range(own_steps)) == 30


def test_the_speed_is_that_of_training_alone():
    local_steps, now = DynamicLocalSteps(10), 0.0
    for _ in range(200):
        local_steps.start_step(now)
        now += 0.25  # an inner step
        local_steps.end_step(now)
        now += 5.0  # a sync
    assert local_steps.steps_per_second == pytest.approx(4.0)


def test_a_step_that_now_and_then_takes_three_times_as_long_counts_as_what_it_takes_in_the_mean():
    local_steps, now = DynamicLocalSteps(50), 0.0
    for step in range(400):
        local_steps.start_step(now)
        now += 0.3 if step % 2 else 0.1
        local_steps.end_step(now)
    assert local_steps.steps_per_second == pytest.approx(1 / 0.2, rel=0.02)


def test_a_new_speed_is_known_after_a_few_rounds():
    local_steps, now = DynamicLocalSteps(20), 0.0
    for step in range(200):
        local_steps.start_step(now)
        now += 0.1 if step < 100 else 0.3
        local_steps.end_step(now)
    assert local_steps.steps_per_second == pytest.approx(1 / 0.3, rel=0.01)


def test_a_pause_is_no_pace():
    """A worker that was stopped for 5 s is back at its share within a round."""
    local_steps, now = DynamicLocalSteps(10), 0.0
    for seconds in [0.04] * 40 + [5.0] + [0.04] * 10:
        local_steps.start_step(now)
        now += seconds
        local_steps.end_step(now)
    assert local_steps.steps_per_second > 0.85 / 0.04


def test_a_worker_that_becomes_ten_times_slower_says_so_within_two_rounds():
    local_steps, now = DynamicLocalSteps(10), 0.0
    for seconds in [0.04] * 40 + [0.4] * 20:
        local_steps.start_step(now)
        now += seconds
        local_steps.end_step(now)
    assert local_steps.steps_per_second < 1.3 / 0.4
