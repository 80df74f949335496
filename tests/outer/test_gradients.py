"""The start of a run, in which workers average their gradients."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

from isthmus.compress import Cast
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.float4 import Float4
from isthmus.compress.robust import Median
from isthmus.core import SyncReport, SyncSchedule, UserError, split_whole
from isthmus.outer import Guard, OuterLoop
from isthmus.outer.gradients import weight_compressor
from isthmus.recipes import attach
from isthmus.transport.local import Local, LocalWorld, run_workers

H = 4
FLOAT32 = Cast()
USUAL = Guard()


def make_loop(transport, model, gradient_compressor=FLOAT32, guard=USUAL, warm_start_steps=6, compressor=FLOAT32):
    schedule = SyncSchedule(H, warm_start_steps=warm_start_steps, warm_start_every=4)
    make_optimizer = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
    parts = split_whole(model), schedule, compressor, transport, make_optimizer
    return OuterLoop(*parts, guard=guard, gradient_compressor=gradient_compressor)


MODEL = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def make_model():
    return deepcopy(MODEL)


def batch(rank, step):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(100 * rank + step))


def train(rank, transport, steps, **options) -> tuple[dict[str, torch.Tensor], list[SyncReport]]:
    """Train with Adam, whose step is not linear in the gradient."""
    model = make_model()
    loop, optimizer, reports = make_loop(transport, model, **options), torch.optim.Adam(model.parameters()), []
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        loop.average_gradients(model.parameters())
        optimizer.step()
        reports += loop.step()
    result = {name: value.clone() for name, value in model.state_dict().items()}
    loop.close()
    return result, reports


def test_identity_the_start_is_data_parallel_training() -> None:
    results = run_workers(LocalWorld(3), partial(train, steps=6))
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(6):
        optimizer.zero_grad()
        sum(model(batch(rank, step)).square().mean() / 3 for rank in range(3)).backward()
        optimizer.step()
    for params, _ in results:
        torch.testing.assert_close(params, model.state_dict(), rtol=1e-4, atol=1e-6)


def test_every_step_of_the_start_reports_what_it_sent_and_later_ones_are_local() -> None:
    (_, reports), *_ = run_workers(LocalWorld(3), partial(train, steps=12))
    gradients = [report for report in reports if report.fragment == "gradients"]
    assert [report.outer_step for report in gradients] == [-1] * 6
    assert [report.outer_step for report in reports if report not in gradients] == [0, 1, 2]
    assert all(report.committed and report.num_peers == 3 and report.norm > 0 for report in gradients)
    values = sum(param.numel() for param in make_model().parameters())
    assert all(report.sent_bytes == pytest.approx(2 * 2 / 3 * 4 * values, abs=150) for report in gradients)
    assert len(reports) - len(gradients) == 3  # of weights, after steps 4, 6 and 10


def test_all_workers_step_alike_also_in_few_bits() -> None:
    first, *others = run_workers(LocalWorld(3), partial(train, steps=3, gradient_compressor=Float4("E3M0")))
    for params, _ in others:
        assert all(torch.equal(params[name], value) for name, value in first[0].items())


@pytest.mark.parametrize("steps", [6, 5])  # 5: the run ends within its start
def test_weights_lose_nothing_in_the_start_whatever_rounds_send(steps: int) -> None:
    whole, rounded = (
        run_workers(LocalWorld(3), partial(train, steps=steps, compressor=compressor))[0]
        for compressor in (FLOAT32, ErrorFeedback(Float4("E3M0")))
    )
    assert all(torch.equal(rounded[0][name], value) for name, value in whole[0].items())


def test_weights_cross_in_float32_under_a_robust_mean_too() -> None:
    assert weight_compressor(Median(Float4("E3M0"))) == Median(FLOAT32)


def test_a_robust_mean_counts_for_gradients_too() -> None:
    first, second, _ = run_workers(LocalWorld(3), partial(train, steps=3, gradient_compressor=Median()))
    assert all(torch.equal(second[0][name], value) for name, value in first[0].items())


def average(rank, transport, gradients, **options):
    model = make_model()
    loop = make_loop(transport, model, **options)
    for param, value in zip(model.parameters(), gradients[rank], strict=False):
        param.grad = None if value is None else torch.full_like(param, value)
    loop.average_gradients(model.parameters())
    reports = loop.step()
    loop.close()
    return [param.grad for param in model.parameters()], reports[0]


def test_a_gradient_that_is_missing_counts_as_zero() -> None:
    results = run_workers(LocalWorld(2), partial(average, gradients=[[1, 2, 3, 4], [3, None, 1, None]]))
    for grads, _ in results:
        assert [float(grad.flatten()[0]) for grad in grads] == [2, 1, 2, 2]


def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    gradients = [[1, 1, 1, 1], [3, 3, 3, 3], [float("nan"), 1, 1, 1]]
    for grads, report in run_workers(LocalWorld(3), partial(average, gradients=gradients)):
        assert {float(value) for grad in grads for value in grad.flatten()} == {2.0}
        assert report.committed
        assert report.left_out == {2: "its contribution is not finite"}


def test_a_gradient_is_too_long_only_beside_the_longest_usual_one() -> None:
    """Where all but one have learnt their own data, its gradient is long beside theirs, and counts."""
    of_others = [1.0, *14 * [0.01]]
    of_one = [*of_others[:-2], 0.5, 20.0]

    def left_out_at_every_step(rank, transport) -> list[dict[int, str]]:
        model = make_model()
        loop, found = make_loop(transport, model, warm_start_steps=len(of_one)), []
        for value in of_one if rank == 2 else of_others:
            for param in model.parameters():
                param.grad = torch.full_like(param, value)
            loop.average_gradients(model.parameters())
            found += [report.left_out for report in loop.step() if report.fragment == "gradients"]
        loop.close()
        return found

    for *kept, last in run_workers(LocalWorld(3), left_out_at_every_step):
        assert kept == 14 * [{}]
        assert last.keys() == {2}


def test_where_no_gradient_is_finite_all_workers_have_nan() -> None:
    for grads, report in run_workers(LocalWorld(2), partial(average, gradients=2 * [[float("inf")] * 4])):
        assert all(bool(grad.isnan().all()) for grad in grads)
        assert not report.committed
        assert "its contribution is not finite" in report.reason


def test_a_loop_that_does_not_average_is_told() -> None:
    def forget(rank, transport) -> str:
        model = make_model()
        loop = make_loop(transport, model)
        with pytest.raises(UserError, match=r"call outer_loop\.average_gradients\(model\.parameters\(\)\)") as refused:
            loop.step()
        loop.close()
        return str(refused.value)

    run_workers(LocalWorld(2), forget)


def test_one_worker_alone_keeps_its_gradients() -> None:
    ((params, reports),) = run_workers(LocalWorld(1), partial(train, steps=3, gradient_compressor=Float4("E3M0")))
    assert not reports
    alone = make_model()
    optimizer = torch.optim.Adam(alone.parameters())
    for step in range(3):
        optimizer.zero_grad()
        alone(batch(0, step)).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(params[name], value) for name, value in alone.state_dict().items())


def test_only_codecs_average_gradients() -> None:
    with pytest.raises(UserError, match="choose a codec"):
        make_loop(Local(LocalWorld(1), 0), make_model(), gradient_compressor=ErrorFeedback(Cast()))


def test_attach_averages_gradients_where_the_loop_does() -> None:
    def start(rank, transport):
        model = make_model()
        loop = attach("diloco", model, steps=20, transport=transport, num_workers=2, averages_gradients=True)
        averages = loop.averages_gradients
        model(batch(rank, 0)).square().mean().backward()
        loop.average_gradients(model.parameters())
        reports = loop.step()
        loop.close()
        plain = attach("diloco", make_model(), steps=20, transport=Local(LocalWorld(1), 0))
        plain.step()
        plain.close()
        return averages, [report.fragment for report in reports]

    assert run_workers(LocalWorld(2), start) == [(True, ["gradients"])] * 2
