"""One test of every function in `torch_internals`: what fails here was broken by this version of torch or glibc."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

from isthmus.core import torch_internals

LOOKUPS = """
import socket
try:
    socket.gethostbyaddr("127.9.9.9")  # the process has asked DNS before
except OSError:
    pass
from isthmus.core.torch_internals import skip_reverse_lookups
skip_reverse_lookups()
from torch.distributed import TCPStore
TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
"""


def make_groups(store, timeout_seconds=10.0):
    with ThreadPoolExecutor(2) as pool:
        timeout = timedelta(seconds=timeout_seconds)
        return list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timeout), range(2)))


@pytest.mark.processes
def test_skip_reverse_lookups_leaves_one_that_fails_and_is_the_last():
    ended = subprocess.run(
        [sys.executable, "-c", LOOKUPS],
        env=os.environ | {"TORCH_CPP_LOG_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("The hostname of the client socket cannot be retrieved") == 1


def test_unconnected_gloo(monkeypatch):
    """One of two ranks makes its group alone; both connect when they exchange something."""
    store = HashStore()
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    with pytest.raises(RuntimeError):
        dist.ProcessGroupGloo(HashStore(), 0, 2, timedelta(seconds=0.2))
    with torch_internals.unconnected_gloo():
        one = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=10))
        other = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=10))
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    values = [torch.tensor([1.0]), torch.tensor([2.0])]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda group, value: group.allreduce([value]).wait(), [one, other], values))
    assert values == [torch.tensor([3.0])] * 2


def test_keep_alive():
    group = make_groups(HashStore())[0]
    kept = weakref.ref(group)
    torch_internals.keep_alive(group)
    del group
    gc.collect()
    assert kept() is not None


def test_what_keep_alive_is_for_a_group_with_a_stuck_collective_blocks_whoever_frees_it():
    """Where this fails, a version of torch frees such groups at once: `keep_alive` can go."""
    group, other = make_groups(HashStore(), timeout_seconds=2.0)
    work = group.allreduce([torch.zeros(1)])
    start = time.monotonic()
    del group, work
    gc.collect()
    assert time.monotonic() - start > 1.0
    assert other.rank() == 1


def test_clone_default_store():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        clone = torch_internals.clone_default_store()
        clone.set("key", "value")
        assert dist.distributed_c10d._get_default_store().get("key") == b"value"
        waiting = threading.Thread(target=clone.wait, args=(["later"], timedelta(seconds=10)))
        waiting.start()
        torch_internals.clone_default_store().set("later", "")  # a connection of its own: the other one is busy
        waiting.join(5)
        assert not waiting.is_alive()
    finally:
        dist.destroy_process_group()


def test_trees_and_dispatch():
    assert torch_internals.tree_leaves({"a": [1, (2,)], "b": 3}) == [1, 2, 3]
    assert torch_internals.tree_map_only(int, lambda leaf: leaf + 1, {"a": [1, "x"]}) == {"a": [2, "x"]}

    class Count(torch_internals.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Count.calls += 1
            return function(*args, **(kwargs or {}))

    with Count():
        torch.ones(2) + 1
    assert Count.calls == 2
