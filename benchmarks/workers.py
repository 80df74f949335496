"""Workers of one elastic run on this machine, each an `isthmus train`: started, sent away, watched by their metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from isthmus.recipes import load_config
from isthmus.recipes.load import ENVIRONMENT_PREFIX
from isthmus.signals import STOPPED
from isthmus.train.assemble import transport_class

_POLL_SECONDS = 0.02
_LEAVE_SECONDS = 60.0
SAMPLE_TOKENS = 64  # of learning.yaml
Event = dict[str, Any]


class Worker:
    """One process and its metrics. It hangs on a pipe from this process, and ends when it ends."""

    def __init__(self, run_dir: Path, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.run_dir, self.rank, self.process = run_dir, rank, process
        self.events: list[Event] = []  # each with "seen", when it was read here
        self._position = 0

    def look(self) -> None:
        """Read the events that have come since the last time."""
        path = self.run_dir / f"metrics/worker-{self.rank}.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._position)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._position += len(complete)
        self.events += [json.loads(line) | {"seen": time.monotonic()} for line in complete.splitlines()]

    def of(self, kind: str) -> list[Event]:
        """All events of one kind so far."""
        return [event for event in self.events if event["event"] == kind]

    def syncs(self) -> list[Event]:
        """Those that were committed."""
        return [event for event in self.of("sync") if event["committed"]]

    @property
    def tokens(self) -> int:
        """That it has trained on so far."""
        return next((int(event["tokens"]) for event in reversed(self.events) if event["event"] == "step"), 0)

    def tokens_at(self, sync: Event) -> int:
        """That it had trained on when it captured a sync: those of its tokens that are in the anchors with it."""
        before = self.events[: self.events.index(sync)]
        return next((int(event["tokens"]) for event in reversed(before) if event["event"] == "step"), 0)

    def last_state(self) -> dict[str, Any]:
        """The values, without tensors, of its last checkpoint."""
        newest = max((self.run_dir / "checkpoints").glob(f"step-*/worker-{self.rank}"))
        state: dict[str, Any] = json.loads((newest / "state.json").read_text())
        return state


class Workers:
    """The workers of one run.

    Args:
        folder: of the run.
        config: what `isthmus train` is given.
        overrides: the same for all, KEY=VALUE.
        program: how a worker is started; its arguments follow.
    """

    def __init__(self, folder: Path, config: Path, overrides: list[str], program: tuple[str, ...] = ("-m", "isthmus")):
        sets = [part for value in [*overrides, f"train.run_dir={folder}"] for part in ("--set", value)]
        self.folder, self.all = folder, dict[int, Worker]()
        self._command = [sys.executable, *program, "train", str(config), "--follow-stdin", *sets]

    def __enter__(self) -> Self:
        """None yet."""
        subprocess.run(["rm", "-rf", str(self.folder)], check=True)
        (self.folder / "logs").mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End whoever still runs."""
        for worker in self.all.values():
            worker.process.kill()
            worker.process.wait()

    def start(self, rank: int, core: int | None = None) -> Worker:
        """Start a worker that has not been there before, on one core if it is to have its own."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        pin = [] if core is None else ["taskset", "-c", str(core)]
        with (self.folder / f"logs/worker-{rank}.log").open("wb") as log:
            process = subprocess.Popen(
                [*pin, *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
                process_group=0,
            )
        self.all[rank] = Worker(self.folder, rank, process)
        return self.all[rank]

    def leave(self, *ranks: int) -> None:
        """Send workers away by SIGTERM, and wait until they are gone, with a checkpoint behind them."""
        for rank in ranks:
            self.all[rank].process.send_signal(signal.SIGTERM)
        for rank in ranks:
            self.all[rank].process.wait(_LEAVE_SECONDS)
            self.all[rank].look()

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        """Read metrics until a condition holds.

        Raises:
            SystemExit: it does not in time, or a worker failed; with the end of its log.
        """
        end = time.monotonic() + seconds
        while True:
            for rank, worker in self.all.items():
                worker.look()
                if worker.process.poll() not in (None, 0, STOPPED):
                    raise SystemExit(f"worker {rank} failed:\n{self.log(rank)[-2000:]}")
            if condition():
                return
            if time.monotonic() > end:
                logs = "\n".join(f"worker {rank}: {self.log(rank)[-500:]}" for rank in self.all)
                raise SystemExit(f"waited in vain for {seconds:.0f} s: {what}\n{logs}")
            time.sleep(_POLL_SECONDS)

    def log(self, rank: int) -> str:
        """What a worker has said."""
        return (self.folder / f"logs/worker-{rank}.log").read_text(errors="replace")


def check_ledger(workers: list[Worker]) -> dict[str, int]:
    """The samples that all workers trained on until their last commits, and those that the newest ledger counts.

    Every worker has ended, wrote a "step" event at every step, and did not wait for a commit that a peer then saw.

    Raises:
        SystemExit: they differ.
    """
    states = {worker.rank: worker.last_state()["method"]["elastic"] for worker in workers}
    ledger = max(states.values(), key=lambda state: int(state["version"]))["replicated_state"]["samples"]
    anchors = sum(worker.tokens_at(worker.syncs()[-1]) for worker in workers) // SAMPLE_TOKENS
    trained = sum(worker.tokens for worker in workers) // SAMPLE_TOKENS
    if ledger != anchors:
        raise SystemExit(f"the ledger says {ledger} samples, the workers {anchors} of {trained}: {states}")
    return {"anchors": anchors, "ledger": ledger, "lost": trained - anchors}


@contextmanager
def serve_rendezvous(engine: str, folder: Path) -> Iterator[list[str]]:
    """A lighthouse or a first peer of one run's own, as `isthmus launch` makes it; yields the overrides for it."""
    keys = folder.with_name(f"{folder.name}-keys")  # `Workers` empties the folder itself
    overrides = [f"outer.transport.type={engine}", f"train.run_dir={keys}"]
    config = load_config(None, overrides)
    with transport_class(config).serve(config.outer.transport, keys) as known:
        yield [overrides[0], *(f"outer.transport.{name}={value}" for name, value in known.items())]
