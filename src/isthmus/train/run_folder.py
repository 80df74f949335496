"""The names of files in a run's folder, how they are written, and the summary, which each worker writes a part of."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from isthmus.core import UserError

_SHARED = (
    "recipe",
    "workers",
    "steps",
    "finished",
    "tokens_per_worker",
    "num_parameters",
    "eval_loss",
    "evaluation",
    "num_syncs",
    "config_hash",
)
_EACH = (
    "sent_bytes",
    "received_bytes",
    "refused_syncs",
    "num_rollbacks",
    "skipped_steps",
    "num_restarts",
    "train_seconds",
    "compute_seconds",
    "sync_seconds",
    "hidden_seconds",
)


def name_of(worker: int, rank: int = 0) -> str:
    """Return the name in a process's files: 'worker-1', or for a worker's other ranks 'worker-1-rank-2'."""
    return f"worker-{worker}" + (f"-rank-{rank}" if rank else "")


def metrics_path(run_dir: Path, worker: int, rank: int = 0) -> Path:
    """Return the path of the metrics of a worker, or of one of its other ranks."""
    return run_dir / "metrics" / f"{name_of(worker, rank)}.jsonl"


def make_run_dir(run_dir: Path, option: str = "train.run_dir") -> None:
    """Make the folder of a run, which an option names, and those above it; a `UserError` says why that cannot be."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"the folder {str(run_dir)!r} cannot be made ({error.strerror})"
        raise UserError(f"{option}: {reason}: choose another") from error


def refuse_begun(run_dir: Path, worker: int = 0, rank: int = 0) -> None:
    """Refuse to begin a run in a folder that holds one already."""
    if metrics_path(run_dir, worker, rank).exists():
        raise UserError(f"{run_dir} holds a run already: go on with it by --resume, or choose another train.run_dir")


def write_file(path: Path, text: str) -> None:
    """Write a file of which a reader never sees half, also where several workers write it at once."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def reason_of(error: Exception) -> str:
    """Return why something could not be written, without the numbers and the path."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return text.removeprefix("Error while serializing: ").removeprefix("I/O error: ").split(" (os error")[0]


def join_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one summary of a run from those of its workers, in the order of their numbers.

    What all share comes from the first, evaluation from the worker that evaluated; the rest becomes a list, a value
    per worker.
    """
    first = parts[0]
    joined: dict[str, Any] = {key: first[key] for key in _SHARED}
    joined |= {key: [part[key] for part in parts] for key in _EACH}
    joined["anchor_hash"] = {f"worker-{part['worker']}": part["anchor_hash"] for part in parts}
    return joined


def write_summary(run_dir: Path, part: dict[str, Any], num_workers: int) -> None:
    """Write a worker's part, `worker-k.json`; who finds the parts of all workers joins them in `summary.json`."""
    write_file(run_dir / f"worker-{part['worker']}.json", json.dumps(part, indent=1))
    join_summary(run_dir, num_workers)


def join_summary(run_dir: Path, num_workers: int) -> None:
    """Write `summary.json`, if the parts of all workers are there."""
    paths = [run_dir / f"worker-{k}.json" for k in range(num_workers)]
    if all(path.exists() for path in paths):
        parts = [json.loads(path.read_text()) for path in paths]
        write_file(run_dir / "summary.json", json.dumps(join_parts(parts), indent=1))
