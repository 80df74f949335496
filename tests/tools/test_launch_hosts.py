"""`isthmus launch --hosts`: workers on other machines, by real ssh servers."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml
from tests.launched import ROOT, RUN, all_gone, events, finish, wait_until, workers_of
from tests.program import Program
from tests.sshd import ssh_hosts  # noqa: F401 - a fixture

from isthmus.core import UserError
from isthmus.tools.host import SshAddress
from isthmus.tools.hosts import Hosts
from isthmus.tools.mirror import Mirror, write_part

SECRET = "known to this test and its workers"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", ("a", None)),
        ("me@a.example:2222", ("me@a.example", 2222)),
        ("me@[fe80::1]:22", ("me@fe80::1", 22)),
        ("fe80::1", ("fe80::1", None)),
    ],
)
def test_hosts_are_written_as_for_ssh(text, expected):
    address = SshAddress.parse(text)
    assert (address.destination, address.port) == expected


@pytest.mark.parametrize("text", ["", "-oProxyCommand=x", "a b", "a:b", "me@", "a;b"])
def test_what_is_no_host_is_refused(text):
    with pytest.raises(UserError, match="is no host: write host, user@host or user@host:port"):
        SshAddress.parse(text)


def test_workers_are_shared_out_in_order():
    assert Hosts("a,b,c", "python")._shares(5) == [range(2), range(2, 4), range(4, 5)]
    with pytest.raises(UserError, match="2 hosts for 1 worker: name fewer hosts, or set --workers"):
        Hosts("a,b", "python")._shares(1)


def test_copies_follow_files_that_grow_are_cut_or_go(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "metrics").mkdir(parents=True)
    mirror = Mirror(there, [1])
    for name in ("metrics/worker-1.jsonl", "metrics/worker-1-rank-2.jsonl", "worker-1.json"):
        for text in ("one\n", "one\ntwo\n", "one\nother, and longer\n", "on"):
            (there / name).write_text(text)
            (there / "metrics/worker-0.jsonl").write_text("of another host")
            for part in mirror.new_parts():
                write_part(here, [1], part)
            assert (here / name).read_text() == text
    assert list(mirror.new_parts()) == []
    assert not (here / "metrics/worker-0.jsonl").exists()
    (there / "worker-1.json").unlink()
    for part in mirror.new_parts():
        write_part(here, [1], part)
    assert not (here / "worker-1.json").exists()


@pytest.mark.parametrize("name", ["../run.yaml", "/etc/passwd", "worker-0.json", "logs/../../worker-1.json"])
def test_a_host_writes_nothing_but_its_workers_files(tmp_path, name):
    with pytest.raises(ValueError, match="is no file of its workers"):
        write_part(tmp_path, [1], {"file": name, "at": 0, "data": ""})


class Launches:
    """Starts `isthmus launch` on hosts."""

    def __init__(self, hosts, folder):
        self._hosts, self.run_dir = hosts, folder / "run"
        self._config = folder / "run.yaml"
        self._config.write_text(yaml.safe_dump(RUN | {"train": RUN["train"] | {"run_dir": str(self.run_dir)}}))
        path = f"{hosts.bin}:{os.environ['PATH']}"
        self._environment = {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "ISTHMUS_RUN_SECRET": SECRET}
        self.started = []

    def start(self, *arguments, hosts=None, python=None, cwd=ROOT):
        there = ["--hosts", ",".join(hosts or self._hosts.names), "--python", python or self._hosts.python]
        program = Program("launch", self._config, *there, *arguments, cwd=cwd, **self._environment)
        self.started.append(program)
        return program

    def refused(self, *arguments, **more):
        code, _, err = finish(self.start("--workers", 1, *arguments, **more))
        assert code == 2, err
        return err

    def has_trained(self):
        return events(self.run_dir, "step", 0) and events(self.run_dir, "step", 1)


@pytest.fixture
def launches(ssh_hosts, tmp_path):  # noqa: F811
    launches = Launches(ssh_hosts, tmp_path)
    yield launches
    for program in launches.started:
        program.kill()
        program.communicate()


@pytest.mark.processes
def test_workers_on_two_hosts_stop_go_on_and_finish(launches, ssh_hosts):  # noqa: F811
    first = launches.start("--set", "train.steps=1000000")
    wait_until(launches.has_trained)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert SECRET not in path.read_text()
        except OSError:
            continue
    workers = {name: pid for agent in ssh_hosts.agents for name, pid in workers_of(agent).items()}
    assert sorted(workers) == ["worker-0", "worker-1"]
    first.send_signal(signal.SIGTERM)
    code, out, err = finish(first)
    assert (code, err) == (75, "")
    assert f"--resume --hosts {','.join(ssh_hosts.names)} --python " in out
    assert all_gone(workers.values())
    stopped = json.loads((launches.run_dir / "summary.json").read_text())
    assert not stopped["finished"]

    steps = stopped["steps"] + 20
    code, out, err = finish(launches.start("--resume", "auto", "--set", f"train.steps={steps}"))
    assert (code, err) == (0, "")
    assert f"step {steps}/{steps}" in out
    summary = json.loads((launches.run_dir / "summary.json").read_text())
    assert summary["finished"]
    assert len(set(summary["anchor_hash"].values())) == 1
    trained = [event["step"] for event in events(launches.run_dir, "step", 1)]
    assert trained == sorted(set(trained))
    assert trained[-1] == steps
    if os.geteuid() == 0:  # the second host's folder is its own, and what is small of it was copied
        there = launches.run_dir.with_name("run-there")
        assert {path.name for path in there.glob("metrics/*")} == {"worker-1.jsonl"}
        for name in ("metrics/worker-1.jsonl", "logs/worker-1.log", "worker-1.json"):
            assert (there / name).read_bytes() == (launches.run_dir / name).read_bytes()


@pytest.mark.processes
@pytest.mark.waits
def test_a_host_that_was_lost_is_called_again_and_nothing_outlives_the_launcher(launches, ssh_hosts):  # noqa: F811
    launcher = launches.start("--set", "train.steps=1000000", "--set", "outer.transport.type=torchft")
    wait_until(launches.has_trained)
    before = len(events(launches.run_dir, "step", 1))
    agent = max(ssh_hosts.agents, key=lambda agent: "worker-1" in workers_of(agent))
    lost = workers_of(agent)
    agent.kill()
    wait_until(lambda: all_gone(lost.values()))
    wait_until(lambda: events(launches.run_dir, "restart", 1), within_seconds=150)
    (restart,) = events(launches.run_dir, "restart", 1)
    assert restart["reason"].startswith(f"is gone: host {ssh_hosts.names[1]}: the connection broke")
    wait_until(lambda: len(events(launches.run_dir, "step", 1)) > before + 2)
    workers = {name: pid for agent in ssh_hosts.agents for name, pid in workers_of(agent).items()}
    assert sorted(workers) == ["worker-0", "worker-1"]
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: all_gone(workers.values()), within_seconds=20)


@pytest.mark.processes
def test_a_host_that_cannot_run_workers_is_named_in_one_line(launches, ssh_hosts, tmp_path):  # noqa: F811
    (name, other) = ssh_hosts.names
    closed = f"{name.rpartition(':')[0]}:1"
    assert launches.refused(hosts=[closed]).startswith(f"error: host {closed}: ssh cannot connect (ssh: connect to ")

    python = str(ssh_hosts.script("none", f"exec {sys.executable} -I -S -c 'import isthmus'"))
    said = f"error: host {name}: {python} has no isthmus there: install it, or name another Python by --python\n"
    assert launches.refused(python=python, hosts=[name]) == said
    said = f"error: host {name}: there is no /no/python: name its Python by --python\n"
    assert launches.refused(python="/no/python", hosts=[name]) == said

    change = 'import isthmus.version as v; v.__version__ = "0.0.1"; from isthmus.tools.host_agent import main; main()'
    python = str(ssh_hosts.script("old", f"exec {sys.executable} -c '{change}'"))
    assert f"error: host {name}: it has isthmus 0.0.1, and this machine " in launches.refused(
        python=python, hosts=[name]
    )
    if os.geteuid() == 0:  # it is here, and not there
        here = tmp_path / "run" / "here"
        here.mkdir()
        said = f"error: host {other}: there is no folder {here}: make it, or launch in one that all hosts have\n"
        assert launches.refused(hosts=[other], cwd=here) == said
