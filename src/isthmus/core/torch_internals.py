"""All that isthmus needs of torch and glibc that they do not promise to keep.

Everything of the kind stands here, with why, and with a test of the same name in tests/core/test_torch_internals.py:
where a new version of torch breaks one of these, that test says which.
"""

import ctypes
import threading
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13


def keep_alive(group: dist.ProcessGroup) -> None:
    """Never free a process group, not even at the end of the program, unless `release` is called.

    Gloo cannot abort a collective (torch 2.10 to 2.13): freeing its group waits, with the interpreter locked, until
    what is stuck has timed out. And its thread may wait for that lock: so do DDP's groups with torch 2.13, for ever.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def release(group: dist.ProcessGroup) -> None:
    """Take back a `keep_alive`: nothing is stuck in the group any more."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def clone_default_store() -> Store:
    """Return a new connection to the store with which torch.distributed was initialised: torch has no public way."""
    store: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return store


def make_gloo_group(store: Store, rank: int, size: int, host: str, timeout: timedelta) -> dist.ProcessGroup:
    """Make a gloo group that needs no `init_process_group` and listens at `host`.

    `dist.new_group` makes groups of the one world only, and gloo chooses an address by the machine's name; both are
    what torchft does in `ProcessGroupGloo`, too.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


@cache
def skip_reverse_lookups() -> None:
    """Have torch give up its reverse lookups in this process; to be called before its first store is opened.

    It asks DNS for the name of every address it connects to or is connected from, five seconds long where an answer is
    lost, until a first lookup fails (pytorch issue 159007). So one fails here: on a thread whose resolver makes no
    attempt at all. `RES_OPTIONS` would not do: it counts only before the process has asked DNS for anything.
    """
    thread = threading.Thread(target=_fail_once, name="isthmus-dns")
    thread.start()
    thread.join()


def _fail_once() -> None:
    libc: Any = ctypes.CDLL(None)
    if not hasattr(libc, "__res_init"):
        return  # not glibc: nothing is known of such a wait there
    libc.__res_init()
    libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    libc.__res_state()[1] = 0  # `retry`, of this thread's own state
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
