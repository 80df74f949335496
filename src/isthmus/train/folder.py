"""What a worker leaves in the run's folder besides checkpoints."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from isthmus.train.metrics import join_parts


def name_of(worker: int, rank: int = 0) -> str:
    """What the files of a process are called after: 'worker-1', or of a worker's other ranks 'worker-1-rank-2'."""
    return f"worker-{worker}" + (f"-rank-{rank}" if rank else "")


def metrics_path(run_dir: Path, worker: int, rank: int = 0) -> Path:
    """Where the metrics of a worker, or of one of its other ranks, lie."""
    return run_dir / "metrics" / f"{name_of(worker, rank)}.jsonl"


def write_summary(run_dir: Path, part: dict[str, Any], num_workers: int) -> None:
    """Write a worker's part, `worker-k.json`; whoever finds there the parts of all joins them in `summary.json`."""
    write_file(run_dir / f"worker-{part['worker']}.json", json.dumps(part, indent=1))
    paths = [run_dir / f"worker-{k}.json" for k in range(num_workers)]
    if all(path.exists() for path in paths):
        parts = [json.loads(path.read_text()) for path in paths]
        write_file(run_dir / "summary.json", json.dumps(join_parts(parts), indent=1))


def write_file(path: Path, text: str) -> None:
    """Beside, then renamed: a reader never sees half of it, and workers who write the same file not each other's."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def reason_of(error: Exception) -> str:
    """Why something could not be written, without the numbers and the path."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return text.removeprefix("Error while serializing: ").removeprefix("I/O error: ").split(" (os error")[0]
