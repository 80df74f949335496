"""Printing a profile: one table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from isthmus.tools.profile.measure import Profile
from isthmus.tools.report import readable_bytes

Row = tuple[str, str, str]  # the figure's name, its value, how it is meant


def show(profile: Profile, console: Console) -> None:
    """Print a profile."""
    if not console.is_terminal:
        for what, value, note in rows(profile):
            console.print(f"{what}: {value}" + (f" ({note})" if note else ""), soft_wrap=True, markup=False)
        return
    table = Table("what", box=SIMPLE_HEAD)
    table.add_column("measured", justify="right")
    table.add_column("how", overflow="fold")
    for row in rows(profile):
        table.add_row(*row)
    console.print(table)


def rows(profile: Profile) -> Iterator[Row]:
    """Yield the lines of the table in order."""
    yield "device", profile.device, ""
    yield "parameters", f"{profile.num_parameters:,}", ""
    for tried in profile.micro_batches:
        note = f"{tried.samples_per_second:,.1f} samples/s forward and backward"
        note += ", the fastest" if tried.size == profile.fastest else ""
        yield f"memory, micro-batches of {tried.size}", readable_bytes(tried.peak_bytes), note
    size, batch_size = profile.micro_batch_size, profile.batch_size
    yield "inner step", _seconds(profile.step_seconds), f"{batch_size} samples in micro-batches of {size}"
    yield "tokens/s", f"{profile.tokens_per_second:,.0f}", "images or seconds of sound, where there are no tokens"
    yield "FLOPs per step", _flops(profile.flops_per_step), "matrix products, convolutions, attention"
    size = profile.matrix_size
    product = f"the fastest {profile.precision} product of two {size:,} x {size:,} matrices"
    yield "peak, measured", f"{_flops(profile.peak_flops_per_second)}/s", f"{product} here and now"
    yield "FLOPs utilisation", f"{profile.flops_utilisation:.1%}", "of that peak, in an inner step"
    yield from _syncs(profile)


def _syncs(profile: Profile) -> Iterator[Row]:
    total, workers = sum(profile.sync_bytes.values()), profile.workers
    if profile.sync is None:
        yield "bytes per step", readable_bytes(total), f"sent by each of {workers} workers, after every inner step"
        return
    fragments = f"{len(profile.sync_bytes)} fragments" if len(profile.sync_bytes) > 1 else "the whole model"
    yield "codec", _seconds(profile.sync.codec_seconds), f"encode and decode one's own message, {fragments}"
    yield "outer step", _seconds(profile.sync.outer_seconds), "the rest of a sync, without the network"
    yield "bytes per sync", readable_bytes(total), f"sent by each of {workers} workers, {fragments}"
    for link in profile.links:
        hides = f"hides behind training from H = {link.local_steps:,} on, with tau = {link.overlap_steps:,} or more"
        yield f"at {link.megabits_per_second:,} Mbit/s, modelled", _seconds(link.seconds), hides


def _seconds(seconds: float) -> str:
    """Write a duration: '12.3 ms'."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _flops(count: float) -> str:
    """Write a number of FLOPs: '12.3 GFLOP'."""
    unit, size = next((u, s) for u, s in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 0.0)) if count >= s)
    return f"{count / (size or 1e6):.3g} {unit}FLOP"
