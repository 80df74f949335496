"""Real ranks for the tests: forks of a server that has imported torch and the models once, joined over gloo."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.workers import CONTEXT


def run_ranks(work: Callable[..., Any], num_ranks: int, *arguments: Any, within_seconds: float = 120) -> list[Any]:
    """What `work(*arguments)` returns on each of `num_ranks` ranks of a gloo world, in rank order.

    `work` is a function of a module; what it returns is of plain values and tensors. As soon as one rank fails, all
    are ended and its traceback is raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(target=_work, args=(rank, num_ranks, folder, work, arguments)) for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        running = {process.sentinel: process for process in processes}
        deadline = time.monotonic() + within_seconds
        while running:
            ended = [running.pop(sentinel) for sentinel in wait(list(running), max(0, deadline - time.monotonic()))]
            if not ended or any(process.exitcode for process in ended):
                for process in running.values():
                    process.kill()
        for process in processes:
            process.join()
        return _results(Path(folder), [process.exitcode for process in processes])


def _work(rank: int, num_ranks: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
        torch.save(work(*arguments), f"{folder}/{rank}.pt")
        dist.barrier()  # nobody's sockets close while another still talks
    except BaseException:
        Path(folder, f"{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # freeing groups can hang in torch 2.13 (see train/data_parallel.py)


def _results(folder: Path, exit_codes: list[int | None]) -> list[Any]:
    import torch

    if any(exit_codes):
        errors = "\n".join(f"rank {path.stem}: {path.read_text()}" for path in sorted(folder.glob("*.txt")))
        raise RuntimeError(f"exit codes {exit_codes}\n{errors}")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(len(exit_codes))]
