"""What a configuration says of an elastic world reaches its engine."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from isthmus.core import UserError
from isthmus.recipes import load_config
from isthmus.tools.launch import meeting_place
from isthmus.train.assemble import build_transport
from isthmus.transport.torchft.engine import TorchFT


def test_the_stragglers_grace_reaches_hivemind(tmp_path):
    spec = f"{{type: hivemind, grace_seconds: 3.5, identity_folder: {tmp_path}, host: 127.0.0.1}}"
    assert build_transport(load_config(None, [f"outer.transport={spec}"])).membership.grace_seconds == 3.5
    with pytest.raises(UserError, match="grace_seconds is -1: it should be a number of seconds"):
        build_transport(load_config(None, [f"outer.transport={spec.replace('3.5', '-1')}"]))


@pytest.mark.parametrize("grace_seconds", [0.2, 1.5])
def test_over_torchft_it_reaches_the_lighthouse_that_launch_starts(grace_seconds):
    config = load_config(None, [f"outer.transport={{type: torchft, grace_seconds: {grace_seconds}}}"])
    with meeting_place(config) as known:
        a, b, _ = workers = [TorchFT(known["lighthouse"], name) for name in ("a", "b", "straggler")]
        for worker in workers:
            worker.connect()
        start = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            meetings = list(pool.map(lambda worker: worker.meet({}, 20), (a, b)))
        assert grace_seconds <= time.monotonic() - start < 4.5
        assert [list(meeting.cards) for meeting in meetings] == [["a", "b"]] * 2
        for worker in workers:
            worker.leave()


@pytest.mark.parametrize("grace_seconds", ["-1", ".nan", ".inf"])
def test_a_grace_that_is_none_is_refused_before_anything_starts(grace_seconds):
    config = load_config(None, [f"outer.transport={{type: torchft, grace_seconds: {grace_seconds}}}"])
    with pytest.raises(UserError, match="grace_seconds is (-1|nan|inf): it should be"), meeting_place(config):
        pass
