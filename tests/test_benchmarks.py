"""What the benchmarks compare is comparable."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch
from benchmarks import distant_sync, families
from benchmarks.link_candidates.keys import make_keys
from benchmarks.link_candidates.link import Meeting
from benchmarks.link_candidates.sockets import Link
from benchmarks.models import bare_loop, examples
from benchmarks.runs import launch

from isthmus.recipes import load_config
from isthmus.train import assemble
from isthmus.transport.address import free_port

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_bare_loop_does_what_the_inner_step_does():
    """The same weights, bit for bit, after a few steps."""
    config = load_config(EXAMPLES / "tiny.yaml", ["inner.lr_schedule={type: constant, warmup_fraction: 0}"])
    spec = assemble.build_model_spec(config)
    ours, bare = spec.build(), spec.build()
    loops = [assemble.build_inner_step(config, ours), bare_loop(config, bare)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        batch = {"tokens": torch.randint(256, (8, 33), generator=generator)}
        for loop in loops:
            loop(batch)
    start = spec.build()
    for own, other, before in zip(ours.parameters(), bare.parameters(), start.parameters(), strict=True):
        assert torch.equal(own, other)
        assert not torch.equal(own, before)


def test_every_example_with_a_model_is_measured():
    assert {"tiny", "gpt_neo", "gpt_neox"} <= examples([]).keys()
    assert list(examples(["gpt_neo"])) == ["gpt_neo"]


@pytest.mark.parametrize(
    ("recipe", "num_bytes", "trips"),  # of messages of 6 x 64 x 64 values; each reports and votes
    [("diloco", 4 * 24_576, 3), ("opendiloco", 2 * 24_576, 3), ("sparseloco", 486, 3)],
)
def test_a_distant_sync_is_modelled_by_its_bytes_and_trips(monkeypatch, tmp_path, recipe, num_bytes, trips):
    """Small bytes at a slow rate, so that the sums of diloco's last parts cross behind its first ones."""
    monkeypatch.setattr(distant_sync, "WIDTH", 64)
    monkeypatch.setattr(distant_sync, "DEPTH", 6)
    distant_sync.traffic.cache_clear()
    modelled = distant_sync.modelled_seconds(recipe, 2, "0.1x20")
    assert modelled == pytest.approx(8 * (num_bytes + 40 + 9) / 1e5 + trips * 0.01)
    earlier = tmp_path / "earlier.json"
    seconds = modelled + 0.5
    earlier.write_text(json.dumps({"results": [["0.1 Mbit/s, 20 ms", recipe, "0.10", "8", str(seconds), "0.25"]]}))
    (row,) = distant_sync.reread(earlier, 2)
    assert row[:2] == ["0.1 Mbit/s, 20 ms", recipe]
    assert row[-2:] == [f"{modelled:.2f}", "2.00"]
    distant_sync.traffic.cache_clear()


def result(method, evaluation, sent_bytes, hashes=("a", "a")):
    names = [f"worker-{k}" for k in range(len(hashes))]
    summary = {"steps": 5, "evaluation": evaluation, "sent_bytes": sent_bytes}
    summary["anchor_hash"] = dict(zip(names, hashes, strict=True))
    return {"example": "resnet", "method": method, "inside": "adamw", "summary": summary}


def test_methods_are_compared_by_what_the_model_measures():
    group = {
        "ddp": result("ddp", {"loss": 0.5, "accuracy": 0.8}, [4_000_000, 4_000_000]),
        "diloco": result("diloco", {"loss": 0.6, "accuracy": 0.6}, [1_000_000, 900_000], ("a", "b")),
    }
    row = families.row(group["diloco"], group)
    assert row[4:] == ["accuracy 0.6000", "-25.00 %", "+0.00 %", "0.6000", "1.00", "4.0", "NO"]
    assert families.row(group["ddp"], group)[-1] == "yes"
    assert families.metric({"loss": 2.0, "perplexity": 7.4}) == "loss"


def test_a_finished_run_is_not_repeated(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"finished": True, "steps": 3}))
    assert launch(Path("nowhere.yaml"), tmp_path, 2, []) == {"finished": True, "steps": 3}


@pytest.mark.parametrize("num_threads", [1, 0])
def test_a_link_of_sockets_moves_what_it_is_given_and_ends_on_both_sides(tmp_path, num_threads):
    """Messages of unlike sizes one after another, a peer ahead of the other; an abort in the middle of a transfer."""
    make_keys(tmp_path)
    port = free_port()
    sizes = [3_000_000, 10, 1, 700_001, 2_000_000]
    aborting = threading.Event()

    def peer(rank: int) -> bool:
        link = Link(Meeting(rank, ("127.0.0.1",) * 2, port, tmp_path, 3), chunk_bytes=1 << 16, num_threads=num_threads)
        for number, size in enumerate(sizes):
            incoming = memoryview(bytearray(size))
            link.exchange(memoryview(Random(2 * number + rank).randbytes(size)), incoming)
            assert incoming == Random(2 * number + 1 - rank).randbytes(size)
        if rank == 0:
            threading.Timer(0.1, lambda: (aborting.set(), link.abort())).start()
        while True:
            try:
                link.exchange(memoryview(bytes(10_000_000)), memoryview(bytearray(10_000_000)))
            except OSError:
                link.abort()
                return aborting.is_set()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(peer, (0, 1))) == [True, True]
