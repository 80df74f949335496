"""Workers as schedulers start them: one command at every site, numbers from outside, started again by exit code."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from elastic_world import CONFIG, TRANSPORT
from tests.launched import events, finish, wait_until
from tests.program import Program

from isthmus.transport.torchft.lighthouse import lighthouse

pytestmark = pytest.mark.processes

SITES = ({"JOB_COMPLETION_INDEX": "0"}, {"SLURM_ARRAY_TASK_ID": "0", "ISTHMUS_WORKER_OFFSET": "1"})


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """A run of two workers with a lighthouse, which trains until the file `go` is there, and then to its end."""
    model = CONFIG["model"] | {
        "path": "tests.train.tiny:Paced",
        "arguments": {"hidden_size": 4, "go": str(tmp_path / "go"), "seconds": 0.2},
    }
    train = CONFIG["train"] | {"workers": 2, "steps": 300, "checkpoint_every": 10, "log_every": 1}
    path = tmp_path / "run.yaml"
    with lighthouse("127.0.0.1:0", grace_seconds=2.0, dead_seconds=3.0) as port:
        transport = TRANSPORT | {"lighthouse": f"127.0.0.1:{port}", "min_workers": 1}
        outer = CONFIG["outer"] | {"recipe": "diloco", "transport": transport}
        path.write_text(yaml.safe_dump(CONFIG | {"model": model, "outer": outer, "train": train}))
        yield path


def test_a_worker_that_is_stopped_is_started_again_by_the_same_command_until_it_is_finished(config, tmp_path):
    def start(site: int) -> Program:
        run_dir = f"train.run_dir={tmp_path}/site-{site}"
        return Program("train", config, "--resume", "auto", "--set", run_dir, **SITES[site])

    def syncs(site: int, peers: int) -> int:
        found = events(tmp_path / f"site-{site}", "sync", worker=site)
        return sum(sync["committed"] and sync["num_peers"] == peers for sync in found)

    workers = [start(0), start(1)]
    try:
        wait_until(lambda: syncs(1, peers=2) > 2)
        workers[1].send_signal(signal.SIGTERM)
        code, _, err = finish(workers[1])
        assert code == 75
        assert f"come back with: ISTHMUS_WORKER=1 isthmus train {tmp_path}/site-1/config.yaml --resume" in err
        before = syncs(1, peers=2)
        workers[1] = start(1)
        wait_until(lambda: syncs(1, peers=2) > before + 1)
        (tmp_path / "go").touch()
        assert [finish(worker)[0] for worker in workers] == [0, 0]
        workers[0] = start(0)  # evicted after its end, say: nobody is left whom it could join
        code, _, err = finish(workers[0])
        assert (code, err) == (0, f"{tmp_path}/site-0 is finished after 300 steps: raise train.steps to train on\n")
    finally:
        for worker in workers:
            worker.kill()
