"""The adversarial step against the same written out by hand."""

import copy
import io
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from isthmus.core import UserError
from isthmus.inner import AdamW, Adversarial, AdversarialStep, Cosine
from isthmus.inner.micro_batch import find_fastest
from isthmus.models.biggan import BigGAN
from isthmus.recipes import load_config
from isthmus.train.assemble import build_inner_step

SPEC = Adversarial(
    generator=AdamW(1e-3, (0.0, 0.99), weight_decay=0.0), discriminator=AdamW(2e-3, (0.5, 0.99), weight_decay=0.0)
)


class Pair(nn.Module):
    """Two small networks in float64 without batch norm; what they draw is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.double()

    def discriminator_loss(self, batch):
        fake = self.generator(batch["z"]).detach()
        return (1 - self.discriminator(batch["x"])).relu().mean() + (1 + self.discriminator(fake)).relu().mean()

    def generator_loss(self, batch):
        frozen = {name: param.detach() for name, param in self.discriminator.named_parameters()}
        return -torch.func.functional_call(self.discriminator, frozen, self.generator(batch["z"])).mean()


def batch_of(size: int = 10, seed: int = 0, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, z = (torch.randn(size, width, generator=generator, dtype=torch.float64) for width in (3, 2))
    return {"x": x.sin() * scale, "z": z}


def images_of(size: int = 8, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand((size, 1, 8, 8), generator=generator) * 2 - 1
    return {"image": images, "label": torch.randint(4, (size,), generator=generator)}


def tiny_gan() -> nn.Module:
    return BigGAN(num_classes=4, width=8, chunk_size=4, class_size=6).build()


def step_of(model: nn.Module, lr_schedule=lambda step: 1.0, **options) -> AdversarialStep:
    return AdversarialStep(model, SPEC.build(model), lr_schedule, **options)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def by_hand(model: nn.Module, batches: list, clip_norm: float | None = None) -> list[list[float]]:
    """Two steps of the discriminator on the halves of a batch, one of the generator on the second."""
    adam = partial(torch.optim.AdamW, weight_decay=0.0, fused=True)  # another kernel rounds another way
    first = adam(model.discriminator.parameters(), 2e-3, (0.5, 0.99))
    second = adam(model.generator.parameters(), 1e-3, (0.0, 0.99))
    losses = []
    for batch in batches:
        half = (len(batch["label" if "label" in batch else "x"]) + 1) // 2
        halves = [{name: tensor[part] for name, tensor in batch.items()} for part in (slice(half), slice(half, None))]
        turns = [(first, model.discriminator, model.discriminator_loss)] * 2
        turns += [(second, model.generator, model.generator_loss)]
        losses.append([])
        for (optimizer, network, loss_of), part in zip(turns, [*halves, halves[1]], strict=True):
            loss = loss_of(part)
            optimizer.zero_grad()
            loss.backward()
            if clip_norm:
                assert nn.utils.clip_grad_norm_(network.parameters(), clip_norm) > clip_norm
            optimizer.step()
            losses[-1].append(loss.item())
    return losses


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_it_is_two_optimizers_in_turn(clip_norm):
    ours, theirs = Pair(), Pair()
    step = step_of(ours, clip_norm=clip_norm)
    batches = [batch_of(11, seed) for seed in range(5)]
    done = [step(batch) for batch in batches]
    for one, other in zip(done, by_hand(theirs, batches, clip_norm), strict=True):
        assert one["loss"] == pytest.approx((other[0] + other[1]) / 2, rel=1e-9)
        assert one["generator_loss"] == pytest.approx(other[2], rel=1e-9)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-9, atol=1e-12)


def test_biggan_trains_as_by_hand():
    ours, theirs = tiny_gan(), tiny_gan()
    batches = [images_of(8, seed) for seed in range(3)]
    torch.manual_seed(5)
    step = step_of(ours, clip_norm=None)
    done = [step(batch) for batch in batches]
    torch.manual_seed(5)
    expected = by_hand(theirs, batches)
    assert [each["generator_loss"] for each in done] == pytest.approx([each[2] for each in expected], rel=1e-4)
    assert torch.equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("micro_batch_size", [1, 2, 5])
def test_accumulation_equals_the_whole_share(micro_batch_size):
    whole, parts = Pair(), Pair()
    step, in_parts = step_of(whole), step_of(parts, micro_batch_size=micro_batch_size)
    for seed in range(4):
        assert in_parts(batch_of(10, seed))["loss"] == pytest.approx(step(batch_of(10, seed))["loss"], rel=1e-12)
    torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-9, atol=1e-12)


def test_learning_rates_of_both_follow_the_progress_of_the_run():
    schedule = Cosine().over(100)
    step = step_of(Pair(), schedule)
    step.set_progress(60)
    assert step(batch_of())["lr"] == pytest.approx(2e-3 * schedule(60))
    assert [group["lr"] for group in step.optimizer.param_groups] == pytest.approx(
        [2e-3 * schedule(60)] * 2 + [1e-3 * schedule(60)] * 2
    )
    assert step.progress == 61


def test_what_is_not_finite_skips_a_step_of_its_network_only():
    model = Pair()
    step = step_of(model)
    step(batch_of())
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(step.optimizer.state_dict()["state"])
    bad = batch_of(10, 1)
    bad["x"][:] = math.nan
    assert step(bad)["skipped"] == 1.0
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("discriminator."))
    assert not torch.equal(after["generator.0.weight"], before["generator.0.weight"])
    counts = [entries["step"].item() for entries in step.optimizer.state_dict()["state"].values()]
    assert counts == [2.0] * 4 + [2.0] * 4
    assert [entries["step"].item() for entries in state.values()] == [2.0] * 4 + [1.0] * 4
    assert (step.skipped_steps, step.progress) == (2, 2)
    assert step(batch_of(10, 2))["skipped"] == 0.0


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_identity_37_a_resumed_gan_is_the_uninterrupted_one_bitwise(precision):
    def run() -> tuple[nn.Module, AdversarialStep]:
        model = tiny_gan()
        return model, step_of(model, Cosine().over(20), micro_batch_size=3, precision=precision)

    torch.manual_seed(7)
    model, step = run()
    for seed in range(6):
        step(images_of(8, seed))
    file = io.BytesIO()
    torch.save([model.state_dict(), step.state_dict(), torch.get_rng_state()], file)
    expected = [step(images_of(8, seed)) for seed in range(6, 12)]

    torch.manual_seed(8)
    resumed, other = run()
    other(images_of(8, 99))  # whatever it did before is forgotten
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    assert [other(images_of(8, seed)) for seed in range(6, 12)] == expected
    assert all(math.isfinite(each["loss"]) for each in expected)
    assert torch.equal(weights(resumed), weights(model))
    assert weights(model).dtype == torch.float32
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in resumed.state_dict().items())


def test_the_search_for_a_micro_batch_leaves_everything_as_it_was():
    model = tiny_gan()
    before = copy.deepcopy(model.state_dict())
    step = step_of(model)
    step.micro_batch_size = find_fastest(step, images_of(4))
    assert step.discriminator.micro_batch_size == step.generator.micro_batch_size == step.micro_batch_size
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_reduces_each_network_in_its_own_steps(process_group):
    """Real DDP, its reductions counted by a communication hook."""
    plain, model = tiny_gan(), tiny_gan()
    reduced = []

    def wrap(side: nn.Module) -> nn.Module:
        def count(state, bucket):
            reduced.append(bucket.buffer().numel())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ddp = nn.parallel.DistributedDataParallel(side, broadcast_buffers=False)
        ddp.register_comm_hook(None, count)
        return ddp

    for each, options in ((plain, {}), (model, {"wrap": wrap})):
        torch.manual_seed(3)
        step = step_of(each, micro_batch_size=2, **options)
        for seed in range(3):
            step(images_of(8, seed))
    sizes = [sum(p.numel() for p in network.parameters()) for network in (model.discriminator, model.generator)]
    assert reduced == [sizes[0], sizes[0], sizes[1]] * 3
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-5)


GAN = ["model={type: biggan, width: 8}", "inner.optimizer={type: adversarial, discriminator_steps: 3}"]


def test_the_configuration_says_all():
    config = load_config(None, [*GAN, "inner.optimizer.generator={type: adamw, lr: 1.0e-3, betas: [0.0, 0.9]}"])
    optimizer = config.inner.optimizer
    assert optimizer["discriminator_steps"] == 3
    assert (optimizer["generator"]["lr"], optimizer["generator"]["betas"]) == (1e-3, (0.0, 0.9))
    assert (optimizer["discriminator"]["lr"], optimizer["discriminator"]["weight_decay"]) == (2e-4, 0.0)
    step = build_inner_step(config, BigGAN(width=8).build())
    assert step.discriminator_steps == 3
    assert [group["lr"] for group in step.optimizer.param_groups] == [2e-4, 2e-4, 1e-3, 1e-3]


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["inner.optimizer={type: adamw}"], "adamw trains one network, the model has two"),
        (["inner.compile=true"], "adversarial steps are not compiled"),
        (["inner.optimizer.discriminator_steps=0"], "discriminator_steps is 0; choose at least 1"),
        (["inner.optimizer.generator={lr: 0.1}"], r"inner\.optimizer\.generator: expected {type: name"),
        (["inner.optimizer.generator={type: adamm}"], "did you mean 'adamw'"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, match):
    with pytest.raises(UserError, match=match):
        build_inner_step(load_config(None, [*GAN, *overrides]), BigGAN(width=8).build())


def test_one_network_has_no_adversary():
    with pytest.raises(UserError, match="adversarial trains two networks"):
        Adversarial().build(nn.Linear(2, 2))


def test_a_batch_is_at_least_one_sample_a_step():
    with pytest.raises(UserError, match="batch_size is 1, fewer samples than the 2 discriminator_steps"):
        step_of(Pair())(batch_of(1))
