"""One worker of a run, from a configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.train import assemble
from isthmus.train.elastic_trainer import ElasticTrainer
from isthmus.train.folder import metrics_path
from isthmus.train.trainer import Trainer
from isthmus.transport.rendezvous import find_world


def train(config: RunConfig, resume: bool = False) -> dict[str, Any]:
    """Run one worker to its end, or until it is stopped.

    Which worker this is say RANK and WORLD_SIZE, as torchrun and `isthmus launch` set them; alone without them.

    Args:
        config: the same for all workers.
        resume: go on from the newest checkpoint that all workers hold, instead of beginning a new run.

    Returns:
        This worker's part of the summary, also written to `worker-k.json` in the run's folder. Whoever finds there
        the parts of all workers writes `summary.json`.

    Raises:
        UserError: something in the configuration, the data or the folder does not fit.
        TransportError: other workers are gone, or differ.
        NotSaved: the last checkpoint or the summary could not be written.
    """
    elastic = assemble.is_elastic(config)
    worker = int(os.environ.get("RANK", "0")) if elastic else find_world()[0]
    run_dir = Path(config.train.run_dir)
    if not resume and metrics_path(run_dir, worker).exists():
        raise UserError(f"{run_dir} holds a run already: go on with it by --resume, or choose another train.run_dir")
    trainer = (ElasticTrainer if elastic else Trainer)(config, worker)
    if resume:
        trainer.restore()
    return trainer.run()
