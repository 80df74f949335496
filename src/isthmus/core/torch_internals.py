"""All that isthmus needs of torch and glibc that they do not promise to keep.

Everything of the kind stands here, with why, and with a test of the same name in tests/core/test_torch_internals.py:
where a new version of torch breaks one of these, that test says which.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

_LAZY = "TORCH_GLOO_LAZY_INIT"


def keep_alive(group: dist.ProcessGroup) -> None:
    """Never free a process group, not even at the end of the program.

    Gloo cannot abort a collective (torch 2.10 to 2.13): freeing its group waits, with the interpreter locked, until
    what is stuck has timed out. And its thread may wait for that lock: so do DDP's groups with torch 2.13, for ever.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def clone_default_store() -> Store:
    """Return a new connection to the store with which torch.distributed was initialised: torch has no public way."""
    store: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return store


@contextmanager
def unconnected_gloo() -> Iterator[None]:
    """Have gloo connect the ranks of a group that is made within this context when they first exchange something.

    Otherwise each connects with each at once, in the clear, and a rank that the others cannot reach ends them all.
    """
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LAZY]
        else:
            os.environ[_LAZY] = before


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
