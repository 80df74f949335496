"""The batch files in a real Slurm of two nodes: runs train, stop before a limit, are requeued, and finish."""

import json
import os
from pathlib import Path

import pytest
import yaml
from tests.deploy.slurm import NODES, slurm
from tests.launched import RUN, events, wait_until

from isthmus.transport.address import free_port

pytestmark = [pytest.mark.processes, pytest.mark.waits]

SECONDS_PER_STEP = 0.2  # until the file `go` is there
SIGNAL = "--signal=TERM@10"  # with a limit of a minute it comes when Slurm first looks, half a minute after its start


class Run:
    """A run of two workers that trains slowly until it is let go."""

    def __init__(self, folder: Path, steps: int, recipe: str = "diloco", **transport: object) -> None:
        self.folder, self.path = folder / "run", folder / "run.yaml"
        pace = {"hidden_size": 4, "go": str(folder / "go"), "seconds": SECONDS_PER_STEP}
        model = RUN["model"] | {"path": "tests.train.tiny:Paced", "arguments": pace}
        outer = RUN["outer"] | {"transport": transport}
        train = RUN["train"] | {"steps": steps, "run_dir": str(self.folder)}
        self._go = folder / "go"
        self.path.write_text(yaml.safe_dump(RUN | {"model": model, "outer": outer, "train": train}))

    def let_go(self):
        self._go.touch()

    def ended(self):
        """Return what both workers left at their ends."""
        return [json.loads((self.folder / f"worker-{worker}.json").read_text()) for worker in (0, 1)]

    def syncs(self, worker, peers):
        """Return the steps of the commits that a worker made with so many peers."""
        found = events(self.folder, "sync", worker)
        return [sync["step"] for sync in found if sync["committed"] and sync["num_peers"] == peers]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def limited(cluster, tmp_path_factory):
    """A static run, the number of its job, and that job's log: while it waits for its limit others run."""
    run = Run(tmp_path_factory.mktemp("static"), steps=400, type="torch_dist")
    job = cluster.submit("static.sbatch", run.path, options=("--time=1", SIGNAL))
    wait_until(lambda: events(run.folder, "step"))
    return run, job, cluster.folder / f"isthmus-{job}.log"


def test_a_task_of_an_array_is_requeued_while_the_other_goes_on_and_catches_up(cluster, limited, tmp_path):
    port = free_port()
    lighthouse = cluster.submit("lighthouse.sbatch", "--bind", f"0.0.0.0:{port}", "--grace-seconds", 1)
    run = Run(tmp_path, steps=400, type="torchft", lighthouse=f"{NODES[0]}:{port}", min_workers=1)
    array = cluster.submit("elastic.sbatch", run.path)
    wait_until(lambda: len(run.syncs(0, peers=2)) > 1)
    numbers = [cluster.show(f"{array}_{worker}")["JobId"] for worker in (0, 1)]
    leaver = numbers.index(array)  # this job's number is the whole array's, too
    stayer = 1 - leaver
    cluster.run("scancel", "--signal=TERM", f"{array}_{leaver}")  # as Slurm does before the limit
    log = cluster.folder / f"isthmus-{array}-{leaver}.log"
    wait_until(lambda: "left after step" in log.read_text())
    left, alone = len(run.syncs(leaver, peers=2)), len(run.syncs(stayer, peers=1))
    wait_until(lambda: len(run.syncs(stayer, peers=1)) > alone + 1)
    wait_until(lambda: len(run.syncs(leaver, peers=2)) > left + 1)
    run.let_go()
    ends = [cluster.wait_for(f"{array}_{worker}", "COMPLETED", "FAILED") for worker in (leaver, stayer)]
    assert [(end["JobState"], end["Restarts"]) for end in ends] == [("COMPLETED", "1"), ("COMPLETED", "0")]
    finished_alike(run)
    cluster.run("scancel", lighthouse)


def test_a_static_run_over_two_nodes_stops_before_its_limit_is_requeued_and_finishes(cluster, limited):
    run, job, log = limited
    wait_until(lambda: "stopped after step" in log.read_text(), within_seconds=90)
    run.let_go()
    end = cluster.wait_for(job, "COMPLETED", "FAILED")
    assert end["JobState"] == "COMPLETED"
    assert end["NumNodes"] == "2"
    assert int(end["Restarts"]) > 0
    finished_alike(run)
    steps = [step["step"] for step in events(run.folder, "step", worker=1)]
    assert steps == sorted(set(steps))  # none was made twice


def test_the_parts_of_a_heterogeneous_job_are_one_world(cluster, tmp_path):
    """What its tasks are told is what a static run goes by."""
    program = tmp_path / "isthmus"
    program.write_text("#!/bin/sh\necho $SLURM_PROCID of $SLURM_STEP_NUM_TASKS at $MASTER_ADDR: $*\n")
    program.chmod(0o755)
    job = cluster.submit(
        "heterogeneous.sbatch", "run.yaml", options=(f"--export=ALL,PATH={tmp_path}:{os.environ['PATH']}",)
    )
    assert cluster.wait_for(f"{job}+0", "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    said = sorted((cluster.folder / f"isthmus-{job}.log").read_text().splitlines())
    assert said == [f"{rank} of 2 at {NODES[0]}: train run.yaml --resume auto" for rank in (0, 1)]


def test_a_wrong_configuration_fails_its_job_at_once_and_is_named_in_its_log(cluster, tmp_path):
    run = Run(tmp_path, steps=5, type="torch_dist")
    job = cluster.submit("static.sbatch", run.path, "--set", "train.stepps=9", options=("--nodes=1",))
    end = cluster.wait_for(job, "COMPLETED", "FAILED")
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("FAILED", "2:0", "0")
    said, ended = (cluster.folder / f"isthmus-{job}.log").read_text().splitlines()
    assert "train.stepps" in said
    assert ended.endswith("task 0: Exited with exit code 2")


def finished_alike(run):
    one, other = run.ended()
    assert one["finished"]
    assert other["finished"]
    assert one["anchor_hash"] == other["anchor_hash"]
