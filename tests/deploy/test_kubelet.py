"""Releases of the chart in a cluster of processes: they train, are probed, stop, come back, and say what is wrong."""

import json
import os
import re
import socket
import subprocess
from contextlib import suppress

import pytest
from tests.deploy.helm import ROOT, render
from tests.deploy.kubelet import Cluster

pytestmark = [pytest.mark.processes, pytest.mark.waits]

RUN = (ROOT / "examples/tiny.yaml").read_text().replace("steps: 60", "steps: 120, workers: 2")
SITES = (
    {"lighthouse": {"enabled": True, "graceSeconds": 1}, "storage": {"type": "claim"}},
    {"lighthouse": {"address": "site-lighthouse.training.svc:29510"}, "firstWorker": 1},
)


@pytest.fixture
def cluster(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("network namespaces and mounts need root")
    try:
        made = Cluster(tmp_path, num_pods=10)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"this machine has no network namespaces: {error}")
    yield made
    made.close()


def site(number, **values):
    common = {"run": RUN, "secrets": {"runSecret": "two sites know it"}}
    return render(values=common | SITES[number] | values)


def test_two_sites_train_to_the_end_whatever_becomes_of_their_pods(cluster, tmp_path):
    first = cluster.install(site(0))
    cluster.wait_until(lambda: first.worker().is_started)
    assert not first.worker().is_ready  # alone it does not take part
    second = cluster.install(site(1))
    cluster.wait_until(lambda: all(pod.is_ready for pod in cluster.pods()))
    killed = second.worker()
    killed.program.kill()
    cluster.wait_until(lambda: second.worker() is not killed and second.worker().is_ready)
    drained = first.worker()
    assert drained.stop() == 75
    cluster.wait_until(lambda: first.condition and second.condition)
    assert [first.condition, second.condition] == ["Complete", "Complete"]
    assert first.exit_codes == [(0, 75), (0, 0)]
    assert second.exit_codes == [(0, 137), (0, 0)]
    assert json.loads((tmp_path / "site/runs/tiny/worker-0.json").read_text())["finished"]
    assert first.pods["site-lighthouse"].stop() == 0
    again = cluster.install({key: each for key, each in site(0).items() if key[0] != "Deployment"})
    cluster.wait_until(lambda: again.condition)
    assert again.exit_codes == [(0, 0)]  # its claim has a run that is finished: nothing is left to do


@pytest.fixture
def full_volume(tmp_path):
    """A claim called `full`, without a free byte."""
    folder = tmp_path / "full"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
    with suppress(OSError):
        (folder / "fills").write_bytes(bytes(1 << 20))
    yield
    subprocess.run(["umount", "-l", folder], check=True)


KEY = "/etc/isthmus/keys/worker-0.key"
WRONG = {  # values of a site, and the last line of its worker's log
    "value": (
        {"run": RUN.replace("local_steps: 10", "local_steps: ten")},
        "error: outer.schedule.local_steps: should be a valid integer, .*, got 'ten'",
    ),
    "key": ({"keys": {"secret": "keys"}}, f"error: {KEY} cannot be read .*: make it with isthmus identity {KEY}"),
    "port": ({"port": 29550}, r"error: 10\.99\.0\.\d+, port 29550, cannot be listened on: Address already in use.*"),
    "metrics": (
        {"metrics": {"port": 9200}},
        "error: track.prometheus_port: cannot listen on 9200 .*: choose another one",
    ),
    "volume": (
        {"storage": {"type": "claim", "existingClaim": "full"}},
        "error: runs/tiny/config.yaml: No space left on device; make room on that disk",
    ),
    "site": (
        {"run": RUN.replace("lr: 1.0e-2", "lr: 2.0e-2")},
        "error: workers differ in inner.optimizer.lr: worker-0 has 0.01, worker-1 has 0.02",
    ),
}


def test_what_is_wrong_is_one_line_where_an_operator_looks(cluster, full_volume):
    first, releases = cluster.install(site(0)), {}
    cluster.wait_until(lambda: first.pods["site-lighthouse"].is_ready)
    for what, (values, _) in WRONG.items():
        objects = site(1, failuresPerWorker=0, **values)
        objects["Secret", "keys"] = {"stringData": {"trusted.txt": ""}}
        host = cluster.num_started + 1
        servers = [cluster.hosts.on(host, socket.create_server, ("", port)).result() for port in (29550, 9200)]
        releases[what] = cluster.install(objects)
        cluster.wait_until(lambda release=releases[what]: release.condition)
        for server in servers:
            server.close()
    for what, (_, line) in WRONG.items():
        assert re.fullmatch(line, releases[what].worker().told)
        assert releases[what].exit_codes == [(0, 1 if what == "volume" else 2)]  # room may be made, a value stays wrong
        assert releases[what].condition == "Failed"
    without = cluster.install(site(1, secrets={"existing": "forgotten"}))
    cluster.wait_until(lambda: without.events)
    assert without.events == ['secret "forgotten" not found']
    assert first.worker().exit_code is None  # and nobody else minds
