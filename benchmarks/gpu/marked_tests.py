"""The tests marked `gpu`: whatever computes on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import subject
from benchmarks.gpu.figures import Figure

ROOT = Path(__file__).parents[2]
_PROCESSES = 8


def measure(folder: Path) -> Iterator[Figure]:
    """Yield how many tests failed, with their names."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob(subject.TEST_FILES)) if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-rfE", "-o", "addopts=", "-p", "no:cacheprovider"]
    if subject.ON_GPU and importlib.util.find_spec("xdist"):
        command += ["-n", str(_PROCESSES)]
    done = subprocess.run([*command, *files], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    said = done.stdout.decode(errors="replace")
    print(said)
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", said)}
    if not counts:
        raise RuntimeError(f"pytest ended with exit code {done.returncode}")
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    what = f"tests marked gpu that failed, of {sum(counts.values())} ({counts.get('skipped', 0)} skipped)"
    yield Figure(what, len(failed), "", 0, details=[said[-20_000:]] if failed else counts)
