"""SIGTERM and Ctrl-C: what they do until training heeds them itself, from the first moment on; the duties of PID 1."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPED = 75  # exit code of what was stopped and is to be continued (EX_TEMPFAIL)
_CODES = {signal.SIGTERM: STOPPED, signal.SIGINT: 130}
_BLOCKED_SECONDS = 1.0  # for the main thread to hear of a signal, which it does not while it waits in C++
_UNWIND_SECONDS = 5.0  # for it to end then, as it would after an error
_FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_heard = threading.Event()  # by the main thread


def heed_signals() -> None:
    """End this process on SIGTERM with exit code 75, on Ctrl-C with 130: at once, whatever it does, until it trains.

    To be called first thing. Python runs handlers between two instructions of the main thread, and not while that waits
    in C++ for other workers, say: so a thread watches, too. What is PID 1 forks and goes on as another process: the
    kernel keeps from PID 1 whatever it has no handler for, and nobody else looks after orphans that have ended.
    """
    blocked = {*_FORWARDED, signal.SIGCHLD, signal.SIGTTOU}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    if os.getpid() == 1:
        _go_on_as_child()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    sys.unraisablehook = _end_if_swallowed
    threading.Thread(target=_watch, args=(reader,), name="isthmus-signals", daemon=True).start()  # with all blocked
    os.register_at_fork(after_in_child=_forget)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ends_process(number: int) -> bool:
    """Whether a signal would end this process at once: nothing that is to be saved has begun."""
    return signal.getsignal(number) in (_end, signal.SIG_DFL)


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Have SIGINT and SIGTERM handled otherwise while the context lasts; does nothing beside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _CODES}
    wakeup = signal.set_wakeup_fd(-1)  # or `_watch` could take a signal that came before the end for one after it
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number, former in before.items():
            signal.signal(number, former)


def _end(number: int, frame: FrameType | None) -> None:
    _heard.set()
    if number == signal.SIGTERM:
        _say_why()
    # no KeyboardInterrupt: where one passes code that C runs (an import), Python ends by SIGINT whoever catches it
    raise SystemExit(_CODES[signal.Signals(number)])


def _end_if_swallowed(unraisable: sys.UnraisableHookArgs) -> None:
    """End the process where `_end` raised in a finalizer or a weak reference's callback: Python would go on."""
    raised = unraisable.exc_value
    if _heard.is_set() and isinstance(raised, SystemExit) and isinstance(raised.code, int):
        os._exit(raised.code)
    sys.__unraisablehook__(unraisable)


def _watch(reader: int) -> None:
    """End the process for a main thread that does not."""
    while True:
        for number in os.read(reader, 1):
            if signal.getsignal(number) is not _end:
                continue  # somebody else heeds it by now
            if _heard.wait(_BLOCKED_SECONDS):
                time.sleep(_UNWIND_SECONDS)
            elif number == signal.SIGTERM:
                _say_why()
            os._exit(_CODES[signal.Signals(number)])


def _say_why() -> None:
    with suppress(OSError):
        os.write(2, b"ended at once by SIGTERM: there was nothing to save\n")


def _forget() -> None:
    """Leave a fork alone: what it is told is not for this process."""
    signal.set_wakeup_fd(-1)
    for number, default in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is _end:
            signal.signal(number, default)


def _go_on_as_child() -> None:
    """Return in a child; this process hands its signals on, looks after orphans, and ends as the child does."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # a terminal tells every process of a group, and this one would be told twice
        if os.isatty(0):
            os.tcsetpgrp(0, os.getpid())  # which SIGTTOU would stop, were it not blocked
        return
    while True:
        number = signal.sigwait({*_FORWARDED, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            with suppress(ProcessLookupError):
                os.kill(child, number)
            continue
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    os._exit(code if code >= 0 else 128 - code)
