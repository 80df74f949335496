"""The base class of transports that a configuration can name: it answers before any worker has joined."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from isthmus.transport.base import TransportLimits
from isthmus.transport.rendezvous import open_store
from isthmus.transport.shared_notes import Notes


@dataclass(frozen=True)
class Finding:
    """One thing that is known of the rendezvous before anybody joins it."""

    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""  # what to change; empty where all is well, or where `found` says it


class ConfiguredTransport:
    """The base class of transports that a configuration can name in `outer.transport.type`.

    `options` are all arguments of the constructor as the configuration gives them.
    """

    PRIVATE_OPTIONS: ClassVar[frozenset[str]] = frozenset()  # those that may differ between workers

    limits = TransportLimits()

    def now(self) -> float:
        """Return the seconds of this machine's monotonic clock."""
        return time.monotonic()

    def open_notes(self) -> Notes:
        """Open what all ranks of a world tell one another once they have joined: here, at the store of torch."""
        return cast(Notes, open_store())

    def wait_until(self, seconds: float) -> None:
        """Do nothing: real time passes by itself."""

    @classmethod
    @contextmanager
    def serve(
        cls, options: Mapping[str, Any], folder: Path, address: str = "127.0.0.1", port: int = 0
    ) -> Iterator[dict[str, Any]]:
        """Run a rendezvous on this machine, where the options name none.

        Args:
            options: of the configuration.
            folder: of the run.
            address: at which the workers reach this machine; with that of loopback nobody else does.
            port: to listen on; 0: any free one.

        Yields:
            Further options, with which workers find the rendezvous.

        Raises:
            UserError: it cannot be served as the options say.
        """
        yield {}

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> Iterator[Finding]:
        """Yield what can be known of the rendezvous by looking from this worker, without joining.

        Raises:
            UserError: an address cannot be one.
        """
        yield Finding("ok", "nothing to look at before joining")

    @classmethod
    def apart_from_a_run(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options with which workers meet and do not disturb those that train with `options`, if there are."""
        return dict(options)
