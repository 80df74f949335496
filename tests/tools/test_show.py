"""`isthmus show` is quick, and finds parts of one's own in the folder where it is started."""

import subprocess
import sys
from pathlib import Path

import pytest

SHOW = """
import sys
sys.argv = ["isthmus", "show", "examples/tiny.yaml", "--workers", "2"]
from isthmus.cli import main
try:
    main()
finally:
    slow = {"transformers", "torch._dynamo", "torch.distributed.tensor", "matplotlib", "scipy"}
    print(sorted(slow & set(sys.modules)))
"""


@pytest.mark.processes
def test_what_takes_seconds_to_import_is_not_imported():
    shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, timeout=60, check=True)
    assert "outer.compressor isthmus.compress.cast:Cast" in " ".join(shown.stdout.split())
    assert shown.stdout.endswith("[]\n")


@pytest.mark.processes
def test_a_recipe_in_this_folder_is_found(tmp_path):
    (tmp_path / "mine.py").write_text("from isthmus.recipes.diloco import diloco as own\n")
    (tmp_path / "run.yaml").write_text("outer: {recipe: 'mine:own'}\n")
    program = Path(sys.executable).with_name("isthmus")
    command = [program, "show", "run.yaml", "--allow", "mine"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "recipe: mine:own" in shown.stdout
