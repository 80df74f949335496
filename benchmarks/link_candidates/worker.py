"""One peer: does what it reads line by line, and answers each line with one; times are of the clock both peers share.

python -m benchmarks.link_candidates.worker MODULE OPTIONS RANK ADDRESS0 ADDRESS1 FOLDER
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.link_candidates.link import Link, Meeting

GIVE_UP_SECONDS = 10.0


def processes() -> list[int]:
    """Return this process and the daemons it has started."""
    found = [os.getpid()]
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            if int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(entry))
    return found


def processor_seconds() -> float:
    """Return what this process and its daemons have used."""
    used = sum(os.times()[:2])
    for process in processes()[1:]:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def count_sockets() -> int:
    """Count the sockets that this process and its daemons hold."""
    count = 0
    for process in processes():
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    count += os.readlink(f"/proc/{process}/fd/{descriptor}").startswith("socket:")
    return count


class Worker:
    """The links that are open, by their number of connections."""

    def __init__(
        self, module: str, options: dict[str, Any], rank: int, addresses: tuple[str, str], folder: Path
    ) -> None:
        self._module = importlib.import_module(f"benchmarks.link_candidates.{module}")
        self._options, self._rank, self._addresses, self._folder = options, rank, addresses, folder
        self._links: dict[int, Link] = {}
        self._memory: dict[int, tuple[memoryview, memoryview, bytes]] = {}

    def connect(self, port: int, connections: int) -> None:
        """Open a link."""
        meeting = Meeting(self._rank, self._addresses, port, self._folder, connections)
        self._links[connections] = self._module.Link(meeting, **self._options)

    def exchange(self, connections: int, size: int, repeats: int = 1, check: bool = False) -> dict[str, float]:
        """Exchange messages of a size, one after another."""
        outgoing, incoming, expected = self._messages(size)
        before, began = processor_seconds(), time.monotonic()
        for _ in range(repeats):
            self._links[connections].exchange(outgoing, incoming)
        ended = time.monotonic()
        if check and incoming != expected:
            raise AssertionError("What was received is not what was sent.")
        return {"began": began, "ended": ended, "processor_seconds": processor_seconds() - before}

    def _messages(self, size: int) -> tuple[memoryview, memoryview, bytes]:
        """Return what is sent, where to receive, and what should come, made once for each size."""
        if size not in self._memory:
            own, other = (Random(rank).randbytes(size) for rank in (self._rank, 1 - self._rank))
            self._memory[size] = (memoryview(bytearray(own)), memoryview(bytearray(size)), other)
        return self._memory[size]

    def abort(self, connections: int, port: int, size: int, after: float | None) -> dict[str, Any]:
        """Give an exchange on a new link up, or see the other do so; say when the exchange ended and all closed."""
        times: dict[str, Any] = {}
        sockets = count_sockets()
        self.connect(port, connections)
        link, (outgoing, incoming, _) = self._links.pop(connections), self._messages(size)

        def exchange() -> None:
            try:
                link.exchange(outgoing, incoming)
            except Exception as error:
                times["raised"] = time.monotonic()
                times["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]

        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        if after is not None:
            time.sleep(after)
            times["called"] = time.monotonic()
            threading.Thread(target=link.abort, daemon=True).start()
        thread.join((after or 0) + GIVE_UP_SECONDS)
        if after is not None:
            while count_sockets() > sockets and time.monotonic() < times["called"] + GIVE_UP_SECONDS:
                time.sleep(0.001)
            if count_sockets() <= sockets:
                times["closed"] = time.monotonic()
        return times

    def congestion(self) -> str:
        """Return the host's own algorithm."""
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def main() -> None:
    """Serve until there are no more lines; the process then ends whatever still runs in it."""
    module, options, rank, first, second, folder = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    worker = Worker(module, json.loads(options), int(rank), (first, second), Path(folder))
    for line in sys.stdin:
        command, arguments = json.loads(line)
        answers.write(json.dumps(getattr(worker, command)(**arguments)) + "\n")
        answers.flush()
    for process in processes()[1:]:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGTERM)
            os.waitpid(process, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
