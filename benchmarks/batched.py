"""Whole runs in one process: the inner steps of all workers as one computation, and an outer loop for each of them.

A small model keeps a core busy with calling kernels, not with computing, so many workers take turns in vain. Here the
weights of all workers lie in one tensor [workers, ...] a parameter, one forward and backward pass takes all their
batches, and one optimizer steps all of them. Every worker has its own `OuterLoop`, over views of its weights, through
`transport/local.py`. Data, batches, recipes, schedules and the evaluation are those of `isthmus train`, and so is the
result, up to the order of sums (tests/test_batched_runs.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from isthmus.config import RunConfig
from isthmus.core import SyncReport
from isthmus.data import DataSet, open_batches
from isthmus.inner import INNER_OPTIMIZERS, LR_SCHEDULES
from isthmus.inner.step import Batch
from isthmus.models import ModelSpec
from isthmus.outer.gradients import GRADIENTS
from isthmus.recipes import load_config
from isthmus.spec import build
from isthmus.train import assemble
from isthmus.train.evaluate import evaluate
from isthmus.train.method import OuterLoopMethod
from isthmus.transport.local import Local, LocalWorld


@dataclass
class RunResult:
    """What a run ends with, and what its syncs reported."""

    loss: float
    losses: dict[int, float]  # evaluation loss by inner steps
    sent_bytes: int  # by a worker
    cosines: list[tuple[int, float]] = field(default_factory=list)  # inner steps, and the mean over workers
    norms: list[tuple[int, float]] = field(default_factory=list)  # of the mean pseudo-gradient


class Stacked(nn.Module):
    """A layer of all workers: its weights are [workers, ...], its input [workers x batch, ...]."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.num_workers, self.like = len(layers), {"layer": layers[0]}  # in a dict: no submodule
        for name, _ in layers[0].named_parameters():
            own = [getattr(layer, name) for layer in layers]
            stack = nn.Parameter(torch.stack([param.detach() for param in own]))
            stack.grad = torch.zeros_like(stack)
            for number, param in enumerate(own):
                param.data, param.grad = stack.data[number], stack.grad[number]
            self.register_parameter(name, stack)
        if getattr(layers[0], "bias", True) is None:
            self.bias = None

    def by_worker(self, values: torch.Tensor, kept: int) -> torch.Tensor:
        """Reshape [workers x batch, ...] to [workers, rows, last `kept` dimensions]."""
        return values.reshape(self.num_workers, -1, *values.shape[values.ndim - kept :])


class StackedLinear(Stacked):
    """`nn.Linear` of all workers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        rows, weight = self.by_worker(x, 1), self.weight.mT
        y = torch.bmm(rows, weight) if self.bias is None else torch.baddbmm(self.bias[:, None], rows, weight)
        return y.view(*x.shape[:-1], y.shape[-1])


class StackedLayerNorm(Stacked):
    """`nn.LayerNorm` of all workers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        layer = self.like["layer"]
        rows = self.by_worker(nn.functional.layer_norm(x, layer.normalized_shape, eps=layer.eps), 1)
        return torch.addcmul(self.bias[:, None], rows, self.weight[:, None]).view(x.shape)


class StackedEmbedding(Stacked):
    """`nn.Embedding` of all workers."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # noqa: D102
        starts = torch.arange(self.num_workers, device=ids.device)[:, None] * self.weight.shape[1]
        rows = nn.functional.embedding(self.by_worker(ids, 0) + starts, self.weight.flatten(0, 1))
        return rows.view(*ids.shape, -1)


STACKED: dict[type, type[Stacked]] = {
    nn.Linear: StackedLinear,
    nn.LayerNorm: StackedLayerNorm,
    nn.Embedding: StackedEmbedding,
}


def stack(models: list[nn.Module]) -> nn.Module:
    """Return one module over all models' parameters, which become views of its own.

    Raises:
        TypeError: a layer with parameters is none of those that can be stacked.
    """
    stacked = copy.deepcopy(models[0])
    for name, layer in list(models[0].named_modules()):
        if next(layer.parameters(recurse=False), None) is None:
            continue
        if type(layer) not in STACKED:
            raise TypeError(f"{name} is a {type(layer).__name__}, which cannot be stacked over workers")
        stacked.set_submodule(name, STACKED[type(layer)]([model.get_submodule(name) for model in models]))
    return stacked


class Shares:
    """What each worker reads in a step: equal shares of one data set that has an order, as in `isthmus train`."""

    name: str  # in the names of files
    weights: list[float] | None = None  # each worker's share of the mean; None: equal ones

    def open(self, config: RunConfig, spec: ModelSpec) -> list[DataSet]:
        """Return the data sets, each of which has an equal part in the samples of a step."""
        return [assemble.open_data(config, spec)]

    def order(self, num_workers: int, batch_size: int) -> torch.Tensor:
        """Return which of a step's samples, of one data set behind the other, each worker reads, in rank order."""
        return torch.arange(num_workers * batch_size)


