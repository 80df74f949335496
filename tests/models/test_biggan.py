"""BigGAN: its sizes, its losses against the formulas, and what it keeps of itself."""

import pytest
import torch
from torch import nn

from isthmus.core import UserError, buffer_rules
from isthmus.models.biggan import BigGAN, MovingAverage

TINY = BigGAN(num_classes=4, width=8, chunk_size=4, class_size=6)


def batch_of(size: int = 6, spec: BigGAN = TINY, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (size, spec.num_channels, spec.image_size, spec.image_size)
    labels = torch.randint(spec.num_classes, (size,), generator=generator)
    return {"image": torch.rand(shape, generator=generator) * 2 - 1, "label": labels}


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def normed(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose weights are spectrally normalised, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "parametrizations")}


def largest_singular_values(model: nn.Module) -> list[float]:
    """Of all weights as the networks use them: 1 where spectral norm knows the largest exactly."""
    with torch.no_grad():
        return [torch.linalg.matrix_norm(module.weight.flatten(1), 2).item() for module in normed(model).values()]


def test_the_papers_size_has_the_number_of_weights_that_the_authors_code_prints():
    spec = BigGAN(image_size=128, num_channels=3, num_classes=1000, width=96, chunk_size=20, class_size=128)
    with torch.device("meta"):
        model = spec.build()
    assert model.generator.latent_size == 120
    assert sum(param.numel() for param in model.generator.parameters()) == 70_433_988
    assert sum(param.numel() for param in model.discriminator.parameters()) == 87_982_370


@pytest.mark.parametrize("image_size", [8, 16, 64])
def test_images_have_the_size_asked_for(image_size):
    spec = BigGAN(image_size=image_size, num_channels=3, num_classes=4, width=4, chunk_size=4, class_size=6)
    model, batch = spec.build(), batch_of(spec=spec)
    images = model.generator(model.draw(batch["label"]), batch["label"])
    assert images.shape == batch["image"].shape
    assert images.abs().max() <= 1
    assert model.discriminator(images, batch["label"]).shape == (6,)
    assert len(model.generator.blocks) == image_size.bit_length() - 3


def test_equal_seeds_give_equal_weights_and_leave_the_generator_alone():
    state = torch.get_rng_state()
    first = TINY.build(seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    again, other = TINY.build(seed=3).state_dict(), TINY.build(seed=4).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["generator.classes.weight"], other["generator.classes.weight"])


def test_the_class_and_every_chunk_change_the_image():
    model = TINY.build().eval()
    labels = torch.zeros(1, dtype=torch.int64)
    latents = torch.ones(1, model.generator.latent_size)
    before = model.generator(latents, labels)
    assert not torch.allclose(model.generator(latents, labels + 1), before)
    for start in range(0, model.generator.latent_size, TINY.chunk_size):
        changed = latents.clone()
        changed[:, start : start + TINY.chunk_size] = -1
        assert not torch.allclose(model.generator(changed, labels), before)


def test_scores_of_two_classes_differ_by_a_projection_of_the_features():
    model = TINY.build().eval()
    features = []
    model.discriminator.score.register_forward_pre_hook(lambda module, inputs: features.append(inputs[0]))
    images = batch_of()["image"]
    scores = [model.discriminator(images, torch.full((6,), label)) for label in (0, 1)]
    table = model.discriminator.classes.weight
    torch.testing.assert_close(scores[1] - scores[0], features[0] @ (table[1] - table[0]))


def test_losses_are_those_of_the_paper():
    model, batch = TINY.build().eval(), batch_of()
    torch.manual_seed(1)
    images = model.generator(model.draw(batch["label"]), batch["label"])
    real, fake = model.discriminator(batch["image"], batch["label"]), model.discriminator(images, batch["label"])
    hinge = torch.clamp(1 - real, min=0).mean() + torch.clamp(1 + fake, min=0).mean()
    overlap = torch.zeros(())
    for name, param in model.generator.named_parameters():
        if param.ndim > 1 and name != "classes.weight":
            rows = param.reshape(len(param), -1)
            overlap = overlap + ((rows @ rows.T) * (1 - torch.eye(len(rows)))).norm() ** 2
    torch.manual_seed(1)
    torch.testing.assert_close(model.discriminator_loss(batch), hinge)
    torch.manual_seed(1)
    torch.testing.assert_close(model.generator_loss(batch), -fake.mean() + 1e-4 * overlap)
    assert 1e-4 * overlap > 1e-6


