"""torchft's lighthouse: the server, and a worker's connection to it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from isthmus.core.types import UserError
from isthmus.transport.address import EVERYWHERE, join_address, own_address, split_address
from isthmus.transport.base import TransportError
from isthmus.transport.elastic.membership import check_grace
from isthmus.transport.timeouts import NoAnswer, TimedCalls

BEAT_SECONDS = 1.0
DEAD_SECONDS = 5.0
_ATTEMPT_SECONDS = 2.0  # one attempt at a connection: Ctrl-C works between two
_SPARE_SECONDS = 5.0  # for the way to the lighthouse and back
_RETRY_SECONDS = 0.1


@contextmanager
def lighthouse(
    bind: str = "0.0.0.0:0", min_workers: int = 1, grace_seconds: float = 10.0, dead_seconds: float = DEAD_SECONDS
) -> Iterator[int]:
    """Run a lighthouse in this process, for as long as the context lasts.

    Args:
        bind: host:port to listen on; port 0 takes a free one.
        min_workers: with fewer there is no rendezvous.
        grace_seconds: how long those who came first wait for the others that are alive.
        dead_seconds: without a heartbeat for so long a worker does not count as alive.

    Yields:
        Its port.

    Raises:
        UserError: the port is in use, `bind` is no address of this machine, or `grace_seconds` is no time.
    """
    check_grace(grace_seconds)
    host, port = split_address(bind)
    try:
        server = import_torchft().LighthouseServer(
            bind=join_address(host, port),
            min_replicas=min_workers,
            join_timeout_ms=int(1000 * grace_seconds),
            heartbeat_timeout_ms=int(1000 * dead_seconds),
        )
    except RuntimeError as error:
        if "in use" in str(error):
            raise UserError(f"port {port} is in use on this machine: give the lighthouse a free one") from error
        raise UserError(f"a lighthouse cannot listen on {bind}: {error}") from error
    try:
        yield int(server.address().rsplit(":", 1)[1])
    finally:
        server.shutdown()


def serve_lighthouse(bind: str, min_workers: int = 1, grace_seconds: float = 10.0, host: str | None = None) -> None:
    """Run a lighthouse as `lighthouse` does until Ctrl-C or SIGTERM, and say what the workers need.

    They reach it at `host`; None: the address it listens on, or where that is everywhere, the address of its way to the
    internet.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # also for the server's threads
    try:
        with lighthouse(bind, min_workers, grace_seconds) as port:
            listens_on = split_address(bind)[0]
            reached = listens_on if listens_on not in EVERYWHERE else own_address()
            address = join_address(host or reached, port)
            print(f"lighthouse: workers join it with --set outer.transport.lighthouse={address}")
            print(f"            http://{address}/ shows who is there; Ctrl-C ends it", flush=True)
            signal.sigwait(signals)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LighthouseConnection:
    """A worker's connection to the lighthouse, which comes back by itself when the lighthouse does."""

    def __init__(self, address: str, name: str) -> None:
        self.address, self.name = address, name
        self.beats = True  # whether this worker counts as alive, so that the others wait for it
        self._client: Any = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="isthmus-lighthouse", daemon=True)

    def connect(self, seconds: float) -> None:
        """Connect, and begin to send heartbeats; raise a `UserError` where no lighthouse answers in time."""
        split_address(self.address)
        client_class = import_torchft().LighthouseClient
        deadline = time.monotonic() + seconds
        while self._client is None:
            try:
                client = client_class(f"http://{self.address}", timedelta(seconds=_ATTEMPT_SECONDS))
                client.heartbeat(self.name, timedelta(seconds=_ATTEMPT_SECONDS))
                self._client = client
            except (RuntimeError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"no lighthouse answered at {self.address} for {seconds:g} s: is `isthmus lighthouse` running "
                        f"there, and can this machine reach that port? ({_readable(error)})"
                    ) from error
                time.sleep(_RETRY_SECONDS)
        self._thread.start()

    def ask(
        self,
        calls: TimedCalls,
        seconds: float,
        store_address: str,
        data: dict[str, Any],
        gives_up: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Wait for a quorum with this worker in it; return a `torchft._torchft.Quorum`.

        A lighthouse that is away may come back: it is asked until the time is over.
        """
        client, deadline = self._client, time.monotonic() + seconds
        if client is None:
            raise TransportError("this worker has not connected, or has left")

        def quorum() -> Any:
            left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
            return client.quorum(self.name, left, store_address=store_address, data=data)

        while True:
            try:
                return calls.call(max(0.1, deadline - time.monotonic()) + _SPARE_SECONDS, quorum, gives_up)
            except TimeoutError as error:
                raise TransportError(
                    f"no rendezvous within {seconds:.1f} s: too few came, of the workers that the lighthouse at "
                    f"{self.address} regards as alive"
                ) from error
            except NoAnswer as error:
                raise TransportError(f"the lighthouse at {self.address}: {error}") from error
            except RuntimeError as error:
                if time.monotonic() > deadline:
                    problem = f"does not answer ({_readable(error)})"
                    raise TransportError(f"the lighthouse at {self.address} {problem}") from error
            time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """Stop the heartbeats: the lighthouse forgets this worker within its `dead_seconds`."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_ATTEMPT_SECONDS)
        self._client = None  # its threads end with it

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            if self.beats:
                with suppress(RuntimeError, TimeoutError):  # a lighthouse that is away may come back
                    self._client.heartbeat(self.name, timedelta(seconds=_ATTEMPT_SECONDS))


def import_torchft() -> Any:
    """Import the wheel of torchft, if it is installed, quiet: it would log every request to standard error."""
    before = os.environ.get("RUST_LOG")
    os.environ.setdefault("RUST_LOG", "error")
    try:
        import torchft._torchft  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(f"torchft is not installed: pip install 'isthmus[elastic]' ({error})") from error
    finally:
        if before is None:
            del os.environ["RUST_LOG"]
    return torchft._torchft


def _readable(error: Exception) -> str:
    """Return the part of a message of torchft that people can read."""
    text = str(error)
    match = re.search(r'message: "([^"]*)"', text) or re.search(r"transport error: ([^:]*(?:: [^:]*)?)", text)
    return match[1] if match else text.split("\n")[0]
