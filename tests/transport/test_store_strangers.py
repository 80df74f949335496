"""Whoever reaches the store of a static world: it reads and writes there, and the run neither sees nor needs it."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from tests.launched import RUN, events, finish, wait_until
from tests.program import Program
from torch.distributed import HashStore, TCPStore

from isthmus.core import UserError
from isthmus.transport.address import free_port
from isthmus.transport.base import PeerLost
from isthmus.transport.link_end import LinkOptions
from isthmus.transport.rendezvous import RankLink
from isthmus.transport.trust import Trust

KEY = "rank-info/1"


def told_by_a_friend(told: object) -> str:
    return json.dumps(Trust().sign(KEY, told))  # where no keys are set, whoever writes at the store is one


def guesses(keys: list[str]) -> list[str]:
    """Return where else the run might look, by where its ranks have introduced themselves."""
    found = [key.removesuffix("rank-info/0") for key in keys if key.endswith("rank-info/0")]
    places = [place.replace("isthmus/0", f"isthmus/{number}") for place in found for number in range(4)]
    return [f"{place}{key}" for place in places for key in ("stop", "stop/0", "stop/1", "unsaved/50")]


JUNK = {
    "no text": b"\xff\xfe",
    "no JSON": "hello",
    "deep": "[" * 100_000,
    "not signed": "{}",
    "wrong types": '{"told": 1, "key": 2, "signature": 3}',
    "another key": '{"told": "[]", "key": "none", "signature": ""}',
    "too little": told_by_a_friend([]),
    "other things": told_by_a_friend([1, 2, 3]),
    "no place": told_by_a_friend(["host", {}, {}]),
    "a wrong place": told_by_a_friend(["host", {}, {"address": 7, "key": "k", "id": "i", "via": None}]),
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_junk_under_a_ranks_key_is_one_line_that_names_it(monkeypatch, junk):
    store = HashStore()
    store.set(KEY, junk)
    monkeypatch.setattr("isthmus.transport.rendezvous.open_store", lambda: store)
    monkeypatch.setattr("isthmus.transport.rendezvous._SEEN_SECONDS", 0.1)  # there is no worker 1 to wait for
    link = RankLink(10.0, LinkOptions(host="127.0.0.1"))
    try:
        with pytest.raises(UserError, match="worker 1 cannot take part: ") as caught:
            link.exchange_info(0, ["worker 0", "worker 1"], {})
        assert "\n" not in str(caught.value)
    finally:
        link.close()


def test_a_rank_whose_key_is_deleted_again_and_again_is_one_that_does_not_come(monkeypatch):
    store = HashStore()
    monkeypatch.setattr("isthmus.transport.rendezvous.open_store", lambda: store)
    link = RankLink(0.1, LinkOptions(host="127.0.0.1"))
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(link.exchange_info, 0, ["worker 0", "worker 1"], {})
            while not waiting.done():
                store.delete_key(KEY)
            with pytest.raises(PeerLost, match="worker 1 did not join within 1 s"):
                waiting.result()
    finally:
        link.close()


@pytest.mark.processes
@pytest.mark.waits
def test_a_run_finishes_whatever_is_written_into_its_store_once_it_has_begun(tmp_path):
    run, port = tmp_path / "run", free_port()
    train = RUN["train"] | {"run_dir": str(run), "steps": 400}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | {"train": train}))
    launcher = Program("launch", tmp_path / "run.yaml", MASTER_PORT=str(port))
    wait_until(lambda: events(run, "sync"))
    stranger = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
    with suppress(RuntimeError):  # the run may end, and its store with it
        while launcher.poll() is None:
            known = stranger.list_keys()
            for key in {*known, *guesses(known)}:
                stranger.set(key, "7")
            time.sleep(0.5)
            for key in known[::2]:
                stranger.delete_key(key)
    code, _, err = finish(launcher)
    assert (code, err) == (0, "")
    assert events(run, "step")[-1]["step"] == 400


@pytest.mark.processes
def test_the_store_of_a_launch_is_reached_from_this_machine_alone(tmp_path):
    port = free_port()
    train = RUN["train"] | {"run_dir": str(tmp_path / "run"), "steps": 100_000}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | {"train": train}))
    launcher = Program("launch", tmp_path / "run.yaml", MASTER_PORT=str(port))
    try:
        wait_until(lambda: events(tmp_path / "run", "step"))
        own = f"{socket.inet_aton('127.0.0.1')[::-1].hex().upper()}:{port:04X}"
        sockets = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
        listening = [line.split()[1] for table in sockets for line in table if line.split()[3] == "0A"]
        assert [address for address in listening if address.endswith(f":{port:04X}")] == [own]
    finally:
        launcher.kill()
