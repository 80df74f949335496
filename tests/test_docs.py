"""The documentation builds, and no link in it is broken."""

import subprocess
import sys
from pathlib import Path


def test_the_documentation_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "learning" / "index.html").exists()
