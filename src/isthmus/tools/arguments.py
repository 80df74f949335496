"""How the arguments of the command line are read where typer alone does not do it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from typer.core import TyperCommand, TyperGroup
from typing_extensions import override


class Commands(TyperGroup):
    """The commands, with options that may stand before or behind any of them."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        common = [arg for arg in args if arg in ("--verbose", "--quiet")]
        return super().parse_args(ctx, common + [arg for arg in args if arg not in common])


class ResumingCommand(TyperCommand):
    """A command whose `--resume` may stand alone, or before `auto`."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        read = list[str]()
        for arg in args:
            if arg == "auto" and read[-1:] == ["--resume=yes"]:
                read[-1] = "--resume=auto"
            else:
                read.append("--resume=yes" if arg == "--resume" else arg)
        return super().parse_args(ctx, read)


class ResumeMode(StrEnum):
    """Whether a run goes on."""

    NO = "no"
    YES = "yes"
    AUTO = "auto"

    @property
    def mode(self) -> bool | Literal["auto"]:
        """The value as it is given to what trains."""
        return "auto" if self is ResumeMode.AUTO else self is ResumeMode.YES
