"""What the outer loop costs a worker: seconds of a step without a sync, and memory.

Memory is this process's resident set beyond the model, in units of the model in float32: at rest (anchor, outer
momentum, residual), with a sync in flight, and the highest at any moment of a sync. Every method runs in a process of
its own, on a model of 67 million parameters, alone (M = 1: codecs still encode and decode).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.results import write
from isthmus.compress import Cast
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.float4 import Float4
from isthmus.compress.lowrank import LowRank
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK
from isthmus.core import SyncSchedule, split_strided, split_whole
from isthmus.outer import Eager, KeepProgress, Mix, OuterLoop, Replace
from isthmus.outer.rounds import Rounds
from isthmus.transport.local import Local, LocalWorld

H = 4
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
PLAIN = partial(torch.optim.SGD, lr=1.0)
METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"compressor": Cast(), "outer_optimizer": NESTEROV},
    "streaming": {
        "schedule": SyncSchedule(H, num_fragments=4, overlap_steps=1),
        "compressor": Float4("E3M0"),
        "outer_optimizer": NESTEROV,
        "merge": Mix(0.0),
    },
    "eager": {
        "schedule": SyncSchedule(H, overlap_steps=H),
        "compressor": Float4("E3M0"),
        "outer_optimizer": NESTEROV,
        "merge": Eager(),
    },
    "dilocox": {
        "schedule": SyncSchedule(H, overlap_steps=H),
        "compressor": ErrorFeedback(LowRank(32, factors=Quantize(4))),
        "outer_optimizer": NESTEROV,
        "merge": KeepProgress(),
    },
    "sparseloco": {"compressor": ErrorFeedback(TopK(), 0.95), "outer_optimizer": PLAIN},
    "muloco": {"compressor": ErrorFeedback(Quantize(2)), "outer_optimizer": NESTEROV},
}


def resident_bytes(field: str = "VmRSS") -> int:
    """This process's resident memory now, or the highest so far ("VmHWM")."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) * 1024


def measure(name: str) -> dict[str, float]:
    """Run one method in this process."""
    torch.set_num_threads(1)
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(16))
    size = 4 * sum(param.numel() for param in model.parameters())
    method = {"schedule": SyncSchedule(H), "merge": Replace(), **METHODS[name]}
    fragments = method["schedule"].num_fragments
    base = resident_bytes()
    split = partial(split_strided, num_fragments=fragments) if fragments > 1 else split_whole
    loop = OuterLoop(split(model), transport=Local(LocalWorld(1), 0), hash_every=0, **method)
    loop.step()
    began = time.perf_counter()
    quiet = SyncSchedule(10**9)
    rounds, loop.rounds = loop.rounds, Rounds(quiet)
    for _ in range(2000):
        loop.step()
    step_seconds = (time.perf_counter() - began) / 2000
    loop.rounds, loop.inner_steps = rounds, 0
    flying, rest, peak, sync_seconds = [], [], [], []
    for step in range(1, 4 * H + 1):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9999)
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
        began = time.perf_counter()
        loop.step()
        if rounds.begins(step) or rounds.finishes(step):
            sync_seconds.append(time.perf_counter() - began)
        if step > 2 * H:
            time.sleep(0.3 * bool(loop.state_dict()["in_flight"]))  # let the communication thread end its job
            peak.append(resident_bytes("VmHWM"))
            (flying if loop.state_dict()["in_flight"] else rest).append(resident_bytes())

    def models(samples: list[int]) -> float:
        return round((statistics.median(samples) - base) / size, 2) if samples else float("nan")

    return {
        "step_microseconds": round(1e6 * step_seconds, 1),
        "at_rest": models(rest),
        "in_flight": models(flying),
        "peak": round((max(peak) - base) / size, 2),
        "longest_sync_step_seconds": round(max(sync_seconds), 3),
    }


def main() -> None:
    """Measure every method in a process of its own and write the result."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "MALLOC_MMAP_THRESHOLD_": "1000000"}
    results = {}
    for name in METHODS:
        command = [sys.executable, __file__, name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        results[name] = json.loads(done.stdout)
        print(name, results[name], flush=True)
    columns = ["method", "step without a sync, us", "memory at rest", "in flight", "highest moment", "sync step, s"]
    rows = [[name, *values.values()] for name, values in results.items()]
    notes = [
        "memory in multiples of the model in float32, beyond the model itself",
        "at rest: anchor 1, outer momentum 1 (none in sparseloco), residual 1 (sparseloco, muloco, dilocox)",
        "in flight: the captured pseudo-gradient and the mean, of the fragments on their way",
    ]
    print(write("outer-loop", "The cost of the outer loop", columns, rows, notes, results))


if __name__ == "__main__":
    main()
