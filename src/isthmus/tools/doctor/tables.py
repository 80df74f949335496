"""Printing what the doctor has found."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from isthmus.tools.doctor.compare import Check, readable_bits
from isthmus.tools.doctor.measure import Network

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def show(
    console: Console, findings: dict[str, list[Check]], names: Sequence[str] = (), network: Network | None = None
) -> None:
    """Print the findings by worker, the network between the workers of these names, and a verdict."""
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
    if network is not None:
        console.print(_network_table(names, network))
    counts = {status: sum(check.status == status for check in grouped) for status in _COLOURS}
    if counts["fail"]:
        console.print(f"{counts['fail']} to change before this run can go well, {counts['warn']} to look at")
    else:
        console.print("all is well" + (f", but look at {counts['warn']}" if counts["warn"] else ""))


def _network_table(names: Sequence[str], network: Network) -> Table:
    table = Table("worker", box=SIMPLE_HEAD)
    for header in ("receives from all others at", "clock ahead by", "round trip"):
        table.add_column(header, justify="right")
    round_trip = f"{1000 * network.round_trip_seconds:.3g} ms"
    for name, rate, ahead in zip(names, network.download_bytes_per_second, network.clocks_ahead_seconds, strict=True):
        table.add_row(name, readable_bits(rate), f"{ahead:.3f} s", round_trip)
    return table


def _plain(text: str) -> str:
    """Escape a text, so that rich does not take it for markup."""
    return text.replace("[", r"\[")
