"""Checkpoints of one worker, or of each of its ranks, such as `checkpoints/step-00000200/worker-0-rank-1`.

Each is written to a sibling folder and renamed when it is on the disk. One that cannot be written (the disk is full)
leaves nothing behind, and the ones before it as they are.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from isthmus.core import State
from isthmus.parallel import ParallelDims
from isthmus.train.checkpoint_files import (
    Damaged,
    RunIdentity,
    check_same_run,
    flush,
    read_checkpoint,
    read_lazily,
    read_manifest,
    verify,
    write_checkpoint,
)
from isthmus.train.run_folder import name_of, reason_of

_LOGGER = logging.getLogger(__name__)


class NotSaved(Exception):
    """Something that was to be kept could not be written. The message is one line: what, why, what to do."""


class Checkpoints:
    """The checkpoints of one process, and where the mesh has changed since, those of its worker.

    In `folder` are those of all workers and steps; one of a run with another identity is refused.
    """

    def __init__(
        self, folder: Path, worker: int, identity: RunIdentity, rank: int = 0, mesh: ParallelDims | None = None
    ) -> None:
        self.folder, self.worker, self.identity, self.rank = folder, worker, identity, rank
        self.name, self.mesh = name_of(worker, rank), mesh or ParallelDims()

    def save(self, step: int, state: State) -> None:
        """Write the state after `step`; on return it has reached the disk, else this raises `NotSaved`."""
        final = self._path(step)
        temporary = final.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            write_checkpoint(temporary, state, step, self.identity, self.mesh.division)
            _replace(temporary, final)
            for changed in (final.parent, self.folder, self.folder.parent):
                flush(changed)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):  # another worker's may lie there
                temporary.parent.rmdir()
            what = f"the checkpoint of step {step} cannot be written to {self.folder} ({reason_of(error)})"
            raise NotSaved(f"{what}: make room there") from error

    def load(self, step: int) -> State:
        """Return the state that this process saved after `step`."""
        return read_checkpoint(self._path(step))

    def load_ranks(self, step: int) -> list[State]:
        """Return what each rank that the worker then had saved after `step`; tensors are not read yet."""
        ranks = range(self.mesh_of(step).num_ranks)
        return [read_lazily(self._path(step, name_of(self.worker, rank))) for rank in ranks]

    def mesh_of(self, step: int) -> ParallelDims:
        """Return the mesh of the ranks that wrote the checkpoint of `step`, as far as it decides what each held."""
        return ParallelDims(**self._manifest(step)["mesh"])

    @property
    def exist(self) -> bool:
        """Whether this process or its worker has written any checkpoint, damaged or not."""
        return bool(self._steps(self.name) or self._steps(name_of(self.worker)))

    def usable(self) -> list[int]:
        """Return the steps of the undamaged checkpoints, newest first; log a line about every damaged file.

        Each rank looks after its own files; after those of another mesh the ranks look together, each after some. So
        a worker can go on from where all of its ranks can. The newest one is refused where it is of another run.
        """
        found = list[int]()
        for step in sorted({*self._steps(self.name), *self._steps(name_of(self.worker))}, reverse=True):
            if self.is_usable(step, compare=not found):
                found.append(step)
        return found

    def is_usable(self, step: int, compare: bool = True) -> bool:
        """Return whether the checkpoint of `step` is undamaged, else log why; refuse another run's, where compared."""
        try:
            manifest = self._manifest(step)
            for rank in range(self.rank, ParallelDims(**manifest["mesh"]).num_ranks, self.mesh.num_ranks):
                verify(self._path(step, name_of(self.worker, rank)), manifest["mesh"])
        except Damaged as damage:
            _LOGGER.warning("checkpoint refused: %s", damage)
            return False
        if compare:
            check_same_run(self._path(step), manifest["layout"], self.identity)
        return True

    def prune(self, keep: int, last_common: int, unsaved: Container[int] = ()) -> None:
        """Delete what no run will go on from: all but the newest `keep` that every worker has.

        All workers have come past the step `last_common`; those in `unsaved` some worker could not save.
        """
        past = sorted(step for step in self._steps(self.name) if step <= last_common)
        kept = [step for step in past if step not in unsaved][-keep:] if len(past) > keep else past
        for path in self._own_paths():
            if not path.suffix and _step_of(path) <= last_common and _step_of(path) not in kept:
                _delete(path)
                with suppress(OSError):  # another worker's may lie there still, or it was quicker
                    path.parent.rmdir()

    def discard_after(self, step: int) -> None:
        """Delete what is newer than `step`, from which the run goes on, and what a kill has left half done."""
        for path in self._own_paths():
            if not path.suffix and _step_of(path) > step:
                _delete(path)
        self.discard_half_done()

    def discard_half_done(self) -> None:
        """Delete what a kill has left half written, or half deleted."""
        for path in self._own_paths():
            if path.suffix == ".old" and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))  # killed just when the new one was to take its place
            elif path.suffix:
                shutil.rmtree(path)

    def _path(self, step: int, name: str | None = None) -> Path:
        return self.folder / f"step-{step:08d}" / (name or self.name)

    def _steps(self, name: str) -> list[int]:
        return [_step_of(path) for path in self.folder.glob(f"step-*/{name}")]

    def _own_paths(self) -> list[Path]:
        """Return what this process may delete, half done or whole: its own; a first rank also what others left."""
        ranks, found = {name_of(self.worker, rank) for rank in range(self.mesh.num_ranks)}, list[Path]()
        for folder in self.folder.glob("step-*"):
            with suppress(FileNotFoundError):  # another worker deletes it just now
                found += folder.iterdir()
        former = f"{self.name}-rank-" if self.rank == 0 else None
        return [
            path
            for path in found
            if path.stem == self.name or (former and path.stem.startswith(former) and path.stem not in ranks)
        ]

    def _manifest(self, step: int) -> dict[str, Any]:
        """Return the manifest that tells a checkpoint's mesh: of the worker's first rank, or if there is none, ours."""
        first = self._path(step, name_of(self.worker))
        return read_manifest(first if first.exists() else self._path(step))


def _step_of(path: Path) -> int:
    return int(path.parent.name.removeprefix("step-"))


def _delete(path: Path) -> None:
    path.rename(path.with_suffix(".tmp"))  # a kill must not leave half a checkpoint
    shutil.rmtree(path.with_suffix(".tmp"))


def _replace(temporary: Path, final: Path) -> None:
    """Put a written checkpoint in its place: who comes back to an elastic run may come to a step a second time."""
    before = final.with_suffix(".old")
    shutil.rmtree(before, ignore_errors=True)
    if final.exists():
        final.rename(before)
    try:
        temporary.rename(final)
    except OSError:
        if before.exists():
            before.rename(final)
        raise
    shutil.rmtree(before, ignore_errors=True)
