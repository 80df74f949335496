"""An elastic run of real processes over the real lighthouse: started, struck, started again, looked at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.hosts import Hosts, enter
from tests.read_events import read_events
from worker_processes import CONTEXT, ROOT

from isthmus.signals import STOPPED
from isthmus.train.checkpoint import Checkpoints
from isthmus.transport.torchft.lighthouse import lighthouse
from isthmus.transport.trust import SECRET

BUDGET_SECONDS = 20.0
CONFIG: dict[str, Any] = {
    "model": {
        "type": "module",
        "path": "tests.train.tiny:Bigram",
        "arguments": {"hidden_size": 64},
        "sequence_length": 8,
    },
    "data": {"type": "text", "source": str(ROOT / "src/isthmus/core")},
    "inner": {"batch_size": 2, "optimizer": {"type": "adamw"}},
    "outer": {
        "schedule": {"local_steps": 5, "num_fragments": 1, "warm_start_steps": 0},
        "split": "whole",
        "hash_every": 1,
    },
    "train": {"workers": 3, "steps": 200, "eval_every": 0, "eval_batches": 1, "checkpoint_every": 25},
}
TRANSPORT = {"type": "torchft", "min_workers": 2, "sync_budget_seconds": BUDGET_SECONDS}
HOSTS_SECRET = "a secret of at least sixteen letters"  # of workers on hosts of their own
Deaths = list[tuple[str, int]]  # points of `dying_worker.POINTS`, and at which arrival there


class World:
    """The workers of one run, and what they left behind in `folder`."""

    def __init__(
        self, folder: Path, address: str, recipe: str, hosts: Hosts | None = None, num_workers: int = 3, **options: Any
    ) -> None:
        self.folder, self.run_dir, self.hosts = folder, folder / "run", hosts
        outer = CONFIG["outer"] | {"recipe": recipe, "transport": TRANSPORT | {"lighthouse": address} | options}
        train = CONFIG["train"] | {"run_dir": str(self.run_dir), "workers": num_workers}
        (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG | {"outer": outer, "train": train}))
        self.processes: dict[int, Any] = {}
        self.starts: dict[int, int] = defaultdict(int)
        self._leashes: dict[int, Any] = {}

    def start(self, rank: int, resume: bool = False, deaths: Deaths | None = None) -> None:
        """A fork."""
        self._leashes.pop(rank, None)
        reader, self._leashes[rank] = CONTEXT.Pipe(duplex=False)
        log = self._next_log(rank)
        host = None if self.hosts is None else self.hosts.name(rank)
        process = CONTEXT.Process(target=_live, args=(reader, log, self.folder, rank, resume, deaths or [], host))
        process.start()
        self.processes[rank] = process

    def start_program(self, rank: int) -> None:
        """A process of its own, which ends as Python ends."""
        command = [sys.executable, str(Path(__file__).with_name("dying_worker.py")), str(self.folder), str(rank)]
        with self._next_log(rank).open("wb") as log:
            self.processes[rank] = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def exit_code(self, rank: int) -> int | None:
        process = self.processes[rank]
        return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode

    def wait_for(self, condition: Callable[[], Any], seconds: float = 90) -> None:
        """Wait; nobody may fail meanwhile."""
        end = time.monotonic() + seconds
        while not condition():
            failed = [
                rank for rank in self.processes if self.exit_code(rank) not in (None, 0, STOPPED, -signal.SIGKILL)
            ]
            assert not failed, f"worker {failed[0]} failed; {self.logs()}"
            assert time.monotonic() < end, f"waited in vain; {self.logs()}"
            time.sleep(0.02)

    def wait_for_end(self) -> None:
        """Let them run as fast as they can, to the end."""
        (self.folder / "go").touch()
        self.wait_for(lambda: all(self.exit_code(rank) == 0 for rank in self.processes))

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait() if isinstance(process, subprocess.Popen) else process.join()
            if isinstance(process, subprocess.Popen):
                process.stdin.close()

    def seen(self, rank: int, kind: str) -> list[dict[str, Any]]:
        """What a worker wrote down (`dying_worker.Witness`) in all of its lives."""
        return [event for event in read_events(self.folder / f"witness-{rank}.jsonl") if kind in event]

    def syncs(self, rank: int, peers: int) -> int:
        """How many syncs of so many workers this one has taken part in."""
        return sum(sync["committed"] and sync["peers"] == peers for sync in self.seen(rank, "committed"))

    def died(self, rank: int) -> int:
        """How often it has killed itself."""
        return len(list(self.folder.glob(f"died-{rank}-*")))

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(self.folder.glob("log-*")))

    def log(self, rank: int) -> str:
        """Of its last life."""
        return (self.folder / f"log-{rank}-{self.starts[rank]}.txt").read_text()

    def _next_log(self, rank: int) -> Path:
        self.starts[rank] += 1
        return self.folder / f"log-{rank}-{self.starts[rank]}.txt"

    def final_state(self, rank: int) -> dict[str, Any]:
        """What the worker's last checkpoint holds of the transport."""
        checkpoints = self._checkpoints(rank)
        state: dict[str, Any] = checkpoints.load(max(checkpoints.usable()))["method"]["elastic"]
        return state

    def check(self, ranks: list[int]) -> None:
        """What must hold at the end of every run, whatever happened in it."""
        self._check_anchors()
        self._check_ledger(ranks)
        for rank in ranks:
            self._check_checkpoints(rank)

    def _check_anchors(self) -> None:
        """Who stands at the same version of the same history has the same anchors."""
        hashes = defaultdict(set)
        for path in self.folder.glob("witness-*"):
            for event in self.seen(int(path.stem[8:]), "anchors"):
                version, chain, digest = event["anchors"]
                hashes[version, chain].add(digest)
        assert len(hashes) > 30
        assert not {commit: seen for commit, seen in hashes.items() if len(seen) > 1}

    def _check_ledger(self, ranks: list[int]) -> None:
        """All have one ledger; every sample in it was read by the worker that it came from, and came once."""
        ledgers = [self.final_state(rank)["replicated_state"] for rank in ranks]
        assert all(ledger == ledgers[0] for ledger in ledgers)
        commits = {event["commit"]: event["samples"] for rank in ranks for event in self.seen(rank, "commit")}
        assert sorted(commits) == list(range(1, ledgers[0]["commits"] + 1))
        entered = [(worker, sample) for commit in commits.values() for worker in commit for sample in commit[worker]]
        samples = [sample for _, sample in entered]
        assert len(samples) == len(set(samples)) == ledgers[0]["samples"]
        read = {rank: {sample for event in self.seen(rank, "read") for sample in event["read"]} for rank in ranks}
        assert all(sample in read[int(worker.removeprefix("worker-"))] for worker, sample in entered)

    def _check_checkpoints(self, rank: int) -> None:
        """All that are there can be used."""
        usable = self._checkpoints(rank).usable()
        paths = list((self.run_dir / "checkpoints").glob(f"step-*/worker-{rank}*"))
        assert len(usable) == len(paths), "something half done is left behind"

    def _checkpoints(self, rank: int) -> Checkpoints:
        folder = self.run_dir / "checkpoints"
        newest = max(folder.glob(f"step-*/worker-{rank}/manifest.json"))
        return Checkpoints(folder, rank, json.loads(newest.read_text())["layout"])


@contextmanager
def world(
    folder: Path, recipe: str = "diloco", grace_seconds: float = 2.0, dead_seconds: float = 3.0
) -> Iterator[World]:
    """A world with a lighthouse of its own, both gone when the context ends."""
    with lighthouse("127.0.0.1:0", grace_seconds=grace_seconds, dead_seconds=dead_seconds) as port:
        each = World(folder, f"127.0.0.1:{port}", recipe)
        try:
            yield each
        finally:
            each.end()


def _live(
    leash: Any, log: Path, folder: Path, rank: int, resume: bool, deaths: Deaths, host: str | None = None
) -> None:
    from dying_worker import work

    if host is not None:
        enter(host)
        os.environ[SECRET] = HOSTS_SECRET
    os.dup2(leash.fileno(), 0)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    work(folder, rank, resume, deaths)
