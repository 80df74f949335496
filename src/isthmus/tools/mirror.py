"""Copies of the small files that the workers of a host write, at the machine that has launched them."""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PART_BYTES = 1 << 18
_TAIL_BYTES = 256
_NAMES = re.compile(
    r"config\.yaml|worker-(\d+)\.json|metrics/worker-(\d+)(?:-rank-\d+)?\.jsonl|logs/worker-(\d+)(?:-rank-\d+)?\.log"
    r"|checkpoints/step-\d+/worker-(\d+)(?:-rank-\d+)?/manifest\.json"
)
_PATTERNS = ("config.yaml", "worker-*.json", "metrics/*.jsonl", "logs/*.log", "checkpoints/*/*/manifest.json")


@dataclass(frozen=True)
class _Sent:
    """What was sent of a file."""

    status: tuple[int, int, int]  # inode, size and time of the file then
    size_bytes: int
    tail: bytes  # the last bytes that were sent: a file that was cut and has grown again has others there


class Mirror:
    """Reads what is new in the files of a run's folder that belong to some of its workers."""

    def __init__(self, run_dir: Path, workers: Collection[int]) -> None:
        self._run_dir, self._workers = run_dir, workers
        self._sent: dict[str, _Sent] = {}

    def new_parts(self) -> Iterator[dict[str, Any]]:
        """Yield what `write_part` wants at the other end, so that the copies become like the files."""
        for name in [name for name in self._sent if not (self._run_dir / name).exists()]:
            del self._sent[name]
            yield {"file": name, "at": 0, "data": None}
        for pattern in _PATTERNS:
            for path in sorted(self._run_dir.glob(pattern)):
                name = path.relative_to(self._run_dir).as_posix()
                if _belongs(name, self._workers):
                    with suppress(FileNotFoundError):  # a checkpoint makes room for a newer one
                        yield from self._new_parts_of(path, name)

    def _new_parts_of(self, path: Path, name: str) -> Iterator[dict[str, Any]]:
        found = path.stat()
        status = (found.st_ino, found.st_size, found.st_mtime_ns)
        before = self._sent.get(name)
        if before is not None and before.status == status:
            return
        with path.open("rb") as file:
            start, tail = 0, b""
            if before is not None and before.status[0] == status[0]:
                file.seek(before.size_bytes - len(before.tail))
                if file.read(len(before.tail)) == before.tail:
                    start, tail = before.size_bytes, before.tail
            file.seek(start)
            while True:
                part = file.read(_PART_BYTES)
                if part or start == 0:
                    yield {"file": name, "at": start, "data": base64.b64encode(part).decode()}
                start, tail = start + len(part), (tail + part)[-_TAIL_BYTES:]
                if len(part) < _PART_BYTES:
                    break
        self._sent[name] = _Sent(status, start, tail)


def write_part(run_dir: Path, workers: Collection[int], part: dict[str, Any]) -> None:
    """Write a part of a file into its copy in a run's folder; what stood behind it there is cut off.

    A host may write what its own workers may, and nothing else of this machine.
    """
    if not _belongs(part["file"], workers):
        raise ValueError(f"{part['file']} is no file of its workers")
    path = run_dir / part["file"]
    if part["data"] is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.seek(min(int(part["at"]), path.stat().st_size))
        file.write(base64.b64decode(part["data"]))
        file.truncate()


def _belongs(name: str, workers: Collection[int]) -> bool:
    match = _NAMES.fullmatch(name)
    return match is not None and all(int(worker) in workers for worker in match.groups() if worker is not None)
