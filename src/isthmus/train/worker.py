"""One worker of a run, or one rank of it, from a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isthmus.config import RunConfig
from isthmus.core.cores import limit_threads
from isthmus.train.process import find_process
from isthmus.train.resume_check import Resume, check_unfinished
from isthmus.train.run_folder import refuse_begun
from isthmus.train.trackers import open_trackers
from isthmus.train.trainer import Trainer


def train(config: RunConfig, resume: Resume = False) -> dict[str, Any]:
    """Run one worker to its end, or until it is stopped.

    RANK and WORLD_SIZE say which worker this is, as torchrun and `isthmus launch` set them; without them it is alone.
    In an elastic world a worker has its number from ISTHMUS_WORKER, or from whatever has started it.

    Args:
        config: the same for all workers.
        resume: go on from the newest checkpoint that all workers hold, instead of beginning a new run; "auto": where
            there is any checkpoint.

    Returns:
        This worker's part of the summary, also written to `worker-k.json` in the run's folder. Whoever finds there
        the parts of all workers writes `summary.json`.

    Raises:
        AlreadyFinished: there is nothing left to do.
        UserError: something in the configuration, the data or the folder does not fit.
        TransportError: other workers are gone, or differ.
        NotSaved: the last checkpoint or the summary could not be written.
    """
    limit_threads()
    process, run_dir = find_process(config), Path(config.train.run_dir)
    if not resume:
        refuse_begun(run_dir, process.worker, process.rank)
    if resume == "auto":
        check_unfinished(config, process.worker, process.rank)
    with open_trackers(config, process) as trackers:
        trainer = Trainer(config, process, trackers)
        if resume:
            trainer.restore(may_begin=resume == "auto")
        return trainer.run()
