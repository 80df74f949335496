"""`isthmus relay`: whom it serves, what it prints, how it ends."""

import re
import signal
import subprocess
import sys
import time

import pytest

from isthmus.core import UserError
from isthmus.link import Identity
from isthmus.transport.link_end import LinkEnd, LinkOptions
from isthmus.transport.relay_server import relay
from isthmus.transport.trust import SECRET

WORD = "a secret of at least sixteen letters"


def registers(link, seconds):
    deadline = time.monotonic() + seconds
    while not link._reach._registrations._live and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(link._reach._registrations._live)


@pytest.mark.processes
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_says_what_the_workers_need_and_ends_when_told(monkeypatch, end):
    monkeypatch.setenv(SECRET, WORD)
    command = [sys.executable, "-m", "isthmus", "relay", "--bind", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        address = re.fullmatch(
            r"relay: workers behind a NAT are reached with --set outer.transport.via=(127\.0\.0\.1:\d+)\n", line
        )[1]
        link = LinkEnd(LinkOptions(host="127.0.0.1", via=address), "127.0.0.1", 0.1, 5.0)
        assert registers(link, 10)
        link.close()
        process.send_signal(end)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()


def test_without_a_secret_or_a_list_it_serves_nobody(monkeypatch, tmp_path):
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(UserError, match=rf"set {SECRET} as for the workers, or --identity and --trusted"), relay(":0"):
        pass
    with pytest.raises(UserError, match="give both --identity and --trusted"), relay(":0", identity="a.key"):
        pass


def test_of_a_list_of_keys_it_serves_those_and_workers_do_not_trust_others(monkeypatch, tmp_path):
    monkeypatch.delenv(SECRET, raising=False)
    keys = {}
    for name in ("relay", "worker", "stranger"):
        keys[name] = Identity.generate()
        keys[name].save(tmp_path / name)
    (tmp_path / "list").write_text(f"{keys['relay'].fingerprint}\n{keys['worker'].fingerprint}\n")
    (tmp_path / "all").write_text("".join(f"{key.fingerprint}\n" for key in keys.values()))
    with relay("127.0.0.1:0", str(tmp_path / "relay"), str(tmp_path / "list")) as (port, _):
        for name, trusted, is_served in (("worker", "list", True), ("stranger", "all", False)):
            options = LinkOptions("127.0.0.1", identity=str(tmp_path / name), trusted=str(tmp_path / trusted))
            link = LinkEnd(LinkOptions(**{**vars(options), "via": f"127.0.0.1:{port}"}), "127.0.0.1", 0.1, 5.0)
            assert registers(link, 5 if is_served else 0.5) == is_served
            link.close()


def test_a_worker_whose_run_has_no_keys_is_told_that_a_relay_asks_for_them(monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(UserError, match="outer.transport.via: a relay asks for a key: set ISTHMUS_RUN_SECRET"):
        LinkEnd(LinkOptions(host="127.0.0.1", via="127.0.0.1:29530"), "127.0.0.1", 0.1, 5.0)


def test_a_fixed_port_is_that_of_the_first_rank_and_the_others_follow():
    options = LinkOptions(port=4000, announce="worker.example:5000", via="relay.example:29530")
    assert [options.of_rank(rank).port for rank in range(3)] == [4000, 4001, 4002]
    assert options.of_rank(2).announce == "worker.example:5002"
    assert options.of_rank(2).via == options.via
    assert LinkOptions().of_rank(2) == LinkOptions()
