"""The summary of a run, which each worker writes its part of when it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isthmus.train.run_folder import write_file

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
    "skipped_steps",
    "num_restarts",
    "train_seconds",
    "compute_seconds",
    "sync_seconds",
    "hidden_seconds",
)


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
    paths = [run_dir / f"worker-{k}.json" for k in range(num_workers)]
    if all(path.exists() for path in paths):
        parts = [json.loads(path.read_text()) for path in paths]
        write_file(run_dir / "summary.json", json.dumps(join_parts(parts), indent=1))
