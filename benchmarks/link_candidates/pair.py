"""Two workers of one candidate, on loopback or in two hosts, that do everything at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.link_candidates.keys import make_keys
from benchmarks.network import NETLAB, netlab

HOSTS, LOOPBACK = ("10.77.0.10", "10.77.0.11"), ("127.0.0.1", "127.0.0.1")
_ports = count(29600, 20)


@dataclass(frozen=True)
class Candidate:
    """Who takes part.

    Attributes:
        name: in the table.
        module: of this package, with its implementation.
        needs: what must be installed.
        lacks: of what the link must do.
        options: of its `Link`.
        ciphers: of TLS 1.3, for those that ask OpenSSL's configuration; empty: its own choice.
    """

    name: str
    module: str
    needs: str = ""
    lacks: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    ciphers: str = ""

    def num_lines(self) -> int:
        """Count the lines of its implementation that are not blank."""
        text = Path(__file__).with_name(f"{self.module}.py").read_text()
        return sum(bool(line.strip()) for line in text.splitlines())


@contextmanager
def hosts(mbit: float, rtt_ms: float) -> Iterator[None]:
    """Put two hosts up; without a round-trip time they are joined by cables, else by netlab's switch."""
    netlab("up", "2", str(mbit), *([str(rtt_ms)] if rtt_ms else []))
    try:
        yield
    finally:
        netlab("down")


class Pair:
    """Two workers; a context.

    Args:
        candidate: what they run.
        inside: whether each runs in its host, on a core of its own, or both on loopback.
    """

    def __init__(self, candidate: Candidate, inside: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="links-")
        folder = Path(self._folder.name)
        make_keys(folder)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if candidate.ciphers:
            settings = "openssl_conf = a\n[a]\nssl_conf = b\n[b]\nsystem_default = c\n[c]\nCiphersuites = "
            (folder / "openssl.cnf").write_text(f"{settings}{candidate.ciphers}\n")
            environment["OPENSSL_CONF"] = str(folder / "openssl.cnf")
        options, addresses = json.dumps(candidate.options), HOSTS if inside else LOOPBACK
        self._log = (folder / "log").open("w+")
        self._workers = []
        for rank in (0, 1):
            prefix = [NETLAB, "exec", str(rank), "taskset", "-c", str(rank % (os.cpu_count() or 1))] if inside else []
            module = [sys.executable, "-m", "benchmarks.link_candidates.worker"]
            self._workers.append(
                subprocess.Popen(
                    [*prefix, *module, candidate.module, options, str(rank), *addresses, str(folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    env=environment,
                    text=True,
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(10)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            worker.stdout.close()
        self._log.close()
        self._folder.cleanup()

    def both(self, command: str, *, each: tuple[dict[str, Any], ...] = ({}, {}), **arguments: Any) -> list[Any]:
        """Have both workers do something, and return what they answer.

        Raises:
            RuntimeError: a worker ended; with the end of its log.
        """
        for worker, own in zip(self._workers, each, strict=True):
            worker.stdin.write(json.dumps([command, arguments | own]) + "\n")
            worker.stdin.flush()
        answers = [worker.stdout.readline() for worker in self._workers]
        if not all(answers):
            self._log.seek(0)
            raise RuntimeError(f"A worker ended in {command} {arguments}:\n{self._log.read()[-2000:]}")
        return [json.loads(answer) for answer in answers]

    def connect(self, connections: int) -> None:
        """Open a link."""
        self.both("connect", connections=connections, port=next(_ports))

    def exchange(self, connections: int, size: int, **more: Any) -> tuple[float, float]:
        """Exchange messages; seconds from the first begin to the last end, and processor seconds of both."""
        first, second = self.both("exchange", connections=connections, size=size, **more)
        seconds = max(first["ended"], second["ended"]) - min(first["began"], second["began"])
        return seconds, first["processor_seconds"] + second["processor_seconds"]

    def abort(self, connections: int, size: int) -> dict[str, Any]:
        """Have the first worker give an exchange up; seconds after that until all know, None where it never came."""
        each: tuple[dict[str, Any], ...] = ({"after": 1.0}, {"after": None})
        own, other = self.both("abort", each=each, connections=connections, size=size, port=next(_ports))
        since = {"returned": own.get("raised"), "closed": own.get("closed"), "other_knows": other.get("raised")}
        seconds = {what: None if at is None else at - own["called"] for what, at in since.items()}
        return seconds | {"error": own.get("error"), "other_error": other.get("error")}
