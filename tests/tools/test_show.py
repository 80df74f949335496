"""`isthmus show` is quick: it imports neither the model's library nor torch's compiler."""

import subprocess
import sys

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
    assert "outer.compressor    isthmus.compress.cast:Cast" in shown.stdout
    assert shown.stdout.endswith("[]\n")
