"""One worker of a run, or one rank of it: the loop around inner step and method."""

from __future__ import annotations

import itertools
import logging
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from isthmus.config import RunConfig, dump
from isthmus.core import SyncReport, UserError
from isthmus.data import DataSet, LeasesExhausted
from isthmus.inner.micro_batch import find_fastest
from isthmus.inner.pipelined import PipelinedStep
from isthmus.train import assemble, random_state
from isthmus.train.checkpoint import Checkpoints, NotSaved
from isthmus.train.evaluate import evaluate
from isthmus.train.lifecycle import ElasticLifecycle, Lifecycle
from isthmus.train.metrics import MetricsFile, Totals
from isthmus.train.process import Process, peers_named, restart_reasons
from isthmus.train.reshard import load_resharded
from isthmus.train.resume_check import BEGIN, AlreadyFinished
from isthmus.train.run_folder import make_run_dir, metrics_path, reason_of, write_file, write_summary
from isthmus.train.trackers import Trackers
from isthmus.train.worker_state import WorkerState
from isthmus.transport import TransportError

_LOGGER = logging.getLogger(__name__)


class Trainer:
    """One worker, connected to the others; where it has several ranks, one of them."""

    def __init__(self, config: RunConfig, process: Process, trackers: Trackers) -> None:
        self.config, self.process, self.trackers = config, process, trackers
        self.run_dir, self.device = Path(config.train.run_dir), assemble.choose_device()
        spec = assemble.build_model_spec(config)
        data_set = assemble.open_data(config, spec)
        self.model = spec.build(config.train.seed).to(self.device)
        self._num_parameters = sum(param.numel() for param in self.model.parameters())
        identity = assemble.run_identity(config, self.model)  # of the whole model
        stages = assemble.shard_model(config, spec, self.model, process.device_mesh)
        self.lifecycle = (ElasticLifecycle if assemble.is_elastic(config) else Lifecycle)(config, process, data_set)
        self.validation = self._open_validation(data_set)
        folder = self.run_dir / "checkpoints"
        self.checkpoints = Checkpoints(folder, process.worker, identity, process.rank, process.mesh)
        self.method = assemble.build_method(config, self.model, **self.lifecycle.transport_options)
        self.clock = self.method.transport.now
        averaging = self.method.wrap, self.method.average_gradients
        self.inner_step = assemble.build_inner_step(config, self.model, process.device_mesh, stages, *averaging)
        self._step_needs_others = self.method.averages_in_backward or process.mesh.num_ranks > 1
        self.state = WorkerState(config.train.seed, process, self.model, self.inner_step, self.method, self.lifecycle)
        self.evaluation: dict[str, float] | None = None  # what the last one found
        self._kept_metrics_bytes = 0
        self._has_begun = False  # there is a checkpoint to go on from
        self._has_changed = True  # since the last checkpoint
        self._not_saved: NotSaved | None = None  # the last checkpoint could not be written
        self._last_step = self.steps_done  # for which was asked what is due
        self._find_micro_batch_size(data_set)
        random_state.seed(config.train.seed, process.dropout_seed)

    @property
    def totals(self) -> Totals:
        """The sums of what this worker has counted since the run began."""
        return self.state.totals

    @property
    def steps_done(self) -> int:
        """The steps of the whole run that are done, by whoever took part."""
        return self.method.inner_steps

    def restore(self, may_begin: bool = False) -> None:
        """Go on from a checkpoint that the lifecycle chooses; begin where that may be and no rank has any."""
        self.checkpoints.discard_half_done()
        usable = [BEGIN] if may_begin and not self.checkpoints.exist else self.checkpoints.usable()
        step, saved_bytes = self.lifecycle.choose_checkpoint(usable, self.method.transport), 0
        if step not in (None, BEGIN):
            state = load_resharded(self.checkpoints, step, self.model, self.inner_step.optimizer, self.method)
            if state["finished"] and step >= self.config.train.steps:
                raise AlreadyFinished(self.run_dir, step)
            if self.method.has_caught_up:
                self.state.load_own(state)
            else:
                self.state.load_state_dict(state, step)
                self._has_changed = False
            saved_bytes, self._has_begun, self._last_step = state["metrics_bytes"], True, self.steps_done
            self.checkpoints.discard_after(step)
        self._kept_metrics_bytes = self.lifecycle.kept_metrics_bytes(self._metrics_path, saved_bytes)

    def run(self) -> dict[str, Any]:
        """Train until the run is finished or this worker is told to stop; return its part of the summary."""
        self._open_files()
        try:
            stopping = self.lifecycle.stopping(self.method.transport)
            self._missing = self.lifecycle.missing_checkpoints(self.method.transport)
            if not self._has_begun:
                wants_checkpoints = self.config.train.checkpoint_every > 0
                self.lifecycle.begin(self._save if wants_checkpoints else None, self.method.transport)
            with stopping:
                for turn in itertools.count(1):  # equal on all ranks; a turn need not be a step
                    if self.method.is_finished or not stopping.may_start(turn):
                        break
                    if self.method.is_training and self.steps_done < self.config.train.steps:
                        self._train_step()
                    else:
                        self._note(self.method.finish())
                self._conclude()
        except (TransportError, UserError) as error:
            self.metrics.write("fault", step=self.steps_done, reason=str(error))
            raise
        finally:
            self.metrics.close()
        if not self.method.is_finished and (line := self.lifecycle.how_to_resume(self.steps_done)):
            _LOGGER.info(line)
        return self._summarize()

    def _train_step(self) -> None:
        """Take one training step: batch, inner step, method, then log, evaluate, save."""
        train = self.config.train
        self.inner_step.set_progress(self.steps_done)
        self.method.begin_step()
        try:
            batch = {name: tensor.to(self.device) for name, tensor in next(self.lifecycle.batches).items()}
        except LeasesExhausted:
            self._note(self.method.skip())
            return
        begin = self.clock()
        with peers_named(self.method.transport, self.steps_done) if self._step_needs_others else nullcontext():
            metrics = self.inner_step(self.process.own_rows(batch))
        reports = self.method.step()
        tokens = self.lifecycle.batches.tokens_per_batch
        self.totals.count_step(tokens, self.clock() - begin, metrics["skipped"] > 0)
        step, before = self.steps_done, self._last_step
        self._last_step = step

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
            self._save()

    def _note(self, reports: list[SyncReport]) -> None:
        """Write down and count syncs; they prove which checkpoints everybody has, so older ones can go."""
        self._has_changed = True
        for report in reports:
            self.metrics.write("sync", step=self.steps_done, **asdict(report))
            self.totals.add(report)
            _LOGGER.debug("step %d finished a sync: %s", self.steps_done, report)
        if (number := self.method.num_rollbacks) > self.totals.num_rollbacks:
            self.totals.num_rollbacks = number
            self.metrics.write("rollback", step=self.steps_done, number=number)
            if self.process.is_first_rank:
                _LOGGER.warning("step %d: this worker is back at the last good anchors, as all are", self.steps_done)
        for num_steps in self.method.take_finished_rounds():
            if hasattr(self.model, "after_sync"):  # it computes what it keeps of the anchors
                with self.method.anchored():
                    self.model.after_sync(num_steps)  # type: ignore[operator]
        if reports:
            schedule = self.config.outer.schedule
            sent_at = self.steps_done - (schedule.overlap_steps if schedule else 0)
            self.checkpoints.prune(self.config.train.keep_checkpoints, sent_at - 1, self._missing)

    def _log(self, metrics: dict[str, float]) -> None:
        totals, step = self.totals, self.steps_done
        values = {name: value for name, value in metrics.items() if name != "skipped"}
        self.metrics.write("step", step=step, tokens=totals.tokens, seconds=totals.train_seconds, **values)
        if self.process.is_first_rank:
            rate = totals.tokens / max(totals.train_seconds, 1e-9)
            line = "step %d/%d  loss %.4f  %s tokens/s"
            _LOGGER.info(line, step, self.config.train.steps, metrics["loss"], f"{rate:,.0f}")

    def _evaluate(self) -> None:
        """Evaluate what stands for the run's result; worker 0 does it, with all its ranks."""
        if self.process.worker != 0:
            return
        forward = self.inner_step.pipeline.evaluate if isinstance(self.inner_step, PipelinedStep) else None
        with self.method.anchored():
            self.evaluation = evaluate(self.model, self.validation, self.device, forward, self.process.device_mesh)
        self.metrics.write("eval", step=self.steps_done, **self.evaluation, of=self.method.evaluates)
        if not self.method.is_finished:
            self.method.note_evaluation(self.evaluation["loss"])

    def _save(self, last: bool = False) -> None:
        """Write a checkpoint. Where that cannot be, training goes on, and the next one is tried when it is due."""
        step, state = self.steps_done, self.state.state_dict()
        state |= {"metrics_bytes": self.metrics.size_bytes, "finished": self.method.is_finished}
        try:
            self.checkpoints.save(step, state)
        except NotSaved as error:
            self._not_saved = error
            self._missing.add(step)
            self.metrics.write("fault", step=step, reason=str(error))
            if not last:
                _LOGGER.warning("%s; training goes on, and the next checkpoint is tried when it is due", error)
            return
        self._has_changed, self._not_saved = False, None
        _LOGGER.debug("the checkpoint of step %d is written", step)

    def _conclude(self) -> None:
        """Evaluate where this is the end of the run; leave a checkpoint behind either way; disconnect."""
        finished = self.method.is_finished
        if finished:
            self._evaluate()
        if finished or self._has_changed:
            self._save(last=True)
        self._anchor_hash = self.method.anchor_hash()  # the ranks of a worker need each other for it
        self.method.close()

    def _summarize(self) -> dict[str, Any]:
        """Write this worker's part of the summary and return it; raise what could not be kept."""
        part = asdict(self.totals) | {
            "recipe": self.config.outer.recipe,
            "workers": self.config.train.workers,
            "worker": self.process.worker,
            "steps": self.steps_done,
            "finished": self.method.is_finished,
            "tokens_per_worker": self.totals.tokens,
            "compute_seconds": self.totals.compute_seconds,
            "num_restarts": len(restart_reasons()),
            "num_parameters": self._num_parameters,
            "eval_loss": self.evaluation["loss"] if self.evaluation else None,
            "evaluation": self.evaluation,
            "anchor_hash": self._anchor_hash,
            "config_hash": assemble.config_hash(self.config),
            "micro_batch_size": self.inner_step.micro_batch_size or self.config.inner.batch_size,
        }
        try:
            if self.process.is_first_rank:
                write_summary(self.run_dir, part, self.config.train.workers)
        except OSError as error:
            lost = NotSaved(f"the summary cannot be written to {self.run_dir} ({reason_of(error)}): make room there")
            raise self._not_saved or lost from error
        if self._not_saved is not None:
            raise self._not_saved
        return part

    @property
    def _metrics_path(self) -> Path:
        return metrics_path(self.run_dir, self.process.worker, self.process.rank)

    def _open_files(self) -> None:
        make_run_dir(self.run_dir)
        if self.process.is_first_rank:
            (self.run_dir / f"worker-{self.process.worker}.json").unlink(missing_ok=True)
        path = self.run_dir / "config.yaml"
        if self.process.world_rank == 0 or not path.exists():  # the folder may be this worker's alone
            write_file(path, yaml.safe_dump(dump(self.config), sort_keys=False))
        self.metrics = MetricsFile(self._metrics_path, self._kept_metrics_bytes, self.trackers.take)
        self.trackers.begin(self.steps_done, self.totals)
        if reasons := restart_reasons():
            self.metrics.write("restart", step=self.steps_done, number=len(reasons), reason=reasons[-1])

    def _open_validation(self, data_set: DataSet) -> list[dict[str, torch.Tensor]]:
        """Return this rank's share of the validation set; only worker 0 has one."""
        if self.process.worker != 0:
            return self.process.own_share([])
        batch_size = self.config.inner.batch_size
        return self.process.own_share(data_set.validation(batch_size, self.config.train.eval_batches * batch_size))

    def _find_micro_batch_size(self, data_set: DataSet) -> None:
        if self.config.inner.micro_batch_size == "auto":
            (sample,) = data_set.validation(self.config.inner.batch_size, self.config.inner.batch_size)
            self.inner_step.micro_batch_size = find_fastest(self.inner_step, sample)
            if self.config.inner.compile:
                torch.compiler.reset()  # what was compiled serves all sizes that were tried, but none of them best
            _LOGGER.info("micro-batches of %d are the fastest here", self.inner_step.micro_batch_size)
