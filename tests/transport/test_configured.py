"""The class of a transport serves a rendezvous, looks at one, and hands its options to its engine."""

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.transport.links import connect, leave, meet

from isthmus.core import UserError
from isthmus.recipes import load_config
from isthmus.train.assemble import build_transport, shared_keys, transport_class
from isthmus.transport.address import free_port
from isthmus.transport.torchft.membership import TorchFTMembership


def test_the_stragglers_grace_reaches_hivemind(tmp_path):
    spec = f"{{type: hivemind, grace_seconds: 3.5, identity_folder: {tmp_path}, host: 127.0.0.1}}"
    assert build_transport(load_config(None, [f"outer.transport={spec}"])).membership.grace_seconds == 3.5
    with pytest.raises(UserError, match="grace_seconds is -1: it should be a number of seconds"):
        build_transport(load_config(None, [f"outer.transport={spec.replace('3.5', '-1')}"]))


@pytest.mark.parametrize("grace_seconds", [0.2, 1.5])
def test_over_torchft_it_reaches_the_lighthouse_that_launch_starts(tmp_path, grace_seconds):
    config = load_config(None, [f"outer.transport={{type: torchft, grace_seconds: {grace_seconds}}}"])
    with transport_class(config).serve(config.outer.transport, tmp_path) as known:
        a, b, _ = workers = [connect(TorchFTMembership(known["lighthouse"], name)) for name in ("a", "b", "straggler")]
        start = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            all_found = list(pool.map(meet, (a, b)))
        assert grace_seconds <= time.monotonic() - start < 4.5
        assert [list(found.members) for found in all_found] == [["a", "b"]] * 2
        for worker in workers:
            leave(worker)


def test_a_grace_that_is_none_is_refused_before_anything_starts(tmp_path):
    config = load_config(None, ["outer.transport={type: torchft, grace_seconds: -1}"])
    serve = transport_class(config).serve(config.outer.transport, tmp_path)
    with pytest.raises(UserError, match="grace_seconds is -1: it should be"), serve:
        pass


def looked(overrides):
    """The status and the text of all that the class finds before it joins."""
    config = load_config(None, overrides)
    findings = list(transport_class(config).check(config.outer.transport))
    return [finding.status for finding in findings], " ".join(f"{each.found}: {each.advice}" for each in findings)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["torchft", "hivemind"])
def test_a_served_rendezvous_answers_until_it_ends(tmp_path, name):
    overrides = [f"outer.transport.type={name}"]
    config = load_config(None, overrides)
    with transport_class(config).serve(config.outer.transport, tmp_path) as served:
        assert served.keys() <= transport_class(config).PRIVATE_OPTIONS
        overrides += [f"outer.transport.{option}={value}" for option, value in served.items()]
        assert looked(overrides)[0] == ["ok"]
        named = load_config(None, overrides)
        with transport_class(named).serve(named.outer.transport, tmp_path) as again:
            assert again == {}, "the configuration names one already"
    status, text = looked(overrides)
    assert status == ["fail"]
    assert re.search(
        r"no (lighthouse|initial peer) answers.*\(Connection refused\).*start isthmus (lighthouse|dht) there", text
    )


@pytest.mark.parametrize("option", ["host", "lighthouse", "initial_peers", "listen", "identity_folder", "relay"])
def test_what_is_each_workers_own_is_not_compared(option):
    name = "torchft" if option == "lighthouse" else "hivemind"
    keys = shared_keys(load_config(None, [f"outer.transport.type={name}"]))
    assert f"outer.transport.{option}" not in keys
    assert "outer.transport.grace_seconds" in keys


def test_a_second_worker_needs_to_be_told_where_the_first_is(monkeypatch):
    assert looked(["outer.transport.type=hivemind"]) == (["ok"], "this worker is the first peer: ")
    assert looked(["outer.transport.type=torchft"])[0] == ["fail"]
    monkeypatch.setenv("RANK", "1")
    status, text = looked(["outer.transport.type=hivemind"])
    assert (status, "give its address in outer.transport.initial_peers" in text) == (["fail"], True)


def test_addresses_are_looked_at_before_joining():
    with pytest.raises(UserError, match="'10.0.0.1:4001' is no multiaddr"):
        looked(["outer.transport.type=hivemind", "outer.transport.initial_peers=['10.0.0.1:4001']"])
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use on this machine"):
            looked(["outer.transport.type=hivemind", f"outer.transport.listen=[/ip4/127.0.0.1/tcp/{port}]"])


def test_the_doctor_leaves_a_run_over_hivemind_alone():
    config = load_config(None, ["outer.transport={type: hivemind, run: mine}"])
    assert transport_class(config).apart_from_a_run(config.outer.transport)["run"] == "mine-doctor"
