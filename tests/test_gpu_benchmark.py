"""The benchmark for a GPU runs here, too, and keeps what it has found whatever happens to a part of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import subject
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.processes import Part, run_part

ROOT = Path(__file__).parents[1]
PARTS = {"tests", "codecs", "finish", "offloaded", "start", "utilisation", "learning"}
WITHOUT = """
import importlib, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split()))  # None: such an import fails
for name in sys.argv[2:]:
    importlib.import_module(name)
if "isthmus.tools.profile" in sys.argv:
    from isthmus.core import UserError
    from isthmus.link import Identity
    from isthmus.recipes import load_config
    load_config()
    try:
        Identity.generate()
    except UserError as error:
        assert "pip install cryptography" in str(error)
    else:
        sys.exit("it was installed")
"""


def finds_one(folder: Path, then: str) -> Iterator[Figure]:
    yield Figure("found", 1.0)
    print("as it was", folder.is_dir())
    if then == "crashes":
        os.abort()
    if then == "raises":
        raise ValueError("that is all")
    while then == "hangs":
        time.sleep(0.1)
    yield Figure("and more", 2.0)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("then", "seconds", "trouble"),
    [
        ("ends", 60, ""),
        ("crashes", 60, "it failed with exit code -6"),
        ("raises", 60, "it failed with exit code 1"),
        ("hangs", 5, "it was ended after 5 s"),
    ],
)
def test_what_a_part_has_found_is_there_whatever_becomes_of_it(then, seconds, trouble):
    told = []
    outcome = run_part(Part("part", f"{__name__}:finds_one", 60, arguments=(then,)), seconds, told.append)
    assert outcome.figures == told
    assert [figure.value for figure in told] == ([1.0, 2.0] if then == "ends" else [1.0])
    assert outcome.trouble == trouble
    if then == "raises":
        assert outcome.log[0] == "as it was True"
        assert outcome.log[-1] == "ValueError: that is all"


def test_goals_are_met_or_missed_on_a_gpu_only():
    most, least, free = Figure("a", 8.0, " ms", at_most=8), Figure("b", 79.0, " %", at_least=80), Figure("c", 1.0)
    assert most.row("part", True) == ["part", "a", "8 ms", "<= 8 ms", "met"]
    assert least.row("part", True) == ["part", "b", "79 %", ">= 80 %", "missed"]
    assert [figure.verdict(False) for figure in (most, least, free)] == ["waits for a GPU", "waits for a GPU", ""]
    assert free.verdict(True) == ""


def test_what_is_not_installed_is_named():
    assert Part("part", "", 1, ("json", "no_such_package", "no_other")).missing == ["no_such_package", "no_other"]
    assert Part("part", "", 1, ("json",)).missing == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("missing", "modules"),
    [
        ("cryptography pydantic", ["benchmarks.gpu.codecs"]),
        ("cryptography", ["benchmarks.gpu.sync_steps", "benchmarks.gpu.utilisation", "isthmus.tools.profile"]),
    ],
)
def test_parts_of_one_process_need_less(missing, modules):
    others = "pytest torchft hivemind datasets soundfile"
    done = subprocess.run([sys.executable, "-c", WITHOUT, f"{missing} {others}", *modules], cwd=ROOT, check=False)
    assert done.returncode == 0


@pytest.mark.processes
@pytest.mark.waits
def test_the_whole_benchmark_runs_on_a_cpu(tmp_path):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "every goal waits for a GPU" in done.stdout
    data, table = sorted(tmp_path.glob("*-gpu.*"))
    parts = json.loads(data.read_text())["results"]
    assert parts.keys() == PARTS
    assert [(name, part["trouble"], part["log"]) for name, part in parts.items() if part["trouble"]] == []
    figures = [figure for part in parts.values() for figure in part["figures"]]
    asked = [figure for figure in figures if figure["at_most"] is not None or figure["at_least"] is not None]
    assert done.stdout.endswith(f"{len(asked)} goals wait for a GPU\n")
    values = {figure["what"].partition(" (")[0]: figure["value"] for figure in figures}
    assert values["lines on the screen or in logs that isthmus did not mean"] == 0
    assert {f"{recipe}: against ddp" for recipe in subject.LEARNING_RECIPES[1:]} <= values.keys()
    assert "NOT on a GPU" in table.read_text()
    assert table.read_text().count("waits for a GPU") == len(asked)
