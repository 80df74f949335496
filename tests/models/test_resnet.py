"""ResNet: published sizes, transformers' own loss, what it measures, and batch norm among workers."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from isthmus.compress import Cast
from isthmus.core import SyncSchedule, UserError, buffer_rules, split_strided, split_whole
from isthmus.inner import AdamW, MuonAdamW, SupervisedStep
from isthmus.inner.micro_batch import find_fastest
from isthmus.inner.optimizers import hidden_matrices
from isthmus.models.resnet import ResNet
from isthmus.outer import OuterLoop
from isthmus.train.evaluate import evaluate
from isthmus.transport.local import LocalWorld, run_workers

SMALL = ResNet(image_size=16, num_channels=1, num_classes=4)
# of torchvision's models for ImageNet: docs.pytorch.org/vision/stable/models.html
PUBLISHED = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


def images(spec: ResNet, size: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randn(size, spec.num_channels, spec.image_size, spec.image_size, generator=generator),
        "label": torch.randint(spec.num_classes, (size,), generator=generator),
    }


def statistics(model: nn.Module) -> torch.Tensor:
    return torch.cat([buffer.flatten() for name, buffer in model.named_buffers() if "running" in name])


@pytest.mark.parametrize("depth", PUBLISHED)
def test_published_sizes(depth):
    with torch.device("meta"):
        model = ResNet(depth, image_size=224, num_classes=1000).build()
    assert sum(param.numel() for param in model.parameters()) == PUBLISHED[depth]


def test_a_depth_is_the_number_of_weighted_layers():
    for depth in (8, 18, 50):
        with torch.device("meta"):
            model = ResNet(depth).build()
        layers = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        assert len([name for name in layers if "shortcut" not in name]) == depth


def test_loss_equals_transformers_own():
    model, batch = SMALL.build(), images(SMALL)
    own = copy.deepcopy(model).network(pixel_values=batch["image"], labels=batch["label"]).loss
    torch.testing.assert_close(model(batch), own)


def test_stages_are_the_blocks_of_fragments_and_muon():
    model = ResNet(18).build()
    assert [fragment.name for fragment in split_strided(model, 2)] == ["0", "1"]
    hidden = {id(param) for param in hidden_matrices(model)}
    names = {name for name, param in model.named_parameters() if id(param) in hidden}
    assert names == {
        name
        for name, param in model.named_parameters()
        if param.ndim == 4 and name.startswith("network.resnet.encoder")
    }
    assert len(names) == 19  # 16 filters of blocks and 3 of shortcuts; not the stem, not the head


def test_accuracy_counts_the_right_ones():
    spec = ResNet(image_size=16, num_classes=20)
    model = spec.build().eval()
    batches = [images(spec, 7), images(spec, 4, seed=1)]
    with torch.no_grad():
        found = model.measure(batches)
        first = five = 0
        for batch in batches:
            for image, label in zip(batch["image"], batch["label"].tolist(), strict=True):
                order = model.network(pixel_values=image[None]).logits[0].argsort(descending=True).tolist()
                first += order[0] == label
                five += label in order[:5]
    assert found == {"accuracy": (first, 11), "accuracy_top5": (five, 11)}
    assert 0 < five < 11
    assert set(SMALL.build().eval().measure([images(SMALL)])) == {"accuracy"}


def test_it_learns_and_evaluation_leaves_its_statistics_alone():
    model, batch = SMALL.build(), images(SMALL, 32)
    step = SupervisedStep(model, MuonAdamW().build(model))
    for _ in range(60):
        step(batch)
    before = statistics(model).clone()
    values = evaluate(model, [batch])
    assert values["accuracy"] > 0.9, "random images are learnt by heart"
    assert values["loss"] < 0.5
    assert torch.equal(statistics(model), before)


def test_running_statistics_are_averaged_and_counters_are_not():
    rules = buffer_rules(SMALL.build())
    assert {rule for name, rule in rules.items() if "running_" in name} == {"averaged"}
    assert {rule for name, rule in rules.items() if "num_batches" in name} == {"local"}
    assert len(rules) == 3 * 9  # stem, 3 stages of 2 filters, 2 shortcuts


@pytest.mark.parametrize("split", [split_whole, partial(split_strided, num_fragments=2)])
def test_statistics_become_the_mean_over_the_workers_at_every_round(split):
    start = SMALL.build()
    before, after = [{}, {}], [{}, {}]
    schedule = SyncSchedule(4, 1 if split is split_whole else 2)

    def work(rank, transport):
        model = copy.deepcopy(start)
        step = SupervisedStep(model, MuonAdamW().build(model))
        loop = OuterLoop(split(model), schedule, Cast(), transport, partial(torch.optim.SGD, lr=1.0))
        for number in range(1, 9):
            step(images(SMALL, seed=100 * rank + number))
            before[rank][number] = statistics(model)
            loop.step()
            after[rank][number] = statistics(model)
        return loop.anchor_hash()

    hashes = run_workers(LocalWorld(2), work)
    assert hashes[0] == hashes[1]
    for number in range(1, 9):
        if number % 4 == 0:
            mean = (before[0][number] + before[1][number]) / 2
            torch.testing.assert_close(after[0][number], mean)
            assert torch.equal(after[0][number], after[1][number])
        else:
            assert not torch.equal(after[0][number], after[1][number])


def test_one_image_alone_is_refused_while_training():
    model = SMALL.build()
    with pytest.raises(UserError, match="nothing from one image alone"):
        model(images(SMALL, 1))
    model.eval()(images(SMALL, 1))


def test_the_fastest_micro_batch_is_sought_among_those_that_can_be():
    model = ResNet(image_size=8, num_channels=1).build()  # one pixel is left in the last stage
    step = SupervisedStep(model, AdamW().build(model))
    before = statistics(model).clone()
    assert find_fastest(step, images(ResNet(image_size=8, num_channels=1), 8)) in (2, 4, 8)
    assert torch.equal(statistics(model), before)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"depth": 20}, "depth is 20; choose one of 8, 18, 34, 50, 101, 152"),
        ({"image_size": 0}, "image_size is 0"),
        ({"num_channels": 0}, "num_channels is 0"),
        ({"num_classes": 1}, "num_classes is 1; choose at least 2"),
    ],
)
def test_bad_sizes_are_refused(options, match):
    with pytest.raises(UserError, match=match):
        ResNet(**options)


def test_group_norm_looks_at_one_image():
    spec = ResNet(image_size=16, num_channels=1, num_classes=4, norm="group")
    model = spec.build()
    groups = [layer.num_groups for layer in model.modules() if isinstance(layer, nn.GroupNorm)]
    assert sorted(set(groups)) == [8, 16, 32]
    assert list(model.buffers()) == []
    batch = images(spec, 3)
    alone = [model({name: values[i : i + 1] for name, values in batch.items()}) for i in range(3)]
    torch.testing.assert_close(model(batch), torch.stack(alone).mean())
    filters = dict(SMALL.build().named_parameters())
    assert all(torch.equal(param, filters[name]) for name, param in model.named_parameters())
    with torch.device("meta"):
        assert sum(param.numel() for param in ResNet(50, 224, 3, 1000, "group").build().parameters()) == PUBLISHED[50]


def test_another_norm_is_refused():
    with pytest.raises(UserError, match="model.norm is 'layer'; choose batch or group"):
        ResNet(norm="layer")
