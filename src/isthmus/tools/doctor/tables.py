"""The doctor's findings, for people."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from isthmus.tools.doctor.check import Check
from isthmus.tools.doctor.compare import readable_bits
from isthmus.tools.doctor.link import Link

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def show(console: Console, findings: dict[str, list[Check]], links: list[Link]) -> None:
    """Print the findings by worker, the ways between them, and a verdict."""
    table = Table("check", "worker", "", box=SIMPLE_HEAD)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    grouped: dict[Check, list[str]] = {}
    for worker, checks in findings.items():
        for check in checks:
            grouped.setdefault(check, []).append(worker)
    order = list(dict.fromkeys(check.name for check in grouped))
    for check, workers in sorted(grouped.items(), key=lambda item: order.index(item[0].name)):
        status = f"[{_COLOURS[check.status]}]{check.status}[/]"
        table.add_row(check.name, ", ".join(workers), status, _plain(check.found), _plain(check.advice))
    console.print(table)
    if links:
        console.print(_link_table(links))
    counts = {status: sum(check.status == status for check in grouped) for status in _COLOURS}
    if counts["fail"]:
        console.print(f"{counts['fail']} to mend before this run can go well, {counts['warn']} to look at")
    else:
        console.print("all is well" + (f", but look at {counts['warn']}" if counts["warn"] else ""))


def _link_table(links: list[Link]) -> Table:
    table = Table("from", "to", box=SIMPLE_HEAD)
    for header in ("round trip", "there", "back", "clock ahead by"):
        table.add_column(header, justify="right")
    for link in sorted(links, key=lambda link: (link.here, link.there)):
        table.add_row(
            link.here,
            link.there,
            f"{1000 * link.round_trip_seconds:.3g} ms",
            readable_bits(link.up_bytes_per_second),
            readable_bits(link.down_bytes_per_second),
            f"{link.ahead_seconds:.3f} s",
        )
    return table


def _plain(text: str) -> str:
    """Not to be read as rich's markup."""
    return text.replace("[", r"\[")
