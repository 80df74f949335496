"""What a sync costs the device: capture and encoding against a copy, and the steps that run beside a sync.

GPT-NeoX of 405M parameters in bf16 on a GPU; on a machine without one a small model by the same code, and the result
says so.

    python -m benchmarks.device
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import subject
from benchmarks.results import write
from isthmus.compress.base import Codec
from isthmus.compress.float4 import Float4
from isthmus.compress.quantize import Quantize
from isthmus.core import SyncSchedule, split_whole
from isthmus.inner.supervised import SupervisedStep
from isthmus.outer import KeepProgress, Offload, OuterLoop
from isthmus.outer.in_flight import pseudo_gradient
from isthmus.transport.local import Local, LocalWorld

CODECS: dict[str, Codec] = {"int4": Quantize(4), "E3M0": Float4("E3M0")}
ROUNDS = 20 if subject.ON_GPU else 5
IN_FLIGHT_STEPS = 10  # of as many again without a sync
GOAL = 0.6


def seconds(work: Callable[[], Any]) -> float:
    """Until the device has done it."""
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def wait() -> None:
    """For what this thread has given the device, not for what a sync in flight does beside it."""
    if subject.ON_GPU:
        torch.cuda.current_stream().synchronize()


@torch.no_grad()
def measure_codecs() -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds, in milliseconds, and the share of the bandwidth of a copy."""
    (fragment,) = split_whole(subject.build_model())
    taken: dict[str, list[float]] = {}
    own = pseudo_gradient(fragment, Offload())
    count = sum(tensor.numel() for tensor in own)
    for round_ in range(ROUNDS + 1):
        for name, codec in CODECS.items():
            works = {
                "clone": lambda: [tensor.clone() for tensor in own],
                "capture": lambda: pseudo_gradient(fragment, Offload()),
                "encode": lambda codec=codec: codec.encode(codec.to_rows(own)),
                "both": lambda codec=codec: codec.encode(codec.to_rows(pseudo_gradient(fragment, Offload()))),
            }
            for what, work in works.items():
                once = seconds(work)
                if round_:  # the first one compiles and warms up
                    taken.setdefault(f"{name}/{what}", []).append(once)
    medians = {what: statistics.median(all_) for what, all_ in taken.items()}
    return {name: _shares(name, codec, count, medians) for name, codec in CODECS.items()}


def _shares(name: str, codec: Codec, count: int, medians: dict[str, float]) -> dict[str, float]:
    """Of a copy's bandwidth: the bytes that must be read and written, over the time, over the same of a clone."""
    payload = codec.row_bytes / codec.row
    touched = {"capture": 4 + 4 + 4, "encode": 4 + payload, "both": 4 + 4 + 4 + 4 + payload}  # bytes a value
    bandwidth = 8 * count / medians[f"{name}/clone"]
    figures = {f"{what}_ms": round(1e3 * medians[f"{name}/{what}"], 2) for what in ("clone", *touched)}
    shares = {what: count * size / medians[f"{name}/{what}"] / bandwidth for what, size in touched.items()}
    return figures | {f"{what}_share": round(share, 3) for what, share in shares.items()}


@dataclass(frozen=True)
class Far:
    """A codec over a slow link: the communication thread waits, as it would for the others' messages."""

    codec: Codec
    link_seconds: float

    replicated = True

    def message_fraction(self, state: Any) -> float:
        """Always all."""
        return 1.0

    def average(self, local: Any, state: Any, peers: Any) -> Any:
        """That of the codec, later."""
        time.sleep(self.link_seconds)
        return self.codec.average(local, state, peers)


def measure_steps(offload: Offload) -> dict[str, float]:
    """Median seconds of a step (inner and outer) without a sync, and with one: at its begin, in flight, at its end."""
    model, batch = subject.build_model(), subject.batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inner_step = SupervisedStep(model, optimizer, precision=subject.PRECISION)
    warm = [seconds(partial(inner_step, batch)) for _ in range(5)]
    T = IN_FLIGHT_STEPS
    loop = OuterLoop(
        split_whole(model),
        SyncSchedule(2 * T, overlap_steps=T),
        Far(CODECS["E3M0"], link_seconds=T / 2 * statistics.median(warm)),
        Local(LocalWorld(1), 0),
        partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
        KeepProgress(),
        hash_every=0,
        offload=offload,
    )
    kinds: dict[str, list[float]] = {"quiet": [], "begin": [], "in_flight": [], "finish": []}

    def step() -> None:
        inner_step(batch)
        loop.step()

    for number in range(1, 2 * T * (ROUNDS // 5 + 2) + 1):
        once = seconds(step)
        if number > 4 * T:  # the first sync warms up
            phase = number % (2 * T)
            kind = "begin" if phase == 0 else "in_flight" if phase < T else "finish" if phase == T else "quiet"
            kinds[kind].append(once)
    loop.close()
    medians = {kind: statistics.median(taken) for kind, taken in kinds.items()}
    busy = sum(sum(kinds[kind]) for kind in ("begin", "in_flight", "finish"))
    count = sum(len(kinds[kind]) for kind in ("begin", "in_flight", "finish"))
    return {kind: round(1e3 * value, 2) for kind, value in medians.items()} | {
        "in_flight_ratio": round(medians["in_flight"] / medians["quiet"], 4),
        "whole_sync_ratio": round(busy / count / statistics.mean(kinds["quiet"]), 4),
    }


def main() -> None:
    """Measure and write the result."""
    codecs = measure_codecs()
    steps = {"beside": measure_steps(Offload()), "offloaded": measure_steps(Offload("cpu"))}
    rows: list[list[Any]] = []
    for name, f in codecs.items():
        share = f"{100 * f['both_share']:.0f} %"
        if subject.ON_GPU:
            share += f", goal {100 * GOAL:.0f} %: {'met' if f['both_share'] >= GOAL else 'missed'}"
        rows.append([f"capture and encode, {name}", f"{f['both_ms']} ms", share])
        rows.append([f"encode alone, {name}", f"{f['encode_ms']} ms", f"{100 * f['encode_share']:.0f} %"])
    for where, f in steps.items():
        rows.append([f"a step without a sync, outer state {where}", f"{f['quiet']} ms", ""])
        rows.append(["one beside a sync", f"{f['in_flight']} ms", f"{100 * (f['in_flight_ratio'] - 1):+.1f} %"])
        rows.append(["one that begins a sync", f"{f['begin']} ms", ""])
        rows.append(["one that finishes a sync", f"{f['finish']} ms", ""])
    notes = [
        subject.describe(),
        "share: of the bandwidth of `torch.Tensor.clone` in the same run, counting the bytes that must be touched",
        f"steps: KeepProgress and E3M0; {IN_FLIGHT_STEPS} steps beside a sync over a slow link, then as many without",
    ]
    print(write("device", "A sync on the device", ["what", "time", "against"], rows, notes, codecs | steps))


if __name__ == "__main__":
    main()
