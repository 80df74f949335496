"""How many cores there are: by a real quota where one can be set, and by files as the kernel writes them elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.quota import _make_group
from tests.launched import ROOT

from isthmus.core.cores import quota_in_cores

V1 = """25 24 0:21 / {mount}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
26 24 0:22 / {mount}/pids rw - cgroup cgroup rw,pids
"""
V2 = "24 1 0:20 {root} {mount} rw,relatime shared:4 - cgroup2 cgroup2 rw\n"


def quota(folder: Path, groups: str, mounts: str, files: dict[str, str]) -> float:
    """The quota of a process whose control groups are these files."""
    for name, text in files.items():
        (folder / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "fs" / name).write_text(text)
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text(mounts.replace("{mount}", f"{folder}/fs"))
    return quota_in_cores(folder)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"pod/box/cpu.max": "250000 100000\n"}, 2.5),
        ({"pod/box/cpu.max": "max 100000\n", "pod/cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "50000 100000\n"}, 0.5),  # inside a container, whose group is the root of what it sees
        ({"pod/box/cpu.max": "max 100000\n"}, float("inf")),
        ({}, float("inf")),
    ],
)
def test_version_2(tmp_path, files, expected):
    assert quota(tmp_path, "0::/pod/box\n", V2.replace("{root}", "/"), files) == expected


def test_version_1_and_both(tmp_path):
    name = "cpu,cpuacct/job/cpu.cfs_{}_us"
    files = {name.format("quota"): "300000\n", name.format("period"): "100000\n", "pids/job/cpu.max": "1 100000\n"}
    groups = "9:pids:/job\n4:cpu,cpuacct:/job\n0::/\n"
    assert quota(tmp_path, groups, V1 + V2.replace("{mount}", "{mount}/unified"), files) == 3.0
    assert quota(tmp_path, groups, V1, files | {name.format("quota"): "-1\n"}) == float("inf")


def test_no_groups_at_all(tmp_path):
    assert quota_in_cores(tmp_path) == float("inf")


COUNT = """
import torch
torch.set_num_threads(2)
from isthmus.core.cores import limit_threads, num_cores
limit_threads()
print(num_cores(), torch.get_num_threads())
"""


@pytest.mark.processes
@pytest.mark.parametrize(("environment", "expected"), [({}, "1 1"), ({"OMP_NUM_THREADS": "2"}, "1 2")])
def test_threads_follow_a_real_quota(environment, expected):
    group = _make_group(1.5)
    if group is None:
        pytest.skip("no control group with a quota can be made here")
    try:
        command = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c '{COUNT}'"
        path = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}/src"} | environment
        counted = subprocess.run(
            ["sh", "-c", command], env=path, capture_output=True, text=True, timeout=120, check=True
        )
    finally:
        group.rmdir()
    assert counted.stdout.split("\n")[-2] == expected
