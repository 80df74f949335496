"""From which checkpoint a run goes on: one that all workers hold.

What keeps it from going on is said before any worker is started, and by the workers in the same words.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch

from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.train.assemble import fixed_settings, is_elastic
from isthmus.train.checkpoint_files import PARAMETER, Damaged, check_same_run, read_manifest, read_plain_part, verify
from isthmus.train.run_folder import name_of
from isthmus.transport import PeerLost, Transport
from isthmus.transport.shared_notes import Notes

Resume = bool | Literal["auto"]  # whether a run goes on; "auto": where there is a checkpoint, else it begins
BEGIN = -1  # what a rank without any checkpoint names in the place of steps, where the run may begin
_MOST_STEPS = 64  # that ranks compare when they resume
_PADDING = -2


class AlreadyFinished(UserError):
    """A run has nothing left to do."""

    def __init__(self, run_dir: Path, step: int) -> None:
        super().__init__(f"{run_dir} is finished after {step} steps: raise train.steps to train on")
        self.run_dir, self.step = run_dir, step


def check_resume(config: RunConfig, may_begin: bool = False) -> None:
    """Refuse to resume a run without a checkpoint, unless it may begin, with that of another run, or a finished one.

    It reads the manifests in the run's folder, which takes no time. What only a built model or all bytes of a
    checkpoint can tell is left to the workers.
    """
    run_dir = Path(config.train.run_dir)
    elastic = is_elastic(config)
    manifests = _newest(run_dir / "checkpoints", config.train.workers, any_worker=elastic)
    if not manifests:
        if elastic or (may_begin and not has_checkpoints(run_dir)):
            return  # the workers begin anew
        raise no_checkpoint(run_dir)
    for path, manifest in manifests.items():
        settings = {key: value for key, value in manifest["layout"].items() if not key.startswith(PARAMETER)}
        check_same_run(path, settings, fixed_settings(config))
    step = next(iter(manifests.values()))["step"]
    if step >= config.train.steps and all(map(_is_finished, manifests, manifests.values())):
        raise AlreadyFinished(run_dir, step)


def has_checkpoints(run_dir: Path, worker: int | None = None) -> bool:
    """Return whether any worker, or this one, has written a checkpoint into the folder of a run."""
    name = "worker-*" if worker is None else name_of(worker)
    return any((run_dir / "checkpoints").glob(f"step-*/{name}/manifest.json"))


def check_unfinished(config: RunConfig, worker: int, rank: int = 0) -> None:
    """Raise `AlreadyFinished` where this process has come to the end of its run: nobody need be joined to say so."""
    run_dir = Path(config.train.run_dir)
    for step in sorted((run_dir / "checkpoints").glob("step-*"), reverse=True):
        paths = [path for path in (step / name_of(worker, rank), step / name_of(worker)) if path.exists()]
        with suppress(Damaged):  # said when the run goes on from the one before
            if paths and (manifest := read_manifest(paths[0]))["step"] >= config.train.steps:
                if _is_finished(paths[0], manifest):
                    raise AlreadyFinished(run_dir, manifest["step"])
                return


def no_checkpoint(run_dir: Path) -> UserError:
    """Return the error of a run that has nothing to go on from."""
    found = f"{run_dir}/checkpoints holds no usable checkpoint that all workers have"
    return UserError(f"{found}: begin a new run with another train.run_dir")


def _newest(folder: Path, num_workers: int, any_worker: bool) -> dict[Path, dict[str, Any]]:
    """Return the manifests of the newest checkpoint that any worker has, or all, by the folders they lie in."""
    for step in sorted(folder.glob("step-*"), reverse=True):
        paths = [step / name_of(worker) for worker in range(num_workers)]
        with suppress(Damaged):  # the workers go on from the one before, and say why
            manifests = {path: read_manifest(path) for path in paths if path.exists() or not any_worker}
            if manifests:
                return manifests
    return {}


def _is_finished(path: Path, manifest: dict[str, Any]) -> bool:
    """Whether an undamaged checkpoint was written at the end of a run."""
    try:
        verify(path, manifest["mesh"])
    except Damaged:
        return False
    return bool(read_plain_part(path)["finished"])


class MissingCheckpoints:
    """The steps whose checkpoint some worker could not write, as all are told: no run goes on from there."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def add(self, step: int) -> None:
        """Tell the other workers, before this one takes part in another sync."""
        with _lost_store():
            self._notes.set(f"unsaved/{step}", "")

    def __contains__(self, step: object) -> bool:
        """Whether any worker lacks the checkpoint of this step."""
        with _lost_store():
            return bool(self._notes.check([f"unsaved/{step}"]))


@contextmanager
def _lost_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost([], "the store is gone, and with it the process that holds it") from error


def newest_common(steps: list[int], transport: Transport) -> int | None:
    """Return the largest step that is in the lists of all ranks, which all make this call, before any sync.

    It is `BEGIN` only where no rank has any checkpoint, and all say that the run may begin.
    """
    peers = transport.quorum(0)
    for gather in (peers.worker_group.all_gather, peers.all_gather):  # then all ranks of all workers know
        own = torch.full((_MOST_STEPS,), _PADDING, dtype=torch.int64)
        newest = sorted(steps)[-_MOST_STEPS:]
        own[: len(newest)] = torch.tensor(newest, dtype=torch.int64)
        lists = [{step for step in theirs.tolist() if step != _PADDING} for (theirs,) in gather([own])]
        steps = list(set.intersection(*lists))
    return max(steps, default=None)
