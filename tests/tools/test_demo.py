"""The demo on a model that starts quickly."""

import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from isthmus.core import UserError
from isthmus.recipes import RECIPES
from isthmus.tools import demo
from isthmus.tools.demo import DemoRun, run_demo
from isthmus.tools.fork_server import ForkServer

TINY = {
    "model": {
        "type": "module",
        "path": "tests.train.tiny:Bigram",
        "arguments": {"hidden_size": 4},
        "sequence_length": 8,
    },
    "data": {"type": "text", "source": "src/isthmus/core"},
    "inner": {"batch_size": 2},
    "train": {"eval_every": 5, "eval_batches": 1, "checkpoint_every": 0},
}
TWO_RUNS = (DemoRun("alone", "ddp", "by itself", workers=1), DemoRun("two", "ddp", "together", workers=2))


@pytest.fixture
def tiny(monkeypatch, tmp_path) -> Path:
    """A folder for demos; they train a tiny model."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(demo, "BASE", tmp_path / "demo.yaml")
    demo.BASE.write_text(yaml.safe_dump(TINY))
    return tmp_path / "runs"


@pytest.mark.processes
def test_the_demo_compares_runs_and_replaces_an_older_one(tiny):
    tiny.mkdir()
    (tiny / "demo.yaml").touch()
    (tiny / "old").touch()
    console = Console(width=120)
    with console.capture() as captured, ForkServer() as server:
        run_demo(tiny, 10, console, server, TWO_RUNS)
    text = captured.get()
    assert "holds an older demo: it is replaced" in text
    assert "2 of 2: two: together" in text
    assert "modelled" in text
    assert "Inner optimizer: adamw in alone, two." in text
    assert {path.name for path in tiny.iterdir()} == {"alone", "two", "demo.yaml", "summary.json", "report.png"}
    summary = json.loads((tiny / "summary.json").read_text())
    assert summary["step_seconds"] == pytest.approx(summary["runs"]["alone"]["compute_seconds"][0] / 10)
    alone, two = (summary["runs"][name] for name in ("alone", "two"))
    assert alone["tokens_per_worker"] == two["tokens_per_worker"] == 10 * 2 * 8
    assert alone["row"]["sent_bytes"] == 0
    assert two["row"]["times_fewer_than_ddp"] == 1
    assert 0 < two["row"]["modelled_utilisation"]["10"] < two["row"]["modelled_utilisation"]["1000"] < 1
    assert (tiny / "report.png").stat().st_size > 10_000


def test_a_folder_with_something_else_is_left_alone(tiny):
    tiny.mkdir()
    (tiny / "thesis.tex").touch()
    with pytest.raises(UserError, match="is not a demo"):
        run_demo(tiny, 10, Console(), ForkServer(), TWO_RUNS)
    assert (tiny / "thesis.tex").exists()


def test_the_runs_see_equal_tokens_and_are_what_they_are_called(tmp_path):
    configs = {run.name: run.configure(100, tmp_path) for run in demo.RUNS}
    assert list(configs) == ["alone", "ddp", "diloco", "streaming", "muloco"]
    assert len({(config.inner.batch_size, config.train.steps, str(config.data)) for config in configs.values()}) == 1
    assert [config.train.workers for config in configs.values()] == [1, 4, 4, 4, 4]
    assert all(config.outer.recipe in RECIPES.names() for config in configs.values())
    assert configs["alone"].outer.schedule is None
