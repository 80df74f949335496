"""Seconds that one sync adds to a step, at a distance: ours beside torchft's DiLoCo and hivemind's averaging.

Two hosts of `benchmarks/netlab`, a worker on each, 13.1M parameters, equal bytes, equal outer optimizers, nobody hides
anything. An inner step is one of SGD with gradients that are there already, so nearly all of it is the sync:

    python -m benchmarks.distant_beside [--link 500x100] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.network import netlab
from benchmarks.results import write
from benchmarks.wan.contenders import CONTENDERS
from benchmarks.wan.hosts import run_on_hosts
from isthmus.recipes import load_config

CONFIG = Path(__file__).parent / "wan" / "wan.yaml"
PAIRS = {  # name in the table: contender, recipe, wire
    "diloco": ("ours", "diloco", "float32"),
    "torchft DiLoCo": ("torchft", "diloco", "float32"),
    "opendiloco": ("ours", "opendiloco", "float16"),
    "hivemind averaging": ("hivemind", "diloco", "float16"),
}
BESIDE = {"torchft DiLoCo": "diloco", "hivemind averaging": "opendiloco"}
WIDTH, DEPTH = 512, 50
LOCAL_STEPS, WARM_UP, ROUNDS, IDLE_SECONDS = 4, 2, 7, 0.5
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def measure(name: str, result: Path) -> None:
    """Be one of the workers, and write the seconds and bytes of every sync."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    contender, recipe, _ = PAIRS[name]
    config = load_config(CONFIG, [f"outer.recipe={recipe}", f"outer.schedule.local_steps={LOCAL_STEPS}"])
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": 1000, "workers": 2})})
    rank = int(os.environ["RANK"])
    store = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], 29600, 2, rank == 0, wait_for_workers=False)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])
    method = CONTENDERS[contender](config, model, store, rank)
    optimizer = torch.optim.SGD(method.module.parameters(), lr=1e-4)
    method.begin(optimizer)
    found = []
    for number in range((WARM_UP + ROUNDS) * LOCAL_STEPS):
        for param in method.module.parameters():
            param.grad = torch.randn_like(param)
        is_sync = number % LOCAL_STEPS == LOCAL_STEPS - 1
        if is_sync:
            time.sleep(IDLE_SECONDS)
            store.set(f"{number}/{rank}", "")
            store.wait([f"{number}/{other}" for other in range(2)])
        begin, sent = time.perf_counter(), int(_SENT.read_text())
        optimizer.step()
        method.step()
        found.append((is_sync, time.perf_counter() - begin, int(_SENT.read_text()) - sent))
    rows = found[WARM_UP * LOCAL_STEPS :]
    step = statistics.median(seconds for is_sync, seconds, _ in rows if not is_sync)
    result.write_text(json.dumps([(seconds - step, sent) for is_sync, seconds, sent in rows if is_sync]))
    store.set(f"done/{rank}", "")
    store.wait([f"done/{other}" for other in range(2)])
    time.sleep(2.0 if rank == 0 else 0.0)  # the store is its, and must still answer
    os._exit(0)  # threads of contenders may never end


def main() -> None:
    """Measure all of them in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--link", default="500x100", help="Mbit/s x milliseconds")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worker", nargs=2)
    options = parser.parse_args()
    if options.worker:
        measure(options.worker[0], Path(options.worker[1]))
        return
    rate, rtt = options.link.split("x")
    folder = Path("runs/distant-beside").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    seconds, megabytes = {}, {}
    netlab("up", "2", rate, rtt)
    try:
        for name in PAIRS:
            results = [folder / f"worker-{rank}.json" for rank in range(2)]
            run_on_hosts(folder, [["benchmarks.distant_beside", "--worker", name, str(result)] for result in results])
            found = [json.loads(result.read_text()) for result in results]
            seconds[name] = statistics.median(max(s for s, _ in syncs) for syncs in zip(*found, strict=True))
            megabytes[name] = (
                statistics.median(max(sent for _, sent in syncs) for syncs in zip(*found, strict=True)) / 1e6
            )
            print(name, f"{seconds[name]:.2f} s, {megabytes[name]:.1f} MB", flush=True)
    finally:
        netlab("down")
    rows = []
    for name, (_, _, wire) in PAIRS.items():
        times = f"{seconds[name] / seconds[BESIDE[name]]:.1f}" if name in BESIDE else ""
        rows.append([name, wire, f"{megabytes[name]:.1f}", f"{seconds[name]:.2f}", times])
    if options.write:
        columns = ["contender", "wire", "MB sent, by the kernel", "sync, s", "times as long as ours"]
        notes = [
            f"{rate} Mbit/s, {rtt} ms; 2 hosts of benchmarks/netlab, a core each; {WIDTH * WIDTH * DEPTH:,} parameters",
            f"seconds of a step with a sync over those of one without, of the slower worker; medians of {ROUNDS} syncs "
            f"behind {WARM_UP}; {IDLE_SECONDS:g} s of idleness before each",
        ]
        write("distant-beside", "One sync at a distance, beside others", columns, rows, notes, rows)


if __name__ == "__main__":
    sys.exit(main())
