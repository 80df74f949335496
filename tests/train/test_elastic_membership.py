"""Workers leave a running job, come back and join it: real processes, the real lighthouse."""

import os
import signal

import pytest
from elastic_world import world

from isthmus.signals import STOPPED

pytestmark = pytest.mark.processes

GRACE_SECONDS = 40.0  # how long the others would wait for a worker that is late


def test_told_to_leave_a_worker_leaves_and_comes_back(tmp_path):
    with world(tmp_path, grace_seconds=GRACE_SECONDS) as run:
        run.start_program(1)
        run.start(0)
        run.start(2)
        run.wait_for(lambda: run.syncs(1, peers=3) > 2)
        run.processes[1].send_signal(signal.SIGTERM)
        run.wait_for(lambda: run.exit_code(1) is not None)
        assert run.exit_code(1) == STOPPED, run.log(1)
        last_words = run.log(1).splitlines()[-1]
        assert last_words.startswith("left after step ")
        assert last_words.endswith(
            f"; come back with: ISTHMUS_WORKER=1 isthmus train {run.run_dir}/config.yaml --resume"
        )
        assert (run.run_dir / "config.yaml").exists()
        run.wait_for(lambda: run.syncs(0, peers=2) > 2)
        run.start(1, resume=True)
        before = run.syncs(1, peers=3)
        run.wait_for(lambda: run.syncs(1, peers=3) > before + 1)
        run.wait_for_end()
        assert max(sync["seconds"] for sync in run.seen(0, "committed")) < GRACE_SECONDS / 2, "they waited for it"
        run.check([0, 1, 2])


def test_a_new_worker_joins_a_running_job(tmp_path):
    with world(tmp_path) as run:
        for rank in range(3):
            run.start(rank)
        run.wait_for(lambda: run.syncs(0, peers=3) > 2)
        run.start(3)
        run.wait_for(lambda: run.syncs(3, peers=4) > 1)
        run.wait_for_end()
        run.check([0, 1, 2, 3])
        assert run.final_state(3)["contributed"]["worker-3"] > 0


def test_all_leave_and_come_back_and_no_sample_is_read_again(tmp_path):
    with world(tmp_path) as run:
        for rank in range(3):
            run.start(rank)
        run.wait_for(lambda: run.syncs(0, peers=3) > 3)
        for rank in range(3):
            os.kill(run.processes[rank].pid, signal.SIGTERM)
        run.wait_for(lambda: all(run.exit_code(rank) == STOPPED for rank in range(3)))
        events = len((run.run_dir / "metrics/worker-1.jsonl").read_text().splitlines())
        for rank in range(3):
            run.start(rank, resume=True)
        run.wait_for_end()
        run.check([0, 1, 2])
        for rank in range(3):
            read = [sample for event in run.seen(rank, "read") for sample in event["read"]]
            assert len(read) == len(set(read)) > 0
        assert len((run.run_dir / "metrics/worker-1.jsonl").read_text().splitlines()) > events
