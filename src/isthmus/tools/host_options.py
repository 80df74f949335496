"""The options of `isthmus launch` that name other machines."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from isthmus.tools.hosts import Hosts

HostNames = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Run them there by ssh: user@host:port, shared out in order.", show_default=False),
]
HostPython = Annotated[str, typer.Option(metavar="PATH", help="The hosts' Python.", show_default="this one")]
HostAddress = Annotated[
    str | None, typer.Option(help="How the other hosts reach the first one.", show_default="by its name")
]


def open_hosts(names: str, python: str, address: str | None) -> AbstractContextManager[Hosts]:
    """Return the machines that the options of a launch name; nobody is called yet."""
    from isthmus.tools.hosts import Hosts

    return nullcontext(Hosts(names, python, address))
