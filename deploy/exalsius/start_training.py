"""Train what a workspace of exalsius describes: in the image at /app/diloco_training/training/start_training.py.

exalsius' chart starts it on every GPU of every Pod by `torchrun --rdzv_backend=etcd-v2`: each is a worker of one run.
"""

from isthmus.signals import heed_signals

if __name__ == "__main__":
    heed_signals()  # before what takes seconds to import

import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import yaml

from isthmus import log
from isthmus.cli import main as isthmus
from isthmus.core import UserError
from isthmus.tools.exalsius import Workspace, read_workspace

_LOGGER = logging.getLogger("isthmus")


def main() -> None:
    """Train, go on from a checkpoint where there is one, and upload the model where that is asked for."""
    log.set_up()
    try:
        workspace = read_workspace(os.environ)
        _prepare(workspace)
    except UserError as error:
        _LOGGER.error("%s", error)
        sys.exit(2)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(workspace.run, file)
        file.flush()
        code = _run("train", file.name, "--resume", "auto")
    if code == 0 and _is_first():
        _upload(workspace)
    sys.exit(code)


def _prepare(workspace: Workspace) -> None:
    """Set the environment for the libraries, which are not imported yet; say what is left out."""
    os.environ.update(workspace.environment)
    if workspace.device == "cpu":
        os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    import torch

    if workspace.device == "cuda" and not torch.cuda.is_available():
        raise UserError("DILOCO_DEVICE is not cpu, but torch finds no GPU here: give the Pod one, or set it to cpu")
    if _is_first():
        for name, instead in workspace.left_out.items():
            _LOGGER.info("%s is left out: %s", name, instead)


def _upload(workspace: Workspace) -> None:
    """Upload the model. Where that fails the run has still succeeded: a restart would find an empty disk."""
    if workspace.upload_to is None:
        return
    run_dir = Path(workspace.run["train"]["run_dir"])
    folder = run_dir / "export"
    shutil.rmtree(folder, ignore_errors=True)  # of a former attempt
    if _run("export", str(run_dir), "--to", str(folder), "--push", workspace.upload_to) != 0:
        _LOGGER.error("the model is not on the Hub: copy %s while this Pod is there", run_dir)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _run(*arguments: str) -> int:
    """Run a command of isthmus, and return its exit code."""
    sys.argv = ["isthmus", *arguments]
    try:
        isthmus()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    main()
