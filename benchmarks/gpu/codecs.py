"""Encoding, capture and encoding, decoding of two messages: the share of the bandwidth of a copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import subject
from benchmarks.gpu.figures import Figure
from isthmus.compress.base import Codec
from isthmus.compress.float4 import Float4
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK
from isthmus.core import split_whole
from isthmus.outer import Offload
from isthmus.outer.in_flight import pseudo_gradient
from isthmus.outer.offload import Offloader

DENSE: dict[str, Codec] = {"int8": Quantize(8), "int4": Quantize(4), "E3M0": Float4("E3M0")}
SPARSE: Codec = TopK()  # 64 of 4,096, at 2 bits
ENCODE_SHARE, DECODE_SHARE, SPARSE_CLONES = 80.0, 60.0, 8.0


@torch.no_grad()
def measure(folder: Path) -> Iterator[Figure]:
    """Yield shares of the bandwidth of `clone`, counting only the bytes that one pass must touch."""
    (fragment,) = split_whole(subject.build_model())
    with torch.no_grad():
        for param in fragment.params:
            param.add_(torch.randn_like(param), alpha=0.01)
    offloader = Offloader(Offload(), [fragment], torch.optim.SGD(fragment.anchor))
    own = pseudo_gradient(fragment, offloader)
    count, param_bytes = sum(tensor.numel() for tensor in own), fragment.params[0].element_size()
    for name, codec in DENSE.items():
        works = _works(codec, own)
        works["capture and encode"] = lambda codec=codec: codec.encode(
            codec.to_rows(pseudo_gradient(fragment, offloader))
        )
        medians = _medians(works)
        payload = codec.row_bytes / codec.row
        touched = {  # bytes a value, and the goal
            "encode": (4 + payload, ENCODE_SHARE),
            "capture and encode": (4 + param_bytes + payload, ENCODE_SHARE),
            "decode and add two": (2 * payload + 4, DECODE_SHARE),
        }
        for work, (num_bytes, goal) in touched.items():
            share = 100 * num_bytes / 8 * medians["clone"] / medians[work]
            details = {"ms": _ms(medians[work]), "clone_ms": _ms(medians["clone"]), "values": count}
            yield Figure(f"{name}: {work}, of clone's bandwidth", share, " %", at_least=goal, details=details)
    works = _works(SPARSE, own)
    medians = _medians(works)
    for work in ("encode", "decode and add two"):
        details = {"ms": _ms(medians[work]), "clone_ms": _ms(medians["clone"]), "values": count}
        goal = SPARSE_CLONES if work == "encode" else None
        yield Figure(f"top-k: {work}, in clones", medians[work] / medians["clone"], at_most=goal, details=details)


def _works(codec: Codec, own: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    rows = codec.to_rows(own)
    messages = [codec.encode(rows), codec.encode(-0.5 * rows)]
    return {
        "clone": rows.clone,
        "encode": lambda: codec.encode(rows),
        "decode and add two": lambda: codec.decode_mean(messages, [0.5, 0.5]),
    }


def _medians(works: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return seconds, over rounds in which all take their turns."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(subject.ROUNDS + 1):
        for name, work in works.items():
            once = subject.seconds(work)
            if number:  # the first round compiles and warms up
                taken[name].append(once)
    return {name: statistics.median(all_) for name, all_ in taken.items()}


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
