"""The benchmark of faults says what must not differ, and tells it apart from what was lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.chaos.diaries import BrokenPromise, Diaries


def commit(
    version: int, time: float, pid: int, chain: str = "a", anchor: str = "x", samples: int = 0
) -> dict[str, Any]:
    return {
        **{"version": version, "time": time, "pid": pid, "chain": f"{chain}{version}", "anchor": f"{anchor}{version}"},
        **{"samples": samples or 100 * version, "frontier": 100 * version, "contributed": version},
    }


def check(folder: Path, *workers: list[dict[str, Any]]) -> dict[str, int]:
    for number, commits in enumerate(workers):
        diary = folder / f"worker-{number}" / "diary"
        diary.mkdir(parents=True)
        (diary / "steps.bin").write_bytes(b"")
        (diary / "commits.jsonl").write_text("".join(json.dumps(each) + "\n" for each in commits))
        (diary.parent / "metrics").mkdir()
        (diary.parent / "metrics" / f"worker-{number}.jsonl").write_text("")
    return Diaries(folder, len(workers)).check()


def test_equal_states(tmp_path):
    workers = [[commit(1, 1.0, pid), commit(2, 2.0, pid)] for pid in (10, 11)]
    assert check(tmp_path, *workers) == {"versions": 2, "compared": 2, "lost": 0, "samples": 200}


def test_anchors_that_differ(tmp_path):
    with pytest.raises(BrokenPromise, match="version 1 is not one"):
        check(tmp_path, [commit(1, 1.0, 10)], [commit(1, 1.0, 11, anchor="y")])


def test_two_histories_of_processes_that_live_on(tmp_path):
    with pytest.raises(BrokenPromise, match="version 2 is not one"):
        check(
            tmp_path,
            [commit(1, 1.0, 10), commit(2, 2.0, 10), commit(3, 9.0, 10, "b")],
            [commit(1, 1.0, 11), commit(2, 8.0, 11, "b"), commit(3, 9.0, 11, "b")],
        )


def test_what_all_who_had_it_lost_as_they_were_killed(tmp_path):
    workers = [
        [commit(1, 1.0, pid), commit(2, 2.0, pid), commit(2, 8.0, pid + 5, "b", samples=150)] for pid in (10, 11)
    ]
    assert check(tmp_path, *workers) == {"versions": 2, "compared": 3, "lost": 1, "samples": 150}


def test_a_ledger_that_goes_back(tmp_path):
    with pytest.raises(BrokenPromise, match="became fewer"):
        check(tmp_path, [commit(1, 1.0, 10, samples=300), commit(2, 2.0, 10)])
