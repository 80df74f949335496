"""Keeping torch from asking DNS for the names of those who connect."""

from __future__ import annotations

import ctypes
import threading
from functools import cache

from torch.distributed import TCPStore  # type: ignore[attr-defined]


@cache
def spare_lookups() -> None:
    """Have torch give up its lookups, in this process; to be called before its first store is opened.

    It asks DNS for the name of every address it connects to or is connected from, five seconds long where an answer is
    lost, until a first lookup fails (pytorch issue 159007). So one fails here: on a thread whose resolver makes no
    attempt at all. `RES_OPTIONS` would not do: it counts only before the process has asked DNS for anything.
    """
    thread = threading.Thread(target=_fail_once, name="isthmus-dns")
    thread.start()
    thread.join()


def _fail_once() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "__res_init"):
        return  # not glibc: nothing is known of such a wait there
    libc.__res_init()
    libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    libc.__res_state()[1] = 0  # `retry`, of this thread's own state
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
