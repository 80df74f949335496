"""`isthmus profile`: figures that can be derived by hand, and a link's H and tau on the virtual clock."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from tests.toy import toy_model, toy_run

from isthmus.cli import main
from isthmus.compress import Cast
from isthmus.core import SyncSchedule, UserError, split_balanced
from isthmus.models import CausalLM
from isthmus.models.gpt_neox import GPTNeoX
from isthmus.recipes import load_config
from isthmus.tools.profile import inner_step, profile, show_profile
from isthmus.tools.profile.inner_step import count_flops, try_micro_batches
from isthmus.tools.profile.sync import model_uplink
from isthmus.tools.sync_traffic import SyncTraffic, Uplink, sync_traffic
from isthmus.train import assemble
from isthmus.transport.local import LocalWorld

BATCH, SEQUENCE, WIDTH, LAYERS, VOCABULARY = 4, 16, 32, 2, 256
TOY_TRIPS = 3  # report, message, vote
MODEL = {"type": "gpt_neox", "hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": 2, "sequence_length": SEQUENCE}
TEXT = {"type": "text", "source": str(Path(__file__).parents[1] / "core")}


class Sleepy(Cast):
    """Takes a fifth of a second."""

    def average(self, local, state, peers, with_residual=True):
        time.sleep(0.2)
        return super().average(local, state, peers, with_residual)


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch):
    monkeypatch.setattr(inner_step, "_LEAST_SECONDS", 0.05)


@pytest.fixture
def path(tmp_path) -> Path:
    config = {
        "model": MODEL,
        "data": TEXT,
        "inner": {"batch_size": BATCH},
        "outer": {"schedule": {"local_steps": 4}},
        "train": {"steps": 8, "workers": 3, "run_dir": str(tmp_path / "run")},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def test_flops_of_a_step_are_those_of_its_matrices():
    """Forward once and backward twice through each matrix; attention: two products, and five back through them."""
    spec = GPTNeoX(hidden_size=WIDTH, num_layers=LAYERS, num_heads=2, sequence_length=SEQUENCE)
    model = spec.build()
    step = assemble.build_inner_step(load_config(), model)
    matrices = LAYERS * 12 * WIDTH**2 + VOCABULARY * WIDTH
    tokens = torch.zeros(BATCH, SEQUENCE + 1, dtype=torch.int64)
    expected = 6 * BATCH * SEQUENCE * matrices + LAYERS * 7 * 2 * BATCH * SEQUENCE**2 * WIDTH
    assert count_flops(step, {"tokens": tokens}) == expected
    step.micro_batch_size = 1
    assert count_flops(step, {"tokens": tokens}) == expected


def test_memory_grows_with_the_micro_batch_and_holds_all_state():
    spec = GPTNeoX(hidden_size=WIDTH, num_layers=LAYERS, num_heads=2, sequence_length=SEQUENCE)
    model = spec.build()
    step = assemble.build_inner_step(load_config(), model)
    tried = try_micro_batches(step, {"tokens": torch.zeros(8, SEQUENCE + 1, dtype=torch.int64)})
    assert [micro_batch.size for micro_batch in tried] == [1, 2, 4, 8]
    peaks = [micro_batch.peak_bytes for micro_batch in tried]
    assert peaks == sorted(peaks)
    state = 16 * sum(param.numel() for param in model.parameters())  # weights, gradients, two moments
    logits = 4 * SEQUENCE * VOCABULARY  # of a sample
    assert peaks[0] > state
    assert peaks[-1] - peaks[-2] > 4 * logits


@pytest.mark.parametrize("recipe", ["ddp", "streaming", "dilocox", "dct_momentum"])  # no sync, fragments, delay, memory
def test_recipes_are_measured(path, recipe):
    config = load_config(path, [f"outer.recipe={recipe}", "inner.micro_batch_size=2"])
    found = profile(config)
    model = assemble.build_model_spec(config).build()
    assert found.num_parameters == sum(param.numel() for param in model.parameters())
    assert (found.micro_batch_size, found.workers) == (2, 3)
    assert found.tokens_per_second == pytest.approx(BATCH * SEQUENCE / found.step_seconds)
    assert 0 < found.flops_utilisation < 1
    traffic = sync_traffic(config)
    assert found.sync_bytes == {fragment: each.sent_bytes for fragment, each in traffic.items()}
    if recipe == "ddp":
        assert (found.sync, found.links) == (None, [])
        return
    assert found.sync is not None
    assert min(found.sync.codec_seconds, found.sync.outer_seconds) > 0
    assert [link.megabits_per_second for link in found.links] == [10, 100, 1000]
    for link in found.links:
        assert link.seconds == pytest.approx(8e-6 * sum(found.sync_bytes.values()) / link.megabits_per_second)
    far, trips = profile(config, round_trip_ms=20.0), sum(each.num_trips for each in traffic.values())
    for near_link, link in zip(found.links, far.links, strict=True):
        assert link.seconds == pytest.approx(near_link.seconds + 0.01 * trips)


def test_what_the_codec_takes_is_told_from_the_rest(path):
    found = profile(load_config(path, [f"outer.compressor={{type: '{__name__}:Sleepy'}}"]))
    assert found.sync is not None
    assert found.sync.codec_seconds > 0.2
    assert found.sync.outer_seconds < 0.2
    assert all(link.overlap_steps * found.step_seconds >= 0.2 for link in found.links)


def test_auto_is_the_fastest_and_one_worker_is_shown_with_another(path):
    found = profile(load_config(path, ["inner.micro_batch_size=auto", "train.workers=1"]))
    best = max(found.micro_batches, key=lambda tried: tried.samples_per_second).size
    assert (found.fastest, found.micro_batch_size, found.workers) == (best, best, 2)
    assert min(found.sync_bytes.values()) > 0


@pytest.mark.parametrize("round_trip_ms", [0, 3000])
@pytest.mark.parametrize("fragments", [1, 2])
def test_identity_with_the_modelled_h_and_tau_all_of_a_sync_hides(fragments, round_trip_ms):
    """On the virtual clock, with bytes and trips as counted there; with one step less it does not."""
    step_seconds, bits_per_second = 0.1, 1000.0

    def syncs(local_steps, overlap_steps):
        world = LocalWorld(2, bits_per_second, round_trip_ms / 2e3)
        worker, _ = toy_run(
            world=world,
            steps=4 * local_steps,
            schedule=SyncSchedule(local_steps, fragments, overlap_steps),
            split=lambda model: split_balanced(model, fragments),
            compressor=Cast("bfloat16"),  # gathered: no trip hides behind bytes
            each_step=lambda rank, step, worker: worker.loop.transport.advance(step_seconds),
        )
        return worker.reports

    counted = {report.fragment: report.sent_bytes for report in syncs(2, 0)}
    assert len(counted) == len(split_balanced(toy_model(), fragments))
    traffic = [SyncTraffic(count, num_trips=TOY_TRIPS) for count in counted.values()]
    link = model_uplink(Uplink(1e-6 * bits_per_second, round_trip_ms), traffic, 0.0, step_seconds)
    assert link.local_steps == fragments * link.overlap_steps
    hidden = syncs(link.local_steps, link.overlap_steps)
    assert hidden
    assert all(report.hidden_seconds == pytest.approx(report.seconds) for report in hidden)
    exposed = syncs(link.local_steps, link.overlap_steps - 1)
    assert any(report.hidden_seconds < 0.999 * report.seconds for report in exposed)


def test_the_codec_counts_by_bytes():
    traffic = [SyncTraffic(937_500, 0), SyncTraffic(312_500, 0)]  # 1 s on the wire
    link = model_uplink(Uplink(10), traffic, codec_seconds=0.5, step_seconds=0.1)
    assert (link.seconds, link.overlap_steps, link.local_steps) == (1.0, 12, 24)  # of 1.5 s three quarters


def isthmus(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["isthmus", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code or 0


def test_lines_and_json(monkeypatch, capsys, path):
    assert isthmus(monkeypatch, "profile", path) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert isthmus(monkeypatch, "profile", path, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert lines["parameters"] == f"{figures['num_parameters']:,}"
    assert lines["device"] == figures["device"]
    assert lines["inner step"].endswith(f"({BATCH} samples in micro-batches of {BATCH})")
    assert "sent by each of 3 workers, the whole model" in lines["bytes per sync"]
    assert all(f"memory, micro-batches of {size}" in lines for size in (1, 2, 4))
    assert all(f"at {speed} Mbit/s, modelled" in lines for speed in ("10", "100", "1,000"))
    assert isthmus(monkeypatch, "profile", path, "--round-trip-ms", 50) == 0
    assert "at 1,000 Mbit/s, 50 ms, modelled: " in capsys.readouterr().out
    assert figures["sync"]["codec_seconds"] > 0


def test_a_terminal_gets_a_table(path):
    console = Console(force_terminal=True, width=140, record=True)
    show_profile(profile(load_config(path, ["outer.recipe=ddp"])), console)
    text = console.export_text()
    assert "measured" in text
    assert "after every inner step" in text


BAD = {
    "mesh.shard=2": "only a worker of one rank is profiled",
    "model.vocab_size=100": "model.vocab_size is 100, the data has 256",
    "data.source=/nowhere": "/nowhere",
    "outer.recipe=dilocco": "did you mean 'diloco'?",
}


@pytest.mark.parametrize(("override", "message"), BAD.items(), ids=BAD)
def test_bad_input_is_one_line(monkeypatch, capsys, path, override, message):
    assert isthmus(monkeypatch, "profile", path, "--set", override) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_micro_batch_that_does_not_fit_is_one_line(monkeypatch, path):
    forward = CausalLM.forward

    def small(self, batch):
        if len(batch["tokens"]) > 2:
            raise torch.OutOfMemoryError("too large")
        return forward(self, batch)

    monkeypatch.setattr(CausalLM, "forward", small)
    with pytest.raises(UserError, match="micro-batches of 4 samples do not fit into memory, 2 do"):
        profile(load_config(path))
    assert profile(load_config(path, ["inner.micro_batch_size=auto"])).micro_batch_size <= 2
