"""Rows, table and plot from runs made by hand."""

import json
from pathlib import Path

import matplotlib.image
import pytest
import yaml
from rich.console import Console
from tests.launched import ROOT

from isthmus.config import dump
from isthmus.core import UserError
from isthmus.recipes import load_config
from isthmus.tools.finished_run import FinishedRun, modelled_clock, modelled_utilisation
from isthmus.tools.plot import draw
from isthmus.tools.report import compare, make_table, readable_bytes

TINY = ROOT / "examples/tiny.yaml"
MEGABIT = 125_000  # bytes: one second at 1 Mbit/s


def sync(step: int, outer_step: int, sent_bytes: int, fragment: str = "all", message_fraction: float = 1.0) -> dict:
    numbers = {"step": step, "outer_step": outer_step, "sent_bytes": sent_bytes, "message_fraction": message_fraction}
    return {"event": "sync", "fragment": fragment, "committed": True, **numbers}


def finished(
    syncs=(), schedule=None, steps=4, name="diloco", sent_bytes=(0, 0), evals=((2, 3.0), (4, 2.0))
) -> FinishedRun:
    summary = {
        "recipe": name,
        "steps": steps,
        "tokens_per_worker": 1000 * steps,
        "eval_loss": evals[-1][1],
        "sent_bytes": list(sent_bytes),
        "compute_seconds": [2.0 * steps, 4.0 * steps],
        "sync_seconds": [1.0, 3.0],
        "hidden_seconds": [0.5, 0.5],
    }
    evaluations = [{"event": "eval", "step": step, "loss": loss, "of": "anchor"} for step, loss in evals]
    return FinishedRun(name, {"outer": {"schedule": schedule}}, summary, [*syncs, *evaluations])


def test_a_worker_that_sends_nothing_only_computes():
    assert modelled_clock(finished(), 1) == [0, 3, 6, 9, 12]  # mean of 2 and 4 seconds a step
    assert modelled_clock(finished(), 1, step_seconds=1.0) == [0, 1, 2, 3, 4]
    assert modelled_utilisation(finished(), 1) == 1.0


def test_blocking_syncs_are_exposed_whole():
    run = finished([sync(2, 0, 5 * MEGABIT), sync(4, 1, 5 * MEGABIT)], {"local_steps": 2})
    assert modelled_clock(run, 1, 1.0) == [0, 1, 7, 8, 14]
    assert modelled_clock(run, 10, 1.0) == [0, 1, 2.5, 3.5, 5]
    assert modelled_utilisation(run, 1, 1.0) == 4 / 14


def test_overlapped_syncs_are_exposed_beyond_the_overlap():
    schedule = {"local_steps": 2, "overlap_steps": 1}  # sent after 2, finished after 3
    assert modelled_clock(finished([sync(3, 0, MEGABIT)], schedule), 1, 1.0) == [0, 1, 2, 3, 4]
    assert modelled_clock(finished([sync(3, 0, 3 * MEGABIT)], schedule), 1, 1.0) == [0, 1, 2, 5, 6]


def test_rounds_that_became_shorter_hide_less():
    schedule = {"local_steps": 4, "overlap_steps": 4}
    syncs = [
        sync(8, 0, MEGABIT, message_fraction=0.5),
        sync(10, 1, 3 * MEGABIT, message_fraction=0.5),
    ]  # sent after 4, 8, 10
    assert modelled_clock(finished(syncs, schedule, steps=10), 1, 1.0)[8:] == [8, 9, 11]


def test_with_a_full_delay_a_sync_has_a_whole_round_and_the_last_one_is_exposed():
    schedule = {"local_steps": 2, "overlap_steps": 2}
    syncs = [sync(4, 0, 2 * MEGABIT), sync(4, 1, 2 * MEGABIT)]  # sent after 2 and after 4, where the run ends
    assert modelled_clock(finished(syncs, schedule), 1, 1.0) == [0, 1, 2, 3, 6]


def test_the_uplink_carries_one_message_at_a_time():
    schedule = {"local_steps": 4, "num_fragments": 2, "overlap_steps": 2}  # 0 sent after 2, 1 sent after 4
    syncs = [sync(4, 0, 5 * MEGABIT, "0"), sync(6, 1, MEGABIT, "1")]
    assert modelled_clock(finished(syncs, schedule, steps=6), 1, 1.0) == [0, 1, 2, 3, 7, 8, 9]
    syncs = [sync(5, 0, 4 * MEGABIT, "0"), sync(7, 1, 4 * MEGABIT, "1")]
    schedule["overlap_steps"] = 3  # 0: from 2 to 6; 1 was sent after 4, waits until 6, ends at 10
    assert modelled_clock(finished(syncs, schedule, steps=7), 1, 1.0) == [0, 1, 2, 3, 4, 6, 7, 10]


def test_warm_start_blocks_and_its_bytes_count():
    schedule = {"local_steps": 2, "overlap_steps": 1, "warm_start_steps": 2}
    syncs = [sync(1, 0, MEGABIT), sync(2, 1, MEGABIT), sync(5, 2, MEGABIT)]
    run = finished(syncs, schedule, steps=5)
    assert modelled_clock(run, 1, 1.0) == [0, 2, 4, 5, 6, 7]
    assert run.sent_until() == [0, MEGABIT, 2 * MEGABIT, 2 * MEGABIT, 2 * MEGABIT, 3 * MEGABIT]


