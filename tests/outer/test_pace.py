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
