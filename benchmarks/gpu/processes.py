"""Parts in processes of their own: what one of them has found is there, whatever becomes of it."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import Figure

_CONTEXT = multiprocessing.get_context("forkserver")
# what takes seconds to import and touches no GPU: a process that has used one cannot be forked
_CONTEXT.set_forkserver_preload(["isthmus.tools.profile", "transformers.models.gpt_neox.modeling_gpt_neox"])
_LOG_LINES = 30


@dataclass(frozen=True)
class Part:
    """A part of the benchmark: a function that yields figures, and what it takes."""

    name: str
    function: str  # "module:function"
    seconds: float  # after which it is ended
    needs: tuple[str, ...] = ()  # packages without which it is left out
    arguments: tuple[Any, ...] = ()

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed here."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


@dataclass
class PartOutcome:
    """What became of a part."""

    figures: list[Figure] = field(default_factory=list)
    seconds: float = 0.0
    trouble: str = ""  # why figures are missing
    log: list[str] = field(default_factory=list)  # the last lines that it printed, where there was trouble


def run_part(part: Part, seconds: float, tell: Callable[[Figure], None]) -> PartOutcome:
    """Run a part for so many seconds at most; `tell` is given each figure as it comes."""
    outcome, begin = PartOutcome(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="isthmus-gpu-", ignore_cleanup_errors=True) as folder:
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_work, args=(part.function, part.arguments, sender, folder))
        process.start()
        sender.close()
        try:
            for figure in _received(receiver, begin + seconds):
                outcome.figures.append(figure)
                tell(figure)
            process.join(max(1.0, begin + seconds - time.monotonic()))  # what it has left to close
            if process.exitcode is None:
                outcome.trouble = f"it was ended after {seconds:.0f} s"
            elif process.exitcode:
                outcome.trouble = f"it failed with exit code {process.exitcode}"
        finally:
            assert process.pid is not None, "it was started"
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            process.kill()
            process.join()
        if outcome.trouble:
            log = Path(folder, "log")
            outcome.log = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
    outcome.seconds = time.monotonic() - begin
    return outcome


def _received(receiver: Connection, deadline: float) -> Iterator[Figure]:
    """Yield figures until the part has ended, or its time is over."""
    while receiver.poll(max(0.0, deadline - time.monotonic())):
        try:
            yield receiver.recv()
        except EOFError:
            return


def _work(function: str, arguments: Iterable[Any], sender: Connection, folder: str) -> None:
    """Be the process of a part, whose first argument is a folder of its own."""
    os.setpgid(0, 0)
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for output in (1, 2):
        os.dup2(log, output)
    module, _, name = function.partition(":")
    try:
        for figure in getattr(import_module(module), name)(Path(folder), *arguments):
            sender.send(figure)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # nothing that is left over may hang
