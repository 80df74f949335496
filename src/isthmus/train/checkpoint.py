"""Checkpoints of one worker, or of each of its ranks: complete, checked by hash, never half written.

    checkpoints/step-00000200/worker-0/state.safetensors   tensors (worker-0-rank-1: those of its second rank)
                                       state.json          everything else, with the tensors' numbers in their places
                                       manifest.json       step, layout, mesh, size and sha256 of both files, its own

A checkpoint is written to a sibling folder and renamed when it is on the disk. No pickle anywhere. One that cannot be
written (the disk is full) leaves nothing behind, and the ones before it as they are.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Container
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from isthmus.core import State, Tensors, UserError
from isthmus.core.flatten import flatten, unflatten
from isthmus.parallel import Mesh
from isthmus.parallel.state import Stored
from isthmus.train.files import fingerprint, flush, hash_plain
from isthmus.train.folder import name_of, reason_of

Layout = dict[str, Any]  # flat and plain: what must be equal for a checkpoint to fit

_LOGGER = logging.getLogger(__name__)
_FORMAT = 4  # of the files; another one is refused


class NotSaved(Exception):
    """What was to be kept could not be written. One line: what, why, what to do."""


class Checkpoints:
    """The checkpoints of one process, and where the mesh has changed since, those of its worker.

    Args:
        folder: of all workers and steps.
        worker: whose they are.
        layout: of the run; a checkpoint of another one is refused.
        rank: inside the worker.
        mesh: of the worker's ranks.
    """

    def __init__(
        self,
        folder: Path,
        worker: int,
        layout: Layout,
        rank: int = 0,
        mesh: Mesh = Mesh(),  # noqa: B008 (a frozen value)
    ) -> None:
        self.folder, self.worker, self.layout, self.rank = folder, worker, layout, rank
        self.name, self.mesh = name_of(worker, rank), mesh

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
        files = {name: fingerprint(temporary / name) for name in ("state.safetensors", "state.json")}
        mesh = self.mesh.division
        manifest = {"format": _FORMAT, "step": step, "layout": self.layout, "mesh": mesh, "files": files}
        manifest["sha256"] = hash_plain(manifest)
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for name in (*files, "manifest.json"):
            flush(temporary / name)
        flush(temporary)
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
            flush(changed)

    def load(self, step: int) -> State:
        """The state that this process saved after `step`."""
        skeleton = json.loads((self._path(step) / "state.json").read_text())
        tensors = load_file(self._path(step) / "state.safetensors")
        # where a tensor lies in memory decides how the CPU sums it up: let torch place it, as it did before
        return unflatten(skeleton, [tensors[str(number)].clone() for number in range(len(tensors))])

    def load_ranks(self, step: int) -> list[State]:
        """What each rank that the worker then had saved after `step`; tensors are not read yet."""
        states = []
        for rank in range(self.mesh_of(step).num_ranks):
            path = self._path(step, name_of(self.worker, rank))
            file = safe_open(path / "state.safetensors", "pt")
            tensors = [Stored(file.get_slice(str(number))) for number in range(len(file.keys()))]
            states.append(unflatten(json.loads((path / "state.json").read_text()), tensors))
        return states

    def mesh_of(self, step: int) -> Mesh:
        """Of the ranks that wrote the checkpoint of `step`, as far as it decides what each of them held."""
        return Mesh(**self._manifest(step, self._witness(step))["mesh"])

    def usable(self) -> list[int]:
        """Steps of the undamaged checkpoints, newest first. Names every damaged file in one line.

        Each rank looks after its own files; after those of another mesh the ranks look together, each after some. So
        a worker can stand where all of its ranks say that it can.

        Raises:
            UserError: the newest undamaged one has another layout.
        """
        found = list[int]()
        for step in sorted({*self._steps(self.name), *self._steps(name_of(self.worker))}, reverse=True):
            if self.is_usable(step, compare=not found):
                found.append(step)
        return found

    def is_usable(self, step: int, compare: bool = True) -> bool:
        """Whether the checkpoint of `step` is undamaged. Names a damaged file in one line.

        Raises:
            UserError: it has another layout, where that is to be compared.
        """
        try:
            manifest = self._manifest(step, self._witness(step))
            for rank in range(self.rank, Mesh(**manifest["mesh"]).num_ranks, self.mesh.num_ranks):
                self._verify(step, name_of(self.worker, rank), manifest["mesh"])
        except _Damaged as damage:
            _LOGGER.warning("checkpoint refused: %s", damage)
            return False
        if compare:
            self._compare(step, manifest["layout"])
        return True

    def prune(self, keep: int, last_common: int, unsaved: Container[int] = ()) -> None:
        """Delete what no run will go on from: up to a step, all but the newest `keep` that every worker has.

        Args:
            keep: how many.
            last_common: the last step that all workers have come past.
            unsaved: steps that some worker could not save.
        """
        past = sorted(step for step in self._steps(self.name) if step <= last_common)
        kept = [step for step in past if step not in unsaved][-keep:] if len(past) > keep else past
        for step in self._all_steps():
            if step > last_common or step in kept:
                continue
            self._delete(step)
            with suppress(OSError):  # another worker's may lie there still, or it was quicker
                self._path(step).parent.rmdir()

    def discard_after(self, step: int) -> None:
        """Delete what is newer than `step`, from which the run goes on, and what a kill has left half done."""
        for newer in self._all_steps():
            if newer > step:
                self._delete(newer)
        self.discard_half_done()

    def discard_half_done(self) -> None:
        """Delete what a kill has left half written, or half deleted."""
        for name in self._names():
            for before in self.folder.glob(f"step-*/{name}.old"):
                if not before.with_suffix("").exists():  # killed just when the new one was to take its place
                    before.rename(before.with_suffix(""))
            for path in self._entries():
                if path.stem == name and path.suffix:
                    shutil.rmtree(path)

    def _path(self, step: int, name: str | None = None) -> Path:
        return self.folder / f"step-{step:08d}" / (name or self.name)

    def _steps(self, name: str) -> list[int]:
        return [int(path.parent.name[5:]) for path in self.folder.glob(f"step-*/{name}")]

    def _all_steps(self) -> set[int]:
        """Of what this process may delete."""
        return {step for name in self._names() for step in self._steps(name)}

    def _entries(self) -> list[Path]:
        """What lies in the folders of all steps, but for those that another worker deletes just now."""
        found: list[Path] = []
        for folder in self.folder.glob("step-*"):
            with suppress(FileNotFoundError):
                found += folder.iterdir()
        return found

    def _names(self) -> list[str]:
        """Whose checkpoints this process deletes: its own; a first rank those of former ranks, too."""
        names = {self.name}
        if self.rank == 0:
            for path in self._entries():
                if path.stem.startswith(f"{self.name}-rank-"):
                    names.add(path.stem)
            names -= {name_of(self.worker, rank) for rank in range(1, self.mesh.num_ranks)}
        return sorted(names)

    def _delete(self, step: int) -> None:
        """What of this step is this process' to delete."""
        for path in map(partial(self._path, step), self._names()):
            if path.exists():
                path.rename(path.with_suffix(".tmp"))  # a kill must not leave half a checkpoint
                shutil.rmtree(path.with_suffix(".tmp"))

    def _witness(self, step: int) -> str:
        """A rank whose manifest tells a checkpoint's mesh: the worker's first, or if it is not to be seen, this."""
        first = name_of(self.worker)
        return first if self._path(step, first).exists() else self.name

    def _manifest(self, step: int, name: str) -> dict[str, Any]:
        path = self._path(step, name) / "manifest.json"
        try:
            manifest: dict[str, Any] = json.loads(path.read_text())
            claimed = manifest.pop("sha256")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise _Damaged(f"{path} cannot be read") from error
        if claimed != hash_plain(manifest):
            raise _Damaged(f"{path} was altered")
        if manifest.get("format") != _FORMAT:
            raise _Damaged(f"{path} is of another version of isthmus")
        return manifest

    def _verify(self, step: int, rank_name: str, mesh: dict[str, int]) -> None:
        """Of one rank that wrote a checkpoint on this mesh."""
        manifest = self._manifest(step, rank_name)
        if manifest["mesh"] != mesh:
            raise _Damaged(f"{self._path(step, rank_name)} was written on another mesh than what lies beside it")
        for name, (size, digest) in manifest["files"].items():
            path = self._path(step, rank_name) / name
            if not path.is_file():
                raise _Damaged(f"{path} is missing")
            if path.stat().st_size != size:
                raise _Damaged(f"{path} has {path.stat().st_size} bytes instead of {size}")
            if fingerprint(path)[1] != digest:
                raise _Damaged(f"{path} was altered: its sha256 differs from the manifest's")

    def _compare(self, step: int, layout: Layout) -> None:
        for key in [*self.layout, *layout]:
            there, here = layout.get(key), self.layout.get(key)
            if there != here:
                raise UserError(
                    f"checkpoint {self._path(step)} belongs to another run: {key} is {_brief(there)} there and "
                    f"{_brief(here)} here; resume with the configuration of that run, or choose another train.run_dir"
                )


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


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
