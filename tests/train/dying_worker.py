"""A worker of an elastic run that kills itself at chosen points, and writes down what it saw.

It runs the real command line in a process of its own; see `elastic_world.World`, which starts it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isthmus.compress.base import Codec
from isthmus.data.leased_batches import LeasedBatches
from isthmus.data.ledger import Intervals, WorkerLeases, cut
from isthmus.link import Group
from isthmus.outer import OuterLoop
from isthmus.outer.sync import Exchange
from isthmus.train import checkpoint_files
from isthmus.train.lifecycle import ReplicatedLedger
from isthmus.train.method import Method
from isthmus.train.trainer import Trainer
from isthmus.transport import PeerLost, link_peers
from isthmus.transport.elastic.transport import ElasticTransport
from isthmus.transport.heal.download import Download
from isthmus.transport.peers import BufferPeers

Hit = Callable[[], None]  # to be called whenever the point is reached
Wrap = Callable[[Any, str, Hit], None]  # has it called at a method of an owner

STEP_SECONDS = (0.04, 0.3)  # of one inner step in the run's first and second half, until the test lets it end


def before(owner: Any, name: str, hit: Hit) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        hit()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, hit: Hit) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if result is not False:  # a vote that was lost is no commit
            hit()
        return result

    setattr(owner, name, wrapped)


def amid(kind: str, begun: bool = False) -> Wrap:
    """In a collective of this kind, made within the call: the others wait for this worker's part and do not get it.

    begun: it is on its way, so that none, some or all of them get it.
    """

    def wrap(owner: Any, name: str, hit: Hit) -> None:
        start, inside = link_peers.start, list[bool]()

        def watched(group: Group, what: str, *arguments: Any) -> int:
            here = inside and what.startswith(f"{kind} of ")
            if here and not begun:
                hit()
            number = start(group, what, *arguments)
            if here and begun:
                hit()
            return number

        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            inside.append(True)
            try:
                return original(*args, **kwargs)
            finally:
                inside.pop()

        link_peers.start = watched
        setattr(owner, name, wrapped)

    return wrap


POINTS: dict[str, tuple[Wrap, Any, str]] = {
    "before send": (before, Exchange, "run"),
    "mid-mean": (amid("all_reduce"), BufferPeers, "all_reduce_mean"),
    "mid-gather": (amid("all_gather"), Codec, "average"),  # the only shot, or the second of two
    "mid-exchange": (amid("all_to_all"), Codec, "average"),  # the first of two shots
    "before commit": (before, ElasticTransport, "commit"),
    "mid-commit": (amid("all_gather", begun=True), ElasticTransport, "commit"),
    "after commit": (after, ElasticTransport, "commit"),
    "while healing": (before, Download, "put"),
    "healed": (after, OuterLoop, "_catch_up"),
    "while checkpointing": (after, checkpoint_files, "save_file"),
    "checkpoint written": (before, Path, "rename"),
}


def die(point: str, number: int, marker: Path) -> None:
    """Have this process kill itself when the point is reached for the `number`-th time."""
    arrivals = 0

    def hit() -> None:
        nonlocal arrivals
        arrivals += 1
        if arrivals == number:
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    wrap, owner, name = POINTS[point]
    wrap(owner, name, hit)


class Witness:
    """Writes what happens at once, so that nothing is lost when the process is killed."""

    def __init__(self, path: Path, go: Path) -> None:
        self._file, self._go = path.open("ab", buffering=0), go
        self._last: list[Any] = []

    def write(self, **event: Any) -> None:
        self._file.write(json.dumps(event).encode() + b"\n")

    def look_at(self, method: Method) -> None:
        """Note the anchors' hash where they have moved."""
        state = method.state_dict()["elastic"]
        commit = [state["version"], state["chain"]]
        if commit != self._last:
            self.write(anchors=[*commit, method.anchor_hash()])
            self._last = commit

    def watch(self) -> None:
        """From here on."""
        read, commit = LeasedBatches.__next__, ReplicatedLedger.commit
        step, note = Trainer._train_step, Trainer._note
        finish = link_peers.finish

        def read_and_tell(stream: LeasedBatches) -> Any:
            leases, first = stream._leases.leases, stream.uncommitted
            batch = read(stream)
            self.write(read=positions(leases, first, first + stream.batch_size))
            return batch

        def commit_and_tell(replicated: ReplicatedLedger, proposals: Any, contributors: Any) -> None:
            ledger = replicated.ledger
            held = {worker: ledger.workers.get(worker, WorkerLeases()).leases for worker in contributors}
            commits = {w: positions(held[w], 0, replicated.gain(w, proposals[w])) for w in contributors}
            self.write(commit=ledger.commits + 1, samples=commits)
            commit(replicated, proposals, contributors)

        def step_and_tell(trainer: Trainer) -> None:
            if not self._go.exists():
                time.sleep(STEP_SECONDS[2 * trainer.steps_done > trainer.config.train.steps])
            step(trainer)
            self.look_at(trainer.method)

        def note_and_tell(trainer: Trainer, reports: Any) -> None:
            note(trainer, reports)
            self.look_at(trainer.method)
            for report in reports:
                self.write(committed=report.committed, peers=report.num_peers, seconds=report.seconds)

        def finish_and_tell(group: Group, what: str, *arguments: Any) -> None:
            try:
                finish(group, what, *arguments)
            except PeerLost:
                self.write(broken=what)
                raise

        LeasedBatches.__next__, ReplicatedLedger.commit = read_and_tell, commit_and_tell
        Trainer._train_step, Trainer._note = step_and_tell, note_and_tell
        link_peers.finish = finish_and_tell


def positions(leases: Intervals, first: int, last: int) -> list[int]:
    """The samples from the first-th to before the last-th of these leases."""
    return [position for start, end in cut(leases, first, last) for position in range(start, end)]


def work(folder: Path, rank: int, resume: bool, deaths: list[tuple[str, int]]) -> None:
    """Run `isthmus train` as worker `rank`, to die of the first of its deaths that it has not died yet."""
    import torch

    from isthmus.cli import main

    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    markers = [folder / f"died-{rank}-{number}" for number in range(len(deaths))]
    Witness(folder / f"witness-{rank}.jsonl", folder / "go").watch()
    for (point, number), marker in zip(deaths, markers, strict=True):
        if not marker.exists():
            die(point, number, marker)
            break
    sys.argv = ["isthmus", "train", str(folder / "run.yaml"), "--follow-stdin", *(["--resume"] if resume else [])]
    main()


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), resume=False, deaths=[])
