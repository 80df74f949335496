"""Workers as torchrun would start them: forks of a server that has imported torch and transformers once."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from isthmus.transport.address import free_port

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])  # a process has one such server, so this is for all tests


@dataclass
class Ended:
    """What became of one worker."""

    result: Any  # what its function returned
    error: str  # "Type: message" of what it raised; empty when it returned
    exit_code: int | None  # -9 when it was killed


def run(work: Callable[..., Any], num_workers: int = 2, within_seconds: float = 120, **arguments: Any) -> list[Ended]:
    """Run `work(rank, **arguments)`, a function of a module, in one process each."""
    port, pipes, processes = free_port(), [], []
    for rank in range(num_workers):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        name = (work.__module__, work.__qualname__)
        process = CONTEXT.Process(target=_run, args=(sender, name, rank, num_workers, port, arguments))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    deadline, received = time.monotonic() + within_seconds, {}
    while any(process.is_alive() for process in processes):
        for rank, pipe in enumerate(pipes):
            if rank not in received and pipe.poll():
                received[rank] = _receive(pipe)
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.02)
    return [
        Ended(*(received.get(rank) or _receive(pipes[rank])), process.exitcode)
        for rank, process in enumerate(processes)
    ]


def results(ended: list[Ended]) -> list[Any]:
    """What all workers returned."""
    assert [worker.error for worker in ended] == [""] * len(ended)
    assert [worker.exit_code for worker in ended] == [0] * len(ended)
    return [worker.result for worker in ended]


def _receive(pipe: Connection) -> tuple[Any, str]:
    try:
        return pipe.recv()
    except EOFError:
        return None, "it was killed"


def _run(sender: Connection, name: tuple[str, str], rank: int, size: int, port: int, arguments: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    world = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    os.environ.update({key: str(value) for key, value in world.items()})
    try:
        sender.send((getattr(importlib.import_module(name[0]), name[1])(rank, **arguments), ""))
    except Exception as error:
        traceback.print_exc()
        sender.send((None, f"{type(error).__name__}: {error}"))
