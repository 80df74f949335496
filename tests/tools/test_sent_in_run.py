"""What a run sends in all, and which measured methods it is like."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from benchmarks import batched
from tests.launched import ROOT

from isthmus.config import RunConfig
from isthmus.models import outline
from isthmus.recipes import load_config
from isthmus.tools.sent_in_run import MeasuredMethod, MeasuredMethods, describe_sent, sent_in_run
from isthmus.tools.sync_traffic import start_traffic, sync_traffic
from isthmus.train.assemble import build_model_spec

TINY = ROOT / "examples/tiny.yaml"
MEASURED = MeasuredMethods(
    conditions="a toy",
    methods=(
        MeasuredMethod(recipe="diloco", local_steps=10, bits=12.0, loss=1.6, percent=1.0),
        MeasuredMethod(recipe="diloco", local_steps=100, bits=8.0, loss=1.7, percent=4.0),
        MeasuredMethod(recipe="muloco", local_steps=30, inside="muon", bits=0.5, loss=1.5, percent=3.0),
        MeasuredMethod(
            recipe="dilocox", local_steps=30, inside="muon", setting="rank 0.063", bits=0.01, loss=1.8, percent=9.0
        ),
    ),
)


def config_of(recipe: str, steps: int, *more: str) -> RunConfig:
    return load_config(TINY, [f"outer.recipe={recipe}", f"train.steps={steps}", *more], 4)


@pytest.mark.parametrize("steps", [48, 44])  # 44: the run ends within a round
@pytest.mark.parametrize("recipe", ["diloco", "streaming", "sparseloco", "dilocox"])
def test_identity_a_run_sends_what_is_said_of_it(tmp_path: Path, recipe: str, steps: int) -> None:
    path = tmp_path / "run.yaml"
    values = yaml.safe_load(TINY.read_text())
    values["train"] = values.get("train", {}) | {"workers": 4, "steps": steps, "eval_every": steps, "seed": 0}
    path.write_text(yaml.safe_dump(values))
    overrides = [f"outer.recipe={recipe}", "outer.schedule.local_steps=16", "outer.schedule.warm_start_steps=16"]
    if recipe == "streaming":
        overrides.append("outer.schedule.num_fragments=4")
    config = load_config(path, overrides)
    # reports are a twentieth of what so small a model sends, and their numbers are shorter where all is zero
    traffic = sync_traffic(config), start_traffic(config, outline(build_model_spec(config)))
    assert (traffic[1] is not None) == (recipe in ("diloco", "streaming"))
    assert sent_in_run(config, *traffic) == pytest.approx(batched.run(path, overrides).sent_bytes, rel=0.06)


def test_without_an_outer_loop_every_step_counts() -> None:
    config = config_of("ddp", 10)
    traffic = sync_traffic(config)
    assert sent_in_run(config, traffic) == 10 * traffic["gradients"].sent_bytes
    (said,) = describe_sent(config, 1000, traffic)
    assert said.endswith("bits for each parameter and inner step")


def test_a_run_that_ends_within_its_start_has_no_rounds() -> None:
    config = config_of("muloco", 10, "outer.schedule.warm_start_steps=20", "outer.schedule.warm_start_every=2")
    traffic = sync_traffic(config)
    assert sent_in_run(config, traffic) == 5 * sum(each.sent_bytes for each in traffic.values())


def test_the_method_of_the_same_recipe_that_sends_most_nearly_so_much() -> None:
    assert MEASURED.like("diloco", "adamw", 9.0) == MEASURED.methods[1]
    assert MEASURED.like("diloco", "adamw", 0.1) == MEASURED.methods[1]
    assert MEASURED.like("mine:own", "adamw", 9.0) is None
    assert MEASURED.like("muloco", "adamw", 0.5) is None


def test_the_best_of_what_sends_no_more() -> None:
    assert (
        MEASURED.best_within(20.0) == MEASURED.methods[2]
    )  # with another inner optimizer a larger gap is a lower loss
    assert MEASURED.best_within(9.0) == MEASURED.methods[2]
    assert MEASURED.best_within(0.02) == MEASURED.methods[3]
    assert MEASURED.best_within(0.001) is None


def test_of_equal_losses_the_smaller_message_is_the_best() -> None:
    larger = MeasuredMethod(recipe="muloco", local_steps=10, inside="muon", bits=0.47, loss=1.5, percent=2.3)
    smaller = larger.model_copy(update={"recipe": "dct_momentum", "bits": 0.37})
    assert MeasuredMethods(conditions="a toy", methods=(larger, smaller)).best_within(1.0) == smaller


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("diloco", "the lowest loss of all that sent no more had muloco with H = "),
        ("muloco", "the lowest loss of all that sent no more had the same one"),
    ],
)
def test_a_run_is_told_where_it_lies(recipe: str, said: str) -> None:
    config = config_of(recipe, 1000, "outer.schedule.local_steps=10")
    num_params = sum(param.numel() for param in outline(build_model_spec(config)).parameters())
    sent, nearest, lowest = describe_sent(config, num_params, sync_traffic(config))
    assert sent.startswith("in the run a worker sends ")
    assert nearest.startswith("measured (0.13M parameters, ")
    assert f"the nearest to it was {recipe} with H = " in nearest
    assert lowest.startswith(said)


def test_every_recipe_has_been_measured() -> None:
    measured = MeasuredMethods.load()
    assert {method.recipe for method in measured.methods} == {
        *("diloco", "opendiloco", "streaming", "eager", "dilocox", "dct_momentum", "sparseloco", "muloco")
    }
