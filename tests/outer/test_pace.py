from __future__ import annotations

import pytest

from isthmus.outer.pace import Pace


@pytest.mark.parametrize("speed", [1.0, 0.5, 1 / 3, 0.71, 0.01])
def test_a_round_takes_its_share_of_the_steps_whatever_the_speed(speed):
    pace = Pace(30)
    pace.adopt(speed)
    own_steps = max(1, round(30 * speed))
    for _ in range(3):
        assert sum(pace.step(0.0) for _ in range(own_steps)) == 30


def test_the_speed_is_that_of_training_alone():
    pace, now = Pace(10), 0.0
    for _ in range(200):
        pace.resume(now)
        now += 0.25  # an inner step
        pace.step(now)
        now += 5.0  # a sync
    assert pace.steps_per_second == pytest.approx(4.0)


def test_a_step_that_now_and_then_takes_three_times_as_long_counts_as_what_it_takes_in_the_mean():
    pace, now = Pace(50), 0.0
    for step in range(400):
        pace.resume(now)
        now += 0.3 if step % 2 else 0.1
        pace.step(now)
    assert pace.steps_per_second == pytest.approx(1 / 0.2, rel=0.02)


def test_a_new_speed_is_known_after_a_few_rounds():
    pace, now = Pace(20), 0.0
    for step in range(200):
        pace.resume(now)
        now += 0.1 if step < 100 else 0.3
        pace.step(now)
    assert pace.steps_per_second == pytest.approx(1 / 0.3, rel=0.01)
