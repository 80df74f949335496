"""One worker of a run, or one rank of it: the loop around inner step and outer loop."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed import HashStore

from isthmus.config import RunConfig, dump
from isthmus.core import State, SyncReport, UserError
from isthmus.data import DataSet, open_batches
from isthmus.inner.micro_batch import find_fastest
from isthmus.inner.pipelined import PipelinedStep
from isthmus.outer import OuterLoop, anchored
from isthmus.parallel.state import load_local_model, local_state, named_tensors, sharded_optimizer_state
from isthmus.train import assemble
from isthmus.train.checkpoint import Checkpoints, NotSaved
from isthmus.train.common_steps import Unsaved, newest_common
from isthmus.train.data_parallel import DataParallel
from isthmus.train.evaluate import evaluate
from isthmus.train.folder import metrics_path, reason_of, write_file, write_summary
from isthmus.train.metrics import MetricsFile, Totals, part_of_summary
from isthmus.train.process import Process, peers_named
from isthmus.train.reshard import Holding, load_resharded
from isthmus.train.stopping import Stopping
from isthmus.train.trackers import Trackers
from isthmus.transport import TransportError
from isthmus.transport.rendezvous import open_store

_LOGGER = logging.getLogger(__name__)


class Trainer:
    """One worker, connected to the others; where it has several ranks, one of them."""

    def __init__(self, config: RunConfig, process: Process, trackers: Trackers) -> None:
        self.config, self.process, self.run_dir = config, process, Path(config.train.run_dir)
        self.trackers = trackers
        self.worker = process.worker
        model_spec = assemble.build_model_spec(config)
        data_set = assemble.open_data(config, model_spec)
        self.device = assemble.choose_device()
        self.model = model_spec.build(config.train.seed).to(self.device)
        self._num_parameters = sum(param.numel() for param in self.model.parameters())
        layout = assemble.layout(config, self.model)  # of the whole model
        stages = assemble.spread(config, model_spec, self.model, process.device_mesh)
        self.stream = self._open_stream(data_set)
        num_samples = config.train.eval_batches * config.inner.batch_size
        validation = data_set.validation(config.inner.batch_size, num_samples) if self.worker == 0 else []
        self.validation = process.own_share(validation)
        folder = self.run_dir / "checkpoints"
        self.checkpoints = Checkpoints(folder, self.worker, layout, process.rank, process.mesh)
        self.totals = Totals()
        self.evaluation: dict[str, float] | None = None
        self.method: OuterLoop | DataParallel = self._build_method()
        self.clock = self.method.transport.now
        self._inner_step_needs_others = isinstance(self.method, DataParallel) or process.mesh.num_ranks > 1
        options = {"wrap": self.method.wrap} if isinstance(self.method, DataParallel) else {}
        self.inner_step = assemble.build_inner_step(config, self.model, process.device_mesh, stages, **options)
        self._metrics_bytes = 0
        self._saved_step = -1
        self._not_saved: NotSaved | None = None  # the last checkpoint could not be written
        self._unsaved = Unsaved(HashStore())
        self._last_position = self.position
        if config.inner.micro_batch_size == "auto":
            (sample,) = data_set.validation(config.inner.batch_size, config.inner.batch_size)
            self.inner_step.micro_batch_size = find_fastest(self.inner_step, sample)
            _LOGGER.info("micro-batches of %s are the fastest here", self.inner_step.micro_batch_size)
        assemble.seed_generators(config.train.seed, process.dropout_seed)

    def restore(self) -> None:
        """Become what the newest checkpoint says that all workers hold undamaged."""
        step = newest_common(self.checkpoints.usable(), self.method.transport)
        if step is None:
            raise UserError(
                f"{self.checkpoints.folder} holds no usable checkpoint that all workers have: "
                "begin a new run with another train.run_dir"
            )
        state = self._load(step)
        if state["finished"] and step >= self.config.train.steps:
            raise UserError(f"{self.run_dir} is finished after {step} steps: raise train.steps to train on")
        self._become(state, step)
        self.checkpoints.discard_after(step)

    def _load(self, step: int) -> State:
        """What this rank saved after `step`, or would have saved on the present mesh."""
        return load_resharded(self.checkpoints, step, self.model, self.inner_step.optimizer, self.method)

    def _become(self, state: State, step: int) -> None:
        """Stand where a checkpoint stands."""
        load_local_model(self.model, state["model"])
        self._restore_inner_step(state["inner_step"])
        self._restore_stream(state["stream"])
        self.totals = Totals(**state["totals"])
        self._metrics_bytes = state["metrics_bytes"]
        self._saved_step = step
        if "generators" in state:
            assemble.set_generator_state(state["generators"])
        else:  # the ranks were others
            assemble.seed_generators(self.config.train.seed + step, self.process.dropout_seed)
        self.method.load_state_dict(state["method"])  # last: it sends again what was in flight
        self._last_position = self.position

    def run(self) -> dict[str, Any]:
        """Train from where this worker stands; returns its part of the summary."""
        self._open_folder()
        transport, steps = self.method.transport, self.config.train.steps
        world_size = self.process.world_size
        store = HashStore() if world_size == 1 else open_store()[0]
        self._unsaved = Unsaved(HashStore() if world_size == 1 else open_store()[0])
        budget_seconds = self.config.outer.transport["sync_budget_seconds"]
        if self._saved_step < 0 and self.config.train.checkpoint_every:
            self._save(finished=False)
            transport.commit(transport.quorum(0), True)  # all have tried: killed at any step, the run can go on
        try:
            with Stopping(store, self.process.world_rank, world_size, budget_seconds) as stopping:
                while self.totals.steps < steps and stopping.may_start(self.totals.steps + 1):
                    self._train_step()
                finished = self.totals.steps == steps
                self._conclude(finished)
            self._leave()
        except TransportError as error:
            self.metrics.write("fault", step=self.totals.steps, reason=str(error))
            raise
        finally:
            self.metrics.close()
        if not finished and self.process.world_rank == 0:
            how = f"isthmus train {self.run_dir}/config.yaml --resume"
            _LOGGER.info("stopped after step %s; go on with: %s", self.totals.steps, how)
        return self._end(finished)

    def _train_step(self) -> None:
        """Steps 1 to 4 of a training step: batch, inner step, outer loop, then log, evaluate, save."""
        train = self.config.train
        batch = {name: tensor.to(self.device) for name, tensor in next(self.stream).items()}
        begin = self.clock()
        with peers_named(self.method.transport, self.totals.steps) if self._inner_step_needs_others else nullcontext():
            metrics = self.inner_step(self.process.own_rows(batch))
        reports = self.method.step()
        if isinstance(self.method, DataParallel):
            self._follow(1)
        self.totals.count_step(self.stream.tokens_per_batch, self.clock() - begin, metrics["skipped"] > 0)
        step, before = self.position, self._last_position
        self._last_position = step

        def due(every: int) -> bool:
            return every > 0 and step // every > before // every

        if due(train.log_every) or before == 0 or step == train.steps:
            self._log(metrics)
        if metrics["skipped"]:
            self.metrics.write("fault", step=step, reason="the gradient is not finite: step skipped")
        self._note(reports)
        if step == train.steps:
            return
        if due(train.eval_every):
            self._evaluate()
        if due(train.checkpoint_every):
            self._save(finished=False)

    @property
    def position(self) -> int:
        """Steps of the whole run that are done."""
        return self.totals.steps

    def _open_stream(self, data_set: DataSet) -> Any:
        train = self.config.train
        return open_batches(data_set, train.seed, self.config.inner.batch_size, self.worker, train.workers)

    def _stream_state(self) -> State:
        return dict(self.stream.state_dict())

    def _restore_inner_step(self, state: State) -> None:
        optimizer = sharded_optimizer_state(self.inner_step.optimizer, state["optimizer"])
        self.inner_step.load_state_dict({**state, "optimizer": optimizer})

    def _restore_stream(self, state: State) -> None:
        self.stream.load_state_dict(state)

    def _build_method(self) -> OuterLoop | DataParallel:
        return assemble.build_method(self.config, self.model)

    def _conclude(self, finished: bool) -> None:
        """Land what is in flight where this is the end of the run; leave a checkpoint behind either way."""
        if finished:
            self._note(self.method.finish())
            self._evaluate()
        if finished or self._saved_step != self.position:
            self._save(finished, last=True)

    def _leave(self) -> None:
        """Disconnect; the ranks of a worker need each other for its hash."""
        self._anchor_hash = self.method.anchor_hash()
        self.method.close()

    def _note(self, reports: list[SyncReport]) -> None:
        """Write down and count syncs; they prove which checkpoints everybody has, so older ones can go."""
        method, schedule = self.method, self.config.outer.schedule
        for report in reports:
            self.metrics.write_sync(self.position, report)
            self.totals.add(report)
            if (
                isinstance(method, OuterLoop)
                and report.committed
                and report.fragment == method.state.fragments[-1].name
            ):
                self._follow(method.state.schedule.round_steps(self.position))
        if reports:
            sent_at = self.position - (schedule.overlap_steps if schedule else 0)
            self.checkpoints.prune(self.config.train.keep_checkpoints, last_common=sent_at - 1, unsaved=self._unsaved)

    def _log(self, metrics: dict[str, float]) -> None:
        totals = self.totals
        values = {name: value for name, value in metrics.items() if name != "skipped"}
        self.metrics.write("step", step=self.position, tokens=totals.tokens, seconds=totals.train_seconds, **values)
        if not self.process.is_first_rank:
            return
        rate = totals.tokens / max(totals.train_seconds, 1e-9)
        step = f"step {self.position}/{self.config.train.steps}"
        _LOGGER.info(f"{step}  loss {metrics['loss']:.4f}  {rate:,.0f} tokens/s")

    @torch.no_grad()
    def _follow(self, num_steps: int) -> None:
        """Let the model compute what it keeps of the anchors; where there are none, of itself."""
        if hasattr(self.model, "after_sync"):
            with nullcontext() if isinstance(self.method, DataParallel) else anchored(self.method.state.fragments):
                self.model.after_sync(num_steps)

    def _evaluate(self) -> None:
        """Of the anchor, or of the model where there is none; worker 0 does it, with all its ranks."""
        if self.worker != 0:
            return
        if isinstance(self.method, DataParallel):
            subject, look = "model", nullcontext()
        else:
            subject, look = "anchor", anchored(self.method.state.fragments)
        with torch.no_grad(), look:
            forward = self.inner_step.pipeline.evaluate if isinstance(self.inner_step, PipelinedStep) else None
            self.evaluation = evaluate(self.model, self.validation, self.device, forward, self.process.device_mesh)
        self.metrics.write("eval", step=self.position, **self.evaluation, of=subject)

    def _save(self, finished: bool, last: bool = False) -> None:
        """Write a checkpoint. Where that cannot be, training goes on, and the next one is tried when it is due."""
        state = {
            "holding": Holding.of(self.model, self.inner_step.optimizer, self.method).state_dict(),
            "model": local_state(named_tensors(self.model)),
            "method": self.method.state_dict(),
            "inner_step": local_state(self.inner_step.state_dict()),
            "stream": self._stream_state(),
            "generators": assemble.generator_state(),
            "totals": asdict(self.totals),
            "metrics_bytes": self.metrics.position,
            "finished": finished,
        }
        try:
            self.checkpoints.save(self.position, state)
        except NotSaved as error:
            self._not_saved = error
            self._unsaved.add(self.position)
            self.metrics.write("fault", step=self.position, reason=str(error))
            if not last:
                _LOGGER.warning("%s; training goes on, and the next checkpoint is tried when it is due", error)
            return
        self._saved_step, self._not_saved = self.position, None

    def _open_folder(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if self.process.is_first_rank:
            (self.run_dir / f"worker-{self.worker}.json").unlink(missing_ok=True)
        path = self.run_dir / "config.yaml"
        if self.process.world_rank == 0 or not path.exists():  # the folder may be this worker's alone
            write_file(path, yaml.safe_dump(dump(self.config), sort_keys=False))
        path = metrics_path(self.run_dir, self.worker, self.process.rank)
        self.metrics = MetricsFile(path, self._metrics_bytes, self.trackers.take)
        self.trackers.begin(self.position, self.totals)

    def _end(self, finished: bool) -> dict[str, Any]:
        """Write the summary; raise what could not be kept."""
        part = part_of_summary(
            self.config.outer.recipe,
            self.config.train.workers,
            self.totals,
            worker=self.worker,
            steps=self.position,
            finished=finished,
            num_parameters=self._num_parameters,
            evaluation=self.evaluation,
            anchor_hash=self._anchor_hash,
            config_hash=assemble.config_hash(self.config),
            micro_batch_size=self.inner_step.micro_batch_size or self.config.inner.batch_size,
        )
        try:
            if self.process.is_first_rank:
                write_summary(self.run_dir, part, self.config.train.workers)
        except OSError as error:
            lost = NotSaved(f"the summary cannot be written to {self.run_dir} ({reason_of(error)}): make room there")
            raise self._not_saved or lost from error
        if self._not_saved is not None:
            raise self._not_saved
        return part
