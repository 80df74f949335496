"""Kernels on the CPU: compiled once by the system's compiler."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

_LOGGER = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("cpu.cpp")
# no contraction: a fused multiply-add would round differently from torch
_FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC"]
_TYPES = (torch.float32, torch.uint8, torch.int64)
_VALUES_PER_THREAD = 1 << 20


def run(
    name: str,
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int],
    table: torch.Tensor | None,
    factors: Sequence[float],
) -> bool:
    """Run a function of cpu.cpp as `run_kernel` says, on as many threads as torch uses."""
    library = _library()
    if library is None or not hasattr(library, name) or not all(tensor.dtype in _TYPES for tensor in tensors):
        return False
    num_rows = len(tensors[0])
    num_threads = min(torch.get_num_threads(), max(tensor.numel() for tensor in tensors) // _VALUES_PER_THREAD + 1)
    bounds = [num_rows * i // num_threads for i in range(num_threads + 1)]

    constants: list[Any] = [] if table is None else [ctypes.c_void_p(table.data_ptr())]
    if factors:
        constants.append((ctypes.c_float * len(factors))(*factors))

    def part(start: int, end: int) -> None:
        pointers = [ctypes.c_void_p(t.data_ptr() + start * t.stride(0) * t.element_size()) for t in tensors]
        getattr(library, name)(ctypes.c_int64(end - start), *pointers, *constants, *map(ctypes.c_int64, numbers))

    if num_threads == 1:
        part(0, num_rows)
    else:
        with ThreadPoolExecutor(num_threads) as pool:  # ctypes lets go of the interpreter lock
            list(pool.map(part, bounds, bounds[1:]))
    return True


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled kernels from this user's cache, compiled first if need be; None where that does not work."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return None
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=20, check=True).stdout
        key = hashlib.sha256(b"\0".join([_SOURCE.read_bytes(), version, _cpu(), *map(str.encode, _FLAGS)]))
        path = _cache_folder() / f"kernels-{key.hexdigest()[:16]}.so"
        if not path.exists():
            _compile(compiler, path)
        for found in (path.parent, path):
            _check_owner(found)
        return ctypes.CDLL(str(path))
    except PermissionError as error:
        _LOGGER.warning("kernels are not compiled: %s", error)
        return None
    except (OSError, subprocess.SubprocessError):
        return None


def _check_owner(path: Path) -> None:
    """Raise `PermissionError` where somebody else could have put there what this process would run."""
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
        raise PermissionError(f"{path} belongs to others or can be written by them: own it, and chmod go-w {path}")


def _compile(compiler: str, path: Path) -> None:
    """Compile beside `path` and rename: several processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *_FLAGS, "-o", str(built), str(_SOURCE)]
        subprocess.run(command, capture_output=True, timeout=120, check=True)
        built.chmod(0o700)
        built.replace(path)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isthmus"


def _cpu() -> bytes:
    """Describe this machine's processor: a cache in a shared home folder serves several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    wanted = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join([platform.machine(), *sorted(set(wanted or lines))]).encode()
