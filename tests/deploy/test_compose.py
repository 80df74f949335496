"""The compose file: its specification allows every line, and what its services are told trains, as processes."""

import json
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, files

import jsonschema
import pytest
import yaml
from tests.deploy.helm import ROOT
from tests.launched import finish
from tests.program import Program

from isthmus.transport.address import free_port

FILE = ROOT / "deploy/compose.yaml"
SERVICES = yaml.safe_load(FILE.read_text())["services"]


def specification():
    """Return the schema of the compose specification, from the package that has it."""
    try:
        (path,) = [file for file in files("check-jsonschema") or [] if file.name == "compose-spec.json"]
    except PackageNotFoundError:
        pytest.skip("check-jsonschema is not installed")
    return json.loads(path.read_text())


def test_the_specification_allows_every_line():
    jsonschema.validate(yaml.safe_load(FILE.read_text()), specification())


def test_the_specification_allows_nothing_else():
    with pytest.raises(jsonschema.ValidationError, match="restrat"):
        jsonschema.validate({"services": {"worker": SERVICES["worker-0"] | {"restrat": "always"}}}, specification())


@pytest.mark.processes
def test_its_services_train(tmp_path):
    here = {"lighthouse:29510": f"127.0.0.1:{free_port()}", "/etc/isthmus/run.yaml": str(ROOT / "examples/tiny.yaml")}
    here |= {"0.0.0.0:29510": here["lighthouse:29510"], "/data": str(tmp_path)}

    def start(service):
        command, given = (json.dumps(service.get(key, {})) for key in ("command", "environment"))
        for there, path in here.items():
            command = command.replace(there, path)
        program = Program(*json.loads(command), **json.loads(given) | {"ISTHMUS_RUN_SECRET": "as long as it has to be"})
        stack.callback(program.kill)
        return program

    with ExitStack() as stack:
        programs = {name: start(service) for name, service in SERVICES.items()}
        workers = [program for name, program in programs.items() if name.startswith("worker")]
        assert [finish(worker)[0] for worker in workers] == [0, 0]
    ends = [json.loads((tmp_path / f"run/worker-{number}.json").read_text()) for number in (0, 1)]
    assert ends[0]["anchor_hash"] == ends[1]["anchor_hash"]
