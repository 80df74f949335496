"""BigGAN through whole runs of real processes: both networks in one outer loop, every buffer by its rule."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from worker_processes import ROOT, Job, events, final_weights, run, run_jobs, summary

from isthmus.core import buffer_rules
from isthmus.models.biggan import BigGAN
from isthmus.parallel.state import load_local_model
from isthmus.train.checkpoint import Checkpoints
from isthmus.transport.peers import ring_bytes

pytestmark = pytest.mark.processes

RECIPES = ("streaming", "ddp")  # an outer loop with several fragments, and none
SPEC = BigGAN(num_classes=4, width=8, chunk_size=4, class_size=6, average_decay=0.9)
ADAM = "{type: adamw, lr: 2.0e-3, betas: [0.0, 0.99], weight_decay: 0.0}"
GAN = [
    "model={type: biggan, num_classes: 4, width: 8, chunk_size: 4, class_size: 6, average_decay: 0.9}",
    "data={type: 'tests.blobs:Blobs'}",
    f"inner.optimizer={{type: adversarial, generator: {ADAM}, discriminator: {ADAM}, discriminator_steps: 2}}",
    "inner.batch_size=32",
    "train.eval_batches=4",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gan")
    jobs = [Job([*GAN, f"outer.recipe={name}", f"train.run_dir={folder / name}"]) for name in RECIPES]
    assert run_jobs(jobs, 2) == [0, 0]
    return folder


def final_state(folder: Path, worker: int) -> dict[str, torch.Tensor]:
    return Checkpoints(folder / "checkpoints", worker, {}).load(30)["model"]


@pytest.mark.parametrize("name", RECIPES)
def test_buffers_are_as_their_rules_say(runs, name):
    """The last step of a run is a sync: nothing has moved since."""
    states = [final_state(runs / name, worker) for worker in range(2)]
    rules = buffer_rules(SPEC.build())
    equal = {key for key in states[0] if torch.equal(states[0][key], states[1][key])}
    assert {key for key in states[0] if key not in rules} <= equal
    assert {key for key, rule in rules.items() if rule == "replicated"} <= equal
    averaged = {key for key, rule in rules.items() if rule == "averaged"}
    assert not averaged & equal if name == "ddp" else averaged <= equal
    vectors = {key for key, value in states[0].items() if key.endswith(("_u", "_v")) and value.numel() > 1}
    assert vectors
    # each worker's own power iterations, of weights that are equal at every step with ddp only
    assert vectors <= equal if name == "ddp" else not vectors & equal


@pytest.mark.parametrize("name", RECIPES)
def test_spectral_norm_holds_after_a_sync(runs, name):
    """Singular vectors stay each worker's own: they are right to a few per cent for the anchors, soon exactly."""
    model = SPEC.build()
    load_local_model(model, final_state(runs / name, 1))
    assert all(value < 1.1 for value in norms(model.eval()))
    model.train()
    labels = torch.arange(8) % 4
    for _ in range(10):
        model.discriminator(model.generator(model.draw(labels), labels), labels)
    assert all(value < 1.03 for value in norms(model.eval()))


def norms(model: torch.nn.Module) -> list[float]:
    """The largest singular values of all normed weights."""
    weights = [module.weight for module in model.modules() if hasattr(module, "parametrizations")]
    return [torch.linalg.matrix_norm(weight.detach().flatten(1), 2).item() for weight in weights]


@pytest.mark.parametrize("name", RECIPES)
def test_the_average_is_that_of_what_the_syncs_left(runs, name):
    """It is what weighs the last anchors most, and has weighed all 30 steps."""
    state = final_state(runs / name, 0)
    assert state["average.seen"].item() == pytest.approx(1 - 0.9**30, rel=1e-6)
    weight = "generator.first.parametrizations.weight.original"
    average = state["average." + weight.removeprefix("generator.").replace(".", "/")]
    first = SPEC.build(0).state_dict()[weight]
    assert (average - state[weight]).norm() < (average - first).norm()
    assert not torch.equal(average, state[weight])


@pytest.mark.parametrize("name", RECIPES)
def test_images_get_better(runs, name):
    distances = [event["frechet_distance"] for event in events(runs / name, 0, "eval")]
    assert len(distances) == 3
    assert distances[-1] < distances[0]
    assert {event["of"] for event in events(runs / name, 0, "eval")} == {"model" if name == "ddp" else "anchor"}


def test_ddp_sends_each_gradient_once(runs):
    model = SPEC.build()
    sizes = [sum(p.numel() for p in network.parameters()) for network in (model.discriminator, model.generator)]
    a_step = ring_bytes(4 * (2 * sizes[0] + sizes[1]), 2)
    assert summary(runs / "ddp")["sent_bytes"] == [30 * a_step] * 2


def test_identity_37_killed_at_a_random_step_and_resumed_nothing_differs(runs, tmp_path):
    worker, step = random.randrange(2), random.randrange(1, 31)
    overrides = [*GAN, "outer.recipe=streaming"]
    codes = run(tmp_path, *overrides, signal_before_step=(worker, step, signal.SIGKILL))
    assert codes[worker] == -signal.SIGKILL
    assert run(tmp_path, *overrides, resume=True) == [0, 0], f"worker {worker} before step {step}"
    for each in range(2):
        assert events(tmp_path, each) == events(runs / "streaming", each)
        assert final_weights(tmp_path, each) == final_weights(runs / "streaming", each)


def test_the_example_draws_a_sheet(runs):
    from matplotlib.image import imread

    command = [sys.executable, str(ROOT / "examples/biggan_sheet.py"), str(runs / "streaming")]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}  # of the run's own data
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    sheet = imread(runs / "streaming/sheet.png")[..., 0]
    assert sheet.shape == (4 * 80, 12 * 80)
    assert sheet.std() > 0.05
