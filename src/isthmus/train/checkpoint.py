"""Checkpoints of one worker, or of each of its ranks: complete, checked by hash, never half written.

    checkpoints/step-00000200/worker-0/state.safetensors   tensors (worker-0-rank-1: those of its second rank)
                                       state.json          everything else, with the tensors' numbers in their places
                                       manifest.json       step, layout, size and sha256 of both files, and its own

A checkpoint is written to a sibling folder and renamed when it is on the disk. No pickle anywhere. One that cannot be
written (the disk is full) leaves nothing behind, and the ones before it as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed import Store

from isthmus.core import State, Tensors, UserError
from isthmus.core.flatten import flatten, unflatten
from isthmus.transport import PeerLost, Transport

Layout = dict[str, Any]  # flat and plain: what must be equal for a checkpoint to fit

_FORMAT = 2  # of the files; another one is refused
_MOST = 64  # that ranks compare when they resume


class NotSaved(Exception):
    """What was to be kept could not be written. One line: what, why, what to do."""


class Checkpoints:
    """The checkpoints of one process.

    Args:
        folder: of all workers and steps.
        name: of this process, as in `folder.name_of`.
        layout: of the run; a checkpoint of another one is refused.
        say: receives a line about every damaged file.
    """

    def __init__(self, folder: Path, name: str, layout: Layout, say: Callable[[str], None] = print) -> None:
        self.folder, self.name, self.layout, self.say = folder, name, layout, say

    def save(self, step: int, state: State) -> None:
        """Write the state after `step`; on return it has reached the disk.

        Raises:
            NotSaved: it could not be written.
        """
        skeleton, tensors = flatten(state)
        temporary = self._path(step).with_suffix(".tmp")
        try:
            self._write(step, temporary, skeleton, tensors)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):  # another worker's may lie there
                temporary.parent.rmdir()
            raise NotSaved(
                f"the checkpoint of step {step} cannot be written to {self.folder} ({reason_of(error)}): "
                "make room there"
            ) from error

    def _write(self, step: int, temporary: Path, skeleton: Any, tensors: Tensors) -> None:
        final = self._path(step)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        tensors = _unshared([tensor.detach().cpu().contiguous() for tensor in tensors])
        save_file({str(number): tensor for number, tensor in enumerate(tensors)}, temporary / "state.safetensors")
        (temporary / "state.json").write_text(json.dumps(skeleton))
        files = {name: _fingerprint(temporary / name) for name in ("state.safetensors", "state.json")}
        manifest = {"format": _FORMAT, "step": step, "layout": self.layout, "files": files}
        manifest["sha256"] = _hash_plain(manifest)
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for name in (*files, "manifest.json"):
            _flush(temporary / name)
        _flush(temporary)
        before = final.with_suffix(".old")
        shutil.rmtree(before, ignore_errors=True)
        if final.exists():  # who comes back to an elastic run may come to a step for the second time
            final.rename(before)
        try:
            temporary.rename(final)
        except OSError:
            if before.exists():
                before.rename(final)
            raise
        shutil.rmtree(before, ignore_errors=True)
        for changed in (final.parent, self.folder, self.folder.parent):
            _flush(changed)

    def load(self, step: int) -> State:
        """The state that was saved after `step`."""
        skeleton = json.loads((self._path(step) / "state.json").read_text())
        tensors = load_file(self._path(step) / "state.safetensors")
        # where a tensor lies in memory decides how the CPU sums it up: let torch place it, as it did before
        return unflatten(skeleton, [tensors[str(number)].clone() for number in range(len(tensors))])

    def usable(self) -> list[int]:
        """Steps of the undamaged checkpoints, newest first. Names every damaged file in one line.

        Raises:
            UserError: the newest undamaged one has another layout.
        """
        found = []
        for step in sorted(self._steps(), reverse=True):
            try:
                manifest = self._verify(step)
            except _Damaged as damage:
                self.say(f"checkpoint refused: {damage}")
                continue
            if not found:
                self._compare(step, manifest["layout"])
            found.append(step)
        return found

    def prune(self, keep: int, last_common: int, unsaved: Container[int] = ()) -> None:
        """Delete what no run will go on from: up to a step, all but the newest `keep` that every worker has.

        Args:
            keep: how many.
            last_common: the last step that all workers have come past.
            unsaved: steps that some worker could not save.
        """
        past = sorted(step for step in self._steps() if step <= last_common)
        kept = [step for step in past if step not in unsaved][-keep:] if len(past) > keep else past
        for step in past:
            if step in kept:
                continue
            self._delete(step)
            with suppress(OSError):  # another worker's may lie there still, or it was quicker
                self._path(step).parent.rmdir()

    def discard_after(self, step: int) -> None:
        """Delete what is newer than `step`, from which the run goes on, and what a kill has left half done."""
        for newer in self._steps():
            if newer > step:
                self._delete(newer)
        self.discard_half_done()

    def discard_half_done(self) -> None:
        """Delete what a kill has left half written, or half deleted."""
        for before in self.folder.glob(f"step-*/{self.name}.old"):
            if not before.with_suffix("").exists():  # killed just when the new one was to take its place
                before.rename(before.with_suffix(""))
        for half_done in self.folder.glob(f"step-*/{self.name}.*"):
            shutil.rmtree(half_done)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}" / self.name

    def _steps(self) -> list[int]:
        return [int(path.parent.name[5:]) for path in self.folder.glob(f"step-*/{self.name}")]

    def _delete(self, step: int) -> None:
        self._path(step).rename(self._path(step).with_suffix(".tmp"))  # a kill must not leave half a checkpoint
        shutil.rmtree(self._path(step).with_suffix(".tmp"))

    def _verify(self, step: int) -> dict[str, Any]:
        path = self._path(step) / "manifest.json"
        try:
            manifest: dict[str, Any] = json.loads(path.read_text())
            claimed = manifest.pop("sha256")
            files = manifest["files"]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise _Damaged(f"{path} cannot be read") from error
        if claimed != _hash_plain(manifest):
            raise _Damaged(f"{path} was altered")
        if manifest.get("format") != _FORMAT:
            raise _Damaged(f"{path} is of another version of isthmus")
        for name, (size, digest) in files.items():
            path = self._path(step) / name
            if not path.is_file():
                raise _Damaged(f"{path} is missing")
            if path.stat().st_size != size:
                raise _Damaged(f"{path} has {path.stat().st_size} bytes instead of {size}")
            if _fingerprint(path)[1] != digest:
                raise _Damaged(f"{path} was altered: its sha256 differs from the manifest's")
        return manifest

    def _compare(self, step: int, layout: Layout) -> None:
        for key in [*self.layout, *layout]:
            there, here = layout.get(key), self.layout.get(key)
            if there != here:
                raise UserError(
                    f"checkpoint {self._path(step)} belongs to another run: {key} is {_brief(there)} there and "
                    f"{_brief(here)} here; resume with the configuration of that run, or choose another train.run_dir"
                )


class Unsaved:
    """Steps whose checkpoint some worker could not write: a run goes on only from a step that all hold.

    Args:
        store: reaches all workers.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, step: int) -> None:
        """Tell the others, before this worker takes part in another sync."""
        with _lost_store():
            self._store.set(f"unsaved/{step}", "")

    def __contains__(self, step: object) -> bool:
        """Whether any worker lacks it."""
        with _lost_store():
            return bool(self._store.check([f"unsaved/{step}"]))