@dataclass(frozen=True)
class Domains(Shares):
    """Texts of different kinds: each worker reads one, or the same samples are dealt to all workers alike."""

    sources: tuple[str, ...]
    dealt: bool

    @property
    def name(self) -> str:  # noqa: D102
        return "dealt" if self.dealt else "domains"

    def open(self, config: RunConfig, spec: ModelSpec) -> list[DataSet]:  # noqa: D102
        own = [config.model_copy(update={"data": {**config.data, "source": source}}) for source in self.sources]
        return [assemble.open_data(each, spec) for each in own]

    def order(self, num_workers: int, batch_size: int) -> torch.Tensor:  # noqa: D102
        order = super().order(num_workers, batch_size)
        return order.view(-1, num_workers).T.flatten() if self.dealt else order  # the first to the first worker


@dataclass(frozen=True)
class Amounts(Shares):
    """Shares of one data set that are not equal: the samples of every worker in a step.

    All workers have as many rows in the stacked computation: where one has fewer samples it repeats each of them
    equally often, which leaves the mean gradient what it is.
    """

    rows: tuple[int, ...]
    weighted: bool  # by these numbers, in the mean over workers

    @property
    def name(self) -> str:  # noqa: D102
        return "-".join(["rows", *map(str, self.rows), *(["weighted"] if self.weighted else [])])

    @property
    def weights(self) -> list[float] | None:  # noqa: D102
        return [number / sum(self.rows) for number in self.rows] if self.weighted else None

    def order(self, num_workers: int, batch_size: int) -> torch.Tensor:  # noqa: D102
        own, num_rows = super().order(num_workers, batch_size).split(self.rows), math.lcm(*self.rows)
        return torch.cat([numbers.repeat(num_rows // len(numbers)) for numbers in own])


class Workers:
    """All workers of a run: their models, their optimizer, and the batches they read."""

    def __init__(self, config: RunConfig, shares: Shares | None = None) -> None:
        self.config, spec = config, assemble.build_model_spec(config)
        self.shares = shares or Shares()
        self.data_sets = self.shares.open(config, spec)
        self.device = assemble.choose_device()
        first = spec.build(config.train.seed).to(self.device)
        averages_gradients = config.outer.schedule is None  # then all workers have one model
        self.num_models = 1 if averages_gradients else config.train.workers
        self.models = [copy.deepcopy(first) for _ in range(self.num_models)]
        self.build_steps()

    def build_steps(self) -> None:
        """Build what takes the inner steps."""
        config, self.stacked = self.config, stack(self.models)
        everything = nn.ModuleDict({str(number): model for number, model in enumerate(self.models)})
        self.optimizer = build(INNER_OPTIMIZERS, config.inner.optimizer).build(everything)
        self._peak_lrs = [group["lr"] for group in self.optimizer.param_groups]
        precision = getattr(torch, config.inner.precision)
        self._autocast = torch.autocast(self.device.type, precision, enabled=precision != torch.float32)
        self._lr_factor = build(LR_SCHEDULES, config.inner.lr_schedule).over(config.train.steps)

    def open_batches(self) -> Iterator[Batch]:
        """Yield the batches of all workers, one behind the other."""
        train, size = self.config.train, self.config.inner.batch_size
        order, part = self.shares.order(train.workers, size), train.workers * size // len(self.data_sets)
        own = [open_batches(data_set, train.seed, part, worker=0, num_workers=1) for data_set in self.data_sets]
        for batches in zip(*own):  # noqa: B905 (none of them ends)
            yield {name: torch.cat([batch[name] for batch in batches])[order] for name in batches[0]}

    def train_step(self, step: int, batch: Batch, outer: OuterLoops | None = None) -> None:
        """Take one inner step of all workers, whose outer loops may average their gradients."""
        factor = self._lr_factor(step)
        for group, peak in zip(self.optimizer.param_groups, self._peak_lrs, strict=True):
            group["lr"] = peak * factor
        grads = [param.grad for param in self.stacked.parameters()]
        torch._foreach_zero_(grads)
        with self._autocast:
            loss = self.stacked({name: tensor.to(self.device) for name, tensor in batch.items()})
        (loss * self.num_models).backward()  # the sum of the workers' means
        if outer is not None:
            outer.each(lambda loop, model: loop.average_gradients(model.parameters()), self.models)
        self._clip(grads)
        self.optimizer.step()

    def _clip(self, grads: list[Any]) -> None:
        norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).norm(dim=0)
        if not norms.isfinite().all():
            raise ValueError("a gradient is not finite")
        if self.config.inner.clip_norm is not None:
            factors = (self.config.inner.clip_norm / (norms + 1e-6)).clamp(max=1)
            for grad in grads:
                grad.mul_(factors.view(-1, *[1] * (grad.ndim - 1)))

    def evaluate(self) -> float:
        """Return the evaluation loss of the first worker's model, the mean over data sets."""
        return self.measure()["loss"]

    def measure(self) -> dict[str, float]:
        """Return all that an evaluation of the first worker's model finds, the means over data sets."""
        size, found = self.config.inner.batch_size, list[dict[str, float]]()
        for data_set in self.data_sets:
            batches = data_set.validation(size, self.config.train.eval_batches * size)
            found.append(evaluate(self.models[0], batches, self.device))
        return {name: sum(each[name] for each in found) / len(found) for name in found[0]}


class OuterLoops:
    """The outer loops of all workers, a thread each."""

    def __init__(self, workers: Workers) -> None:
        self._pool = ThreadPoolExecutor(workers.num_models)
        world = LocalWorld(workers.num_models, weights=workers.shares.weights)
        pairs = [(model, Local(world, rank)) for rank, model in enumerate(workers.models)]
        config = workers.config
        built = self._pool.map(lambda pair: assemble.build_outer_loop(config, *pair), pairs)
        self.loops: list[OuterLoopMethod] = list(built)

    def step(self) -> list[list[SyncReport]]:
        """Return the reports of every worker."""
        return self.each(lambda loop, _: loop.step(), self.loops)

    def finish(self) -> list[list[SyncReport]]:
        """End the run; return the reports of every worker."""
        return self.each(lambda loop, _: loop.finish(), self.loops)

    def close(self) -> None:
        """End the threads."""
        self.each(lambda loop, _: loop.close(), self.loops)
        self._pool.shutdown()

    def each(self, function: Callable[[OuterLoopMethod, Any], Any], items: Iterable[Any]) -> list[Any]:
        """Return what a function returns of every worker's outer loop and item, each on a thread of its own."""
        return list(self._pool.map(function, self.loops, items))


def train(workers: Workers) -> RunResult:
    """Run workers to the end of their configuration; return what came of it."""
    config, result = workers.config, RunResult(0.0, {}, 0)
    steps = zip(range(config.train.steps), workers.open_batches(), strict=False)
    if config.outer.schedule is None:
        for step, batch in steps:
            workers.train_step(step, batch)
        result.loss = workers.evaluate()
        return result
    with closing(OuterLoops(workers)) as outer:
        first = outer.loops[0]
        for step, batch in steps:
            workers.train_step(step, batch, outer)
            _note(result, step + 1, outer.step())
            if (step + 1) % (config.train.eval_every or config.train.steps) == 0 and step + 1 < config.train.steps:
                with first.anchored():
                    result.losses[step + 1] = workers.evaluate()
        _note(result, config.train.steps, outer.finish())
        with first.anchored():
            result.loss = workers.evaluate()
    return result


def _note(result: RunResult, step: int, reports: list[list[SyncReport]]) -> None:
    """Add one step's reports, of every worker."""
    for of_sync in zip(*reports, strict=True):
        if not all(report.committed for report in of_sync):
            raise ValueError(f"a sync was refused: {of_sync[0].reason}")
        result.sent_bytes += of_sync[0].sent_bytes
        if of_sync[0].fragment == GRADIENTS:
            continue
        result.cosines.append((step, sum(report.cosine for report in of_sync) / len(of_sync)))
        result.norms.append((step, of_sync[0].norm))


def run(config: Path, overrides: list[str], shares: Shares | None = None) -> RunResult:
    """Train a configuration file with overrides, with one thread: several of them run beside one another."""
    torch.set_num_threads(1)
    # Backwards a CPU's fused attention takes seven times as long in bfloat16 as in float32.
    with nullcontext() if torch.cuda.is_available() else sdpa_kernel(SDPBackend.MATH):
        return train(Workers(load_config(config, overrides), shares))
