"""The files of one checkpoint of one rank: whole on the disk, and checked by hash before they are read.

    state.safetensors   tensors
    state.json          everything else, with the tensors' numbers in their places
    manifest.json       step, identity of the run, mesh, size and sha256 of both files, its own sha256

No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from isthmus.core import State, Tensors, UserError
from isthmus.core.flatten import flatten, unflatten
from isthmus.data import without_defaults
from isthmus.parallel.state import StoredTensor

RunIdentity = dict[str, Any]  # flat and plain: what must be equal for a checkpoint to fit
PARAMETER = "parameter "  # begins the keys of a run identity that tell shapes, the others are settings

_FORMAT = 4  # of the files; another one is refused


class Damaged(Exception):
    """A file that is not what was written. The message names it."""


def write_checkpoint(folder: Path, state: State, step: int, identity: RunIdentity, mesh: dict[str, int]) -> None:
    """Write all files to a new folder; on return they have reached the disk.

    Raises:
        OSError, SafetensorError: they could not be written.
    """
    skeleton, tensors = flatten(state)
    folder.mkdir(parents=True)
    tensors = _unshared([tensor.detach().cpu().contiguous() for tensor in tensors])
    save_file({str(number): tensor for number, tensor in enumerate(tensors)}, folder / "state.safetensors")
    (folder / "state.json").write_text(json.dumps(skeleton))
    files = {name: _size_and_hash(folder / name) for name in ("state.safetensors", "state.json")}
    manifest = {"format": _FORMAT, "step": step, "layout": identity, "mesh": mesh, "files": files}
    manifest["sha256"] = _hash_plain(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    for name in (*files, "manifest.json"):
        flush(folder / name)
    flush(folder)


def read_checkpoint(folder: Path) -> State:
    """Return the state that was written to a folder."""
    tensors = load_file(folder / "state.safetensors")
    # where a tensor lies in memory decides how the CPU sums it up: let torch place it, as it did before
    return unflatten(read_plain_part(folder), [tensors[str(number)].clone() for number in range(len(tensors))])


def read_lazily(folder: Path) -> State:
    """Return the state that was written to a folder, with tensors that are read where they are needed."""
    file: Any = safe_open(folder / "state.safetensors", "pt")
    tensors = [StoredTensor(file.get_slice(str(number))) for number in range(len(file.keys()))]
    state: State = unflatten(read_plain_part(folder), tensors)
    return state


def read_plain_part(folder: Path) -> Any:
    """Return what was written beside the tensors."""
    return json.loads((folder / "state.json").read_text())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, or raise `Damaged` where it is not there or not as it was written."""
    path = folder / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        claimed = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"{path} cannot be read") from error
    if claimed != _hash_plain(manifest):
        raise Damaged(f"{path} was altered")
    if manifest.get("format") != _FORMAT:
        raise Damaged(f"{path} is of another version of isthmus")
    return manifest


# options that runs of former versions could not choose, and what they did
_BEFORE = {"outer.merge.kept": 1.0, "outer.schedule.warm_start_lr": 1.0}


def verify(folder: Path, mesh: dict[str, int]) -> None:
    """Raise `Damaged` where a file of a checkpoint, of this mesh, is not as it was written."""
    manifest = read_manifest(folder)
    if manifest["mesh"] != mesh:
        raise Damaged(f"{folder} was written on another mesh than what lies beside it")
    for name, (size, digest) in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{path} is missing")
        if path.stat().st_size != size:
            raise Damaged(f"{path} has {path.stat().st_size} bytes instead of {size}")
        if _size_and_hash(path)[1] != digest:
            raise Damaged(f"{path} was altered: its sha256 differs from the manifest's")


def check_same_run(folder: Path, there: RunIdentity, here: RunIdentity) -> None:
    """Refuse a checkpoint that belongs to another run than this one, with the first difference and both values."""
    there, here = without_defaults(there), without_defaults(here)
    there = {key: value for key, value in _BEFORE.items() if key in here} | there
    for key in [*here, *there]:
        if there.get(key) != here.get(key):
            raise UserError(
                f"checkpoint {folder} belongs to another run: {key} is {_brief(there.get(key))} there and "
                f"{_brief(here.get(key))} here; resume with the configuration of that run, "
                "or choose another train.run_dir"
            )


def flush(path: Path) -> None:
    """Have a file or folder written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_and_hash(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _hash_plain(value: Any) -> str:
    """Return the sha256 of plain values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _unshared(tensors: Tensors) -> Tensors:
    """Copy where tensors share memory (tied weights, views of one buffer): safetensors refuses those."""
    seen, result = set[int](), []
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        result.append(tensor.clone() if address in seen else tensor)
        seen.add(address)
    return result


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
