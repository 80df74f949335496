"""The examples, run as a user runs them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str) -> str:
    """What an example prints that two workers run."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, *command], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", ["bare_loop.py", "hf_trainer.py"])
def test_example_trains_two_workers_to_the_same_anchor(name: str, tmp_path: Path) -> None:
    output = run(str(EXAMPLES / name), *([str(tmp_path)] if name == "hf_trainer.py" else []))
    anchors = re.findall(r"worker.\d anchor (\w{16})", output)
    assert len(anchors) == 2
    assert anchors[0] == anchors[1]
    for first, last in falling(output):
        assert last < 0.8 * first


def falling(output: str) -> list[tuple[float, float]]:
    """First and last loss of each worker, as either example prints them."""
    ends = [(float(a), float(b)) for a, b in re.findall(r"loss ([\d.]+) -> ([\d.]+)", output)]
    for worker in "01":
        losses = [float(loss) for loss in re.findall(rf"worker {worker} step \d+ loss ([\d.]+)", output)]
        ends += [(losses[0], losses[-1])] if losses else []
    assert len(ends) == 2
    return ends
