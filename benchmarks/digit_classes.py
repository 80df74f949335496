"""Ten workers with images of one digit each, beside the same images dealt to all alike: the ResNet of the examples.

Batch norm then normalises by the mean and variance of a worker's own digit. To tell what that does from all else, the
final model is evaluated twice: with the statistics that the run ends with, and with those of ten batches of all digits.
Group norm has none of this: what is left then is what digits of one's own cost between two syncs.

Runs are processes of their own, one for each core at a time; what is in runs/digit_classes already is not run again:

    python -m benchmarks.digit_classes --seeds 0 1 2
    python -m benchmarks.digit_classes --norm group --local-steps 5
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import batched, ladder
from benchmarks.results import write
from isthmus.config import RunConfig
from isthmus.data import DataSet
from isthmus.data.sample_order import NumberedDataSet, NumberedSamples
from isthmus.inner.step import Batch
from isthmus.models import ModelSpec
from isthmus.recipes import load_config
from isthmus.train import assemble
from isthmus.train.method import OuterLoopMethod

CONFIG = Path(__file__).parents[1] / "examples/resnet.yaml"
OUTPUT = Path("runs/digit_classes")
LR = 1e-2  # the example's
DIGITS = tuple("0123456789")
NUM_BATCHES = 10  # of all workers, for new statistics
SETTINGS = (
    f"train.workers={len(DIGITS)}",
    "train.eval_every=0",
    "inner.micro_batch_size=32",  # a worker's batch: so `ddp` in one process normalises no more images together
)


class Digits(batched.Domains):
    """Images of different digits, which are the sources."""

    def open(self, config: RunConfig, spec: ModelSpec) -> list[DataSet]:  # noqa: D102
        whole = assemble.open_data(config, spec)
        parts = (whole.train, whole.held_out)
        return [NumberedDataSet(*(only(part, int(digit)) for part in parts), whole.sizes) for digit in self.sources]


def only(samples: NumberedSamples, label: int) -> NumberedSamples:
    """Return the samples with a label."""
    numbers = [number for number in range(len(samples)) if samples.file(number)[1] == label]
    names = [samples.names[number] for number in numbers]
    fingerprint = f"{samples.fingerprint} {label}"
    return NumberedSamples(names, lambda number: samples.file(numbers[number]), samples.decoder, fingerprint)


class WorkersInTurn(batched.Workers):
    """Workers whose models are trained one by one: batch norm cannot be stacked."""

    def build_steps(self) -> None:
        """Build the inner step of every model."""
        self.inner_steps = [assemble.build_inner_step(self.config, model) for model in self.models]

    def train_step(self, step: int, batch: Batch, outer: batched.OuterLoops | None = None) -> None:
        """Take one inner step of every model; they count the steps themselves."""
        shares = zip(*(tensor.chunk(self.num_models) for tensor in batch.values()), strict=True)
        own = [dict(zip(batch, tensors, strict=True)) for tensors in shares]
        if outer is None:
            for inner_step, share in zip(self.inner_steps, own, strict=True):
                inner_step(share)
            return

        def train(loop: OuterLoopMethod, pair: tuple[Any, Batch]) -> None:
            inner_step, share = pair
            inner_step.average_gradients = loop.average_gradients
            inner_step(share)

        outer.each(train, list(zip(self.inner_steps, own, strict=True)))


@torch.no_grad()
def renew_statistics(model: nn.Module, batches: Iterable[Any]) -> None:
    """Have batch norm normalise by the means over these batches from now on."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None  # then every batch weighs the same
    model.train()
    for batch in batches:
        model(batch)


@dataclass(frozen=True)
class Run:
    """One run of the example."""

    recipe: str
    inside: str
    dealt: bool
    seed: int
    norm: str
    local_steps: int

    def result(self) -> dict[str, Any]:
        """Train, unless that has been done; return what came of it."""
        share = "dealt" if self.dealt else "digits"
        path = OUTPUT / f"{self.recipe}-{self.inside}-{share}-seed{self.seed}-{self.norm}-H{self.local_steps}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._train()))
        facts = {"recipe": self.recipe, "inside": self.inside, "dealt": self.dealt, "seed": self.seed}
        return facts | json.loads(path.read_text())

    def _train(self) -> dict[str, float]:
        torch.set_num_threads(1)
        lr = 1.4 * LR if self.recipe in ladder.SPARSE else LR
        optimizer = f"inner.optimizer={{type: {self.inside}, lr: {lr:.6f}}}"
        settings = [f"outer.recipe={self.recipe}", optimizer, f"train.seed={self.seed}", *SETTINGS]
        settings += [f"model.norm={self.norm}"]
        settings += [] if self.recipe == "ddp" else [f"outer.schedule.local_steps={self.local_steps}"]
        workers = WorkersInTurn(load_config(CONFIG, settings), Digits(DIGITS, self.dealt))
        sent_bytes = batched.train(workers).sent_bytes
        found = workers.measure()
        renew_statistics(workers.models[0], islice(workers.open_batches(), NUM_BATCHES))
        renewed = {f"{name}_renewed": value for name, value in workers.measure().items()}
        return {**found, **renewed, "sent_bytes": sent_bytes}


def row(results: list[dict[str, Any]]) -> list[str]:
    """Return the line of a table for the runs of all seeds."""
    first, accuracies = results[0], [100 * result["accuracy"] for result in results]
    measured = [name for name, value in first.items() if isinstance(value, float)] + ["sent_bytes"]
    means = {name: statistics.mean(result[name] for result in results) for name in measured}
    return [
        first["recipe"],
        first["inside"],
        "dealt" if first["dealt"] else "a digit each",
        f"{means['loss']:.4f}",
        f"{means['accuracy']:.1%}",
        f"{min(accuracies):.1f} to {max(accuracies):.1f}" if len(results) > 1 else "-",
        f"{means['loss_renewed']:.4f}",
        f"{means['accuracy_renewed']:.1%}",
        f"{means['sent_bytes'] / 1e6:.2f}",
    ]


def main() -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--norm", choices=["batch", "group"], default="batch")
    parser.add_argument("--local-steps", type=int, default=20)
    arguments = parser.parse_args()
    seeds, norm, local_steps = arguments.seeds, arguments.norm, arguments.local_steps
    recipes = [(name, inside) for inside, names in ladder.METHODS.items() for name in ("ddp", *names)]
    cases = [Run(name, inside, dealt, 0, norm, local_steps) for name, inside in recipes for dealt in (True, False)]
    plan = [replace(case, seed=seed) for case in cases for seed in seeds]
    found = dict(zip(plan, ladder.run_all(plan), strict=True))
    rows = [row([found[replace(case, seed=seed)] for seed in seeds]) for case in cases]
    columns = ["recipe", "inside", "of a worker", "loss", "accuracy", "by seed, %", "loss, new statistics",
               "accuracy, new statistics", "MB sent"]  # fmt: skip
    notes = [
        f"{norm} norm, H = {local_steps}",
        f"{CONFIG.name} with {len(DIGITS)} workers, which have their batches from the same images in each step",
        f"means over seeds {seeds}, and over the digits of the validation images, by worker 0's model at the end",
        f"new statistics: batch norm's means and variances of {NUM_BATCHES} batches of all workers' images together",
        "ddp normalises each worker's images for themselves; its statistics are those of all workers' batches, one "
        "worker after the other, and would be worker 0's own in `isthmus train`",
    ]
    print(
        write(
            f"digit-classes-{norm}-norm-H{local_steps}",
            "Images of one digit each, ResNet",
            columns,
            rows,
            notes,
            list(found.values()),
        )
    )


if __name__ == "__main__":
    main()