def test_gradients_are_exposed_at_every_step():
    run = finished([sync(step, step, MEGABIT, "gradients") for step in (1, 2, 3, 4)])
    assert modelled_clock(run, 1, 1.0) == [0, 2, 4, 6, 8]


def test_a_round_trip_counts_for_every_collective_and_windows_bound_the_rate():
    """A sync of diloco: a report, two shots and a vote. Four connections move 10 MB in a round trip of a second."""
    run = finished([sync(2, 0, 5 * MEGABIT), sync(4, 1, 5 * MEGABIT)], {"local_steps": 2})
    run.config.update(dump(load_config(TINY, ["outer.schedule={local_steps: 2, warm_start_steps: 0}"], 2)))
    assert modelled_clock(run, 1, 1.0, round_trip_ms=1000) == [0, 1, 9, 10, 18]
    assert modelled_clock(run, 1, 1.0, round_trip_ms=0) == modelled_clock(run, 1, 1.0)
    large = finished([sync(2, 0, 20_000_000)], {"local_steps": 2})
    large.config.update(run.config)
    assert modelled_clock(large, 1000, 1.0, round_trip_ms=1000)[-1] == pytest.approx(4 + 2 + 2)
    near, far = (modelled_utilisation(run, 10, 1.0, round_trip_ms) for round_trip_ms in (0.0, 100.0))
    assert compare([run], 1.0, 100.0)[0]["modelled_utilisation"]["10"] == far < near


def test_rows_compare_bytes_with_ddp():
    rows = compare([finished(name="ddp", sent_bytes=[300, 500]), finished(sent_bytes=[10, 30]), finished()])
    assert [row["times_fewer_than_ddp"] for row in rows] == [1.0, 20.0, None]
    assert [row["sent_bytes"] for row in rows] == [400, 20, 0]
    assert [rows[0][key] for key in ("compute_seconds", "sync_seconds", "hidden_seconds")] == [12.0, 2.0, 0.5]
    assert set(rows[0]["modelled_utilisation"]) == {"10", "100", "1000"}


def test_without_ddp_there_is_nothing_to_compare_with():
    assert compare([finished(sent_bytes=[10, 30])])[0]["times_fewer_than_ddp"] is None


def test_the_table_fits_90_columns_and_calls_modelled_what_is():
    runs = [finished(name="ddp", sent_bytes=[10**9, 10**9]), finished(name="sparseloco", sent_bytes=[123, 456_789])]
    console = Console(width=90)
    with console.capture() as captured:
        console.print(make_table(compare(runs)))
    text = captured.get()
    assert text.count("modelled") == 3
    assert "…" not in text
    assert "1.0 GB" in text
    assert "228.5 kB" in text
    assert "4,377.2" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (38_100_000, "38.1 MB"), (5e9, "5.0 GB"), (5e12, "5.0 TB")],
)
def test_readable_bytes(count, text):
    assert readable_bytes(count) == text


def test_the_plot_is_an_image_with_a_line_a_run(tmp_path):
    silent = finished(name="alone")
    sending = finished([sync(4, 0, MEGABIT)], {"local_steps": 4}, name="diloco")
    draw([silent, sending], tmp_path / "two.png")
    draw([silent], tmp_path / "one.png")
    two, one = (matplotlib.image.imread(tmp_path / name) for name in ("two.png", "one.png"))
    assert two.shape == one.shape
    assert two.shape[1] > 1500
    assert two.std() > 0.05
    assert (two != one).any()


def test_a_run_that_diverged_is_drawn_as_far_as_it_goes(tmp_path):
    draw([finished(evals=((2, 9.0), (4, None)))], tmp_path / "some.png")
    draw([finished(evals=((2, None), (4, None)))], tmp_path / "none.png")
    some, none = (matplotlib.image.imread(tmp_path / name) for name in ("some.png", "none.png"))
    assert (some != none).any()


def write_run(folder: Path, **files: str) -> Path:
    (folder / "metrics").mkdir()
    run = finished()
    texts = {
        "config.yaml": yaml.safe_dump(run.config),
        "summary.json": json.dumps(run.summary),
        "metrics/worker-0.jsonl": "".join(json.dumps(event) + "\n" for event in run.events),
    }
    for name, text in {**texts, **files}.items():
        (folder / name).write_text(text)
    return folder


def test_a_record_is_read_back(tmp_path):
    assert FinishedRun.read(write_run(tmp_path)) == finished()
    assert FinishedRun.read(tmp_path, "mine").name == "mine"


def test_a_folder_without_a_finished_run_is_named(tmp_path):
    with pytest.raises(UserError, match=r"does not hold a finished run: cannot read .*config.yaml"):
        FinishedRun.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"), [("summary.json", "{"), ("config.yaml", "{"), ("metrics/worker-0.jsonl", "{\n")]
)
def test_a_damaged_file_is_one_line(tmp_path, name, text):
    with pytest.raises(UserError, match="holds a damaged file") as caught:
        FinishedRun.read(write_run(tmp_path, **{name: text}))
    assert "\n" not in str(caught.value)
