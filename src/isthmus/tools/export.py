"""A trained model out of a run: the anchors of its newest good checkpoint, and a card that tells of the run."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import yaml

from isthmus.config import RunConfig, parse
from isthmus.core import State, UserError
from isthmus.data import DATA
from isthmus.data.tokenizer import load_tokenizer
from isthmus.models import save_exported
from isthmus.parallel.state import load_local_model, named_tensors
from isthmus.spec import build
from isthmus.tools.model_card import TrainingFacts, model_card
from isthmus.train import assemble
from isthmus.train.checkpoint import Checkpoints
from isthmus.train.checkpoint_files import RunIdentity
from isthmus.train.metrics import Totals
from isthmus.train.reshard import whole_model
from isthmus.train.run_folder import metrics_path

_log = logging.getLogger(__name__)


def export(run_dir: Path, to: Path) -> int:
    """Write a run's model, with its tokenizer, to a folder that transformers or `isthmus.models.load_exported` loads.

    The run may be finished or not. The folder is made; it may exist if it is empty.

    Returns:
        The step after which the anchors are exported.

    Raises:
        UserError: the folder holds no run with an undamaged checkpoint, or `to` is taken.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} is not an empty folder: choose another one")
    config = _read_config(run_dir)
    spec = assemble.build_model_spec(config)
    model = spec.build(config.train.seed)
    step, worker, ranks = _newest_good(run_dir, assemble.run_identity(config, model))
    load_local_model(model, whole_model(ranks, named_tensors(model)))
    tokenizer, evaluation = getattr(build(DATA, config.data), "tokenizer", None), _last_evaluation(run_dir, step)
    beside = to.with_name(f"{to.name}.tmp")  # renamed when complete, so that nobody reads half a model
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        network = save_exported(model, config.model, beside)
        if network is None or not save_tokenizer(tokenizer, beside):
            tokenizer = None
        facts = TrainingFacts(config, step, worker, Totals(**ranks[0]["totals"]), model, tokenizer, evaluation)
        (beside / "README.md").write_text(model_card(to.resolve().name, facts, network))
        beside.rename(to)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return step


def _read_config(run_dir: Path) -> RunConfig:
    try:
        values = yaml.safe_load((run_dir / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or "it is damaged"
        raise UserError(f"{run_dir} holds no run: config.yaml cannot be read ({reason})") from error
    return parse(values)


def _newest_good(run_dir: Path, identity: RunIdentity) -> tuple[int, int, list[State]]:
    """Return step, worker and ranks' states of the newest undamaged checkpoint that any worker has.

    Their anchors are equal, or the method lets them differ.
    """
    folder = run_dir / "checkpoints"
    names = [path for path in folder.glob("step-*/worker-*") if path.name.removeprefix("worker-").isdigit()]
    saved = [(int(path.parent.name.removeprefix("step-")), int(path.name.removeprefix("worker-"))) for path in names]
    for step, worker in sorted(saved, key=lambda item: (-item[0], item[1])):
        checkpoints = Checkpoints(folder, worker, identity)
        if checkpoints.is_usable(step):
            return step, worker, checkpoints.load_ranks(step)
    raise UserError(f"{folder} holds no undamaged checkpoint: train on, with train.checkpoint_every above 0")


def save_tokenizer(name: str | None, folder: Path) -> bool:
    """Write the tokenizer of the run's data beside the model, where there is one that can still be loaded."""
    if name is None:
        return False
    try:
        load_tokenizer(name).save(folder)
    except UserError as error:
        _log.warning("the model is exported without its tokenizer: %s", error)
        return False
    return True


def _last_evaluation(run_dir: Path, step: int) -> dict[str, Any]:
    """Return the last evaluation up to a step; nothing where there is none."""
    path = metrics_path(run_dir, 0)
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines]
    return next((e for e in reversed(events) if e["event"] == "eval" and e["step"] <= step), {})
