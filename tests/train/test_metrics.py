"""Metrics are lines of JSON; a file that was cut looks as if nothing had happened."""

import json
import math
from dataclasses import asdict

import pytest

from isthmus.core import SyncReport
from isthmus.train.metrics import MetricsFile, Totals
from isthmus.train.run_folder import join_parts


def report(**changes):
    values = {"committed": True, "sent_bytes": 10, "received_bytes": 20, "seconds": 2.0, "hidden_seconds": 1.5}
    values |= {"outer_step": 3, "fragment": "all", "num_peers": 2, "norm": 0.5, "cosine": 0.25} | changes
    return SyncReport(**values)


def test_one_object_a_line(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics/worker-0.jsonl")
    metrics.write("eval", step=3, loss=1.5, of="anchor")
    metrics.write("sync", step=4, **asdict(report(norm=math.nan)))
    metrics.close()
    first, second = [json.loads(line) for line in (tmp_path / "metrics/worker-0.jsonl").read_text().splitlines()]
    assert first == {"event": "eval", "step": 3, "loss": 1.5, "of": "anchor"}
    assert second["event"] == "sync"
    assert second["step"] == 4
    assert second["norm"] is None  # JSON has no NaN


def test_a_line_is_in_the_file_at_once(tmp_path):
    metrics = MetricsFile(tmp_path / "a.jsonl")
    metrics.write("step", step=1)
    assert (tmp_path / "a.jsonl").read_text() == '{"event": "step", "step": 1}\n'
    metrics.close()


def test_reopened_at_a_position_it_goes_on_from_there(tmp_path):
    path = tmp_path / "a.jsonl"
    metrics = MetricsFile(path)
    metrics.write("step", step=1)
    position = metrics.size_bytes
    metrics.write("step", step=2)
    metrics.close()
    again = MetricsFile(path, position)
    again.write("step", step=3)
    again.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


def test_totals_add_up():
    totals = Totals()
    totals.count_step(tokens=8, seconds=3.0, skipped=False)
    totals.count_step(tokens=8, seconds=1.0, skipped=True)
    totals.add(report())
    totals.add(report(committed=False))
    assert (totals.steps, totals.tokens, totals.skipped_steps) == (2, 16, 1)
    assert (totals.num_syncs, totals.refused_syncs) == (2, 1)
    assert (totals.sent_bytes, totals.received_bytes) == (20, 40)
    assert totals.compute_seconds == pytest.approx(4.0 - (4.0 - 3.0))


def test_parts_become_one_summary():
    def part(worker):
        shared = {"recipe": "diloco", "workers": 2, "steps": 9, "finished": True, "tokens_per_worker": 72}
        shared |= {"num_parameters": 5, "num_syncs": 3, "config_hash": "c", "anchor_hash": f"hash {worker}"}
        evaluated = {"eval_loss": None if worker else 1.0, "evaluation": None if worker else {"loss": 1.0}}
        each = dict.fromkeys(("sent_bytes", "received_bytes", "refused_syncs", "skipped_steps", "num_restarts"), worker)
        each["num_rollbacks"] = worker
        each |= dict.fromkeys(("train_seconds", "compute_seconds", "sync_seconds", "hidden_seconds"), 0.5)
        return {"worker": worker} | shared | evaluated | each

    joined = join_parts([part(0), part(1)])
    assert joined["eval_loss"] == 1.0
    assert joined["sent_bytes"] == [0, 1]
    assert joined["anchor_hash"] == {"worker-0": "hash 0", "worker-1": "hash 1"}
