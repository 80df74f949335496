"""Schedules against torch's and transformers' own, and at their corners."""

import pytest
import torch

from isthmus.core import UserError
from isthmus.inner import WSD, Constant, Cosine


def reference(make_scheduler, steps: int) -> list[float]:
    """The factors a stateful scheduler gives."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_scheduler(optimizer)
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


def test_cosine_equals_torch():
    factor = Cosine(warmup_fraction=0.0, final_fraction=0.1).over(50)
    expected = reference(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=50, eta_min=0.1), 51)
    assert [factor(step) for step in range(51)] == pytest.approx(expected)


def test_warmup_is_linear_and_reaches_the_peak():
    factor = Cosine(warmup_fraction=0.1).over(100)
    assert [factor(step) for step in range(11)] == pytest.approx([0.1 * (step + 1) for step in range(10)] + [1.0])


def test_wsd_is_stable_then_falls_in_a_line():
    factor = WSD(warmup_fraction=0.0, decay_fraction=0.25, final_fraction=0.2).over(80)
    assert {factor(step) for step in range(61)} == {1.0}
    assert [factor(step) for step in (65, 70, 75, 80)] == pytest.approx([0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("schedule", [Constant(), Cosine(final_fraction=0.3), WSD(final_fraction=0.3)])
def test_the_end_lasts_for_ever(schedule):
    assert schedule.factor(100, 100) == schedule.factor(1000, 100) == pytest.approx(schedule.shape(1.0))


def test_a_run_shorter_than_its_warmup_has_no_division_by_zero():
    assert Cosine(warmup_fraction=1.0).over(1)(0) == 1.0
    assert WSD(decay_fraction=0.0, final_fraction=0.5).over(0)(0) == 1.0


def test_fractions_are_checked():
    with pytest.raises(UserError, match="warmup_fraction is 100"):
        Cosine(warmup_fraction=100)
    with pytest.raises(UserError, match=r"decay_fraction is -0\.1"):
        WSD(decay_fraction=-0.1)