def test_each_loss_gives_a_gradient_to_its_own_network_only():
    model = TINY.build()
    for loss, trained, other in (
        (model.discriminator_loss, model.discriminator, model.generator),
        (model.generator_loss, model.generator, model.discriminator),
    ):
        model.zero_grad()
        loss(batch_of()).backward()
        assert all(param.grad is not None for param in trained.parameters())
        assert all(param.grad is None for param in other.parameters())
        assert all(param.requires_grad for param in model.parameters())


def test_every_weight_with_filters_is_normed_but_for_the_shared_embedding():
    model = TINY.build()
    assert all(value == pytest.approx(1, abs=0.02) for value in largest_singular_values(model))
    bare = {name for name, param in model.named_parameters() if param.ndim > 1 and "parametrizations" not in name}
    assert bare == {"generator.classes.weight"}


def test_every_buffer_has_its_rule():
    rules = buffer_rules(TINY.build())
    of = {rule: {name for name, its in rules.items() if its == rule} for rule in ("averaged", "replicated", "local")}
    assert all(name.startswith("generator.") and "running_" in name for name in of["averaged"])
    assert len(of["averaged"]) == 2 * 3  # two norms in the block, one after it
    assert all(name.startswith("average.") for name in of["replicated"])
    assert all(name.endswith(("._u", "._v", "num_batches_tracked")) for name in of["local"])


def test_the_average_weighs_every_sync_by_its_age():
    module = nn.Linear(2, 3)
    average = MovingAverage(module, decay=0.9)
    seen, steps = [], [1, 4, 2]
    for num_steps in steps:
        nn.init.normal_(module.weight)
        seen.append(module.weight.detach().clone())
        average.follow(module, num_steps)
    ages = [sum(steps[i + 1 :]) for i in range(3)]
    shares = [0.9**age * (1 - 0.9**num_steps) for age, num_steps in zip(ages, steps, strict=True)]
    expected = sum(share * value for share, value in zip(shares, seen, strict=True)) / (1 - 0.9 ** sum(steps))
    torch.testing.assert_close(average.weight, expected)
    other = nn.Linear(2, 3)
    average.copy_to(other)
    assert torch.equal(other.weight, average.weight)


def test_many_steps_at_once_are_as_many_single_ones():
    module = nn.Linear(2, 3)
    once, often = MovingAverage(module, decay=0.99), MovingAverage(module, decay=0.99)
    nn.init.normal_(module.weight)
    for average in (once, often):
        average.follow(module, 1)
    nn.init.normal_(module.weight)
    once.follow(module, 20)
    for _ in range(20):
        often.follow(module, 1)
    torch.testing.assert_close(once.weight, often.weight)


def test_the_averaged_generator_is_a_copy_with_standing_statistics():
    model = TINY.build()
    nn.init.normal_(model.generator.first.parametrizations.weight.original)
    model.after_sync(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    nn.init.normal_(model.generator.first.parametrizations.weight.original)
    generator = model.averaged_generator(torch.arange(64) % 4)
    assert not generator.training
    original = generator.first.parametrizations.weight.original
    torch.testing.assert_close(original, before["generator.first.parametrizations.weight.original"])
    assert all(value == pytest.approx(1, abs=0.02) for value in largest_singular_values(generator))
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"generator.first.parametrizations.weight.original"}
    # what leaves the standing norm has mean 0 and variance 1 over many images
    outputs = []
    generator.norm.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.no_grad():
        labels = torch.arange(512) % 4
        generator(model.draw(labels), labels)
    means, variances = outputs[0].mean(dim=(0, 2, 3)), outputs[0].var(dim=(0, 2, 3))
    assert means.abs().max() < 0.2
    assert (variances - 1).abs().max() < 0.3


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"image_size": 12}, "image_size is 12; choose a power of two"),
        ({"image_size": 4}, "image_size is 4"),
        ({"width": 0}, "width is 0"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"average_decay": 1.0}, "average_decay is 1.0; choose at least 0 and below 1"),
        ({"orthogonal": -1.0}, "orthogonal is -1.0; choose at least 0"),
    ],
)
def test_bad_sizes_are_refused(bad, match):
    with pytest.raises(UserError, match=match):
        BigGAN(**bad)