@contextmanager
def _lost_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost([], "the store is gone, and with it the process that holds it") from error


def newest_common(steps: list[int], transport: Transport) -> int | None:
    """The largest step that is in everybody's list; to be called by all ranks, before any sync."""
    peers = transport.quorum(0)
    for gather in (peers.gather_inside, peers.gather):  # then all ranks of all workers know
        own = torch.full((_MOST,), -1, dtype=torch.int64)
        newest = sorted(steps)[-_MOST:]
        own[: len(newest)] = torch.tensor(newest, dtype=torch.int64)
        lists = [{step for step in theirs.tolist() if step >= 0} for (theirs,) in gather([own])]
        steps = list(set.intersection(*lists))
    return max(steps, default=None)


class _Damaged(Exception):
    """A file that is not what was written; the message names it."""


def _unshared(tensors: Tensors) -> Tensors:
    """Copies where tensors share memory (tied weights, views of one buffer): safetensors refuses those."""
    seen, result = set[int](), []
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        result.append(tensor.clone() if address in seen else tensor)
        seen.add(address)
    return result


def reason_of(error: Exception) -> str:
    """Why something could not be written, without the numbers and the path."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return text.removeprefix("Error while serializing: ").removeprefix("I/O error: ").split(" (os error")[0]


def _fingerprint(path: Path) -> list[Any]:
    """Size in bytes and sha256."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _hash_plain(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    """Have a file or folder written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
