"""Every recipe: a complete expression, for any number of workers and any H; what makes it that method."""

from pathlib import Path

import pytest
from torch import nn

from isthmus.compress import Cast
from isthmus.compress.dct import DCT
from isthmus.compress.float4 import Float4
from isthmus.compress.lowrank import LowRank
from isthmus.compress.topk import TopK
from isthmus.config import dump, parse
from isthmus.core import SyncSchedule
from isthmus.outer import KeepProgress
from isthmus.recipes import RECIPES, Plan, Recipe, load_config
from isthmus.recipes.base import outer_sgd, warm_start
from isthmus.transport.local import Local, LocalWorld

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


@pytest.mark.parametrize("name", RECIPES.names())
@pytest.mark.parametrize("local_steps", [1, 10, 15])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_every_recipe_resolves_and_reads_back(name, local_steps, workers):
    config = load_config(None, [f"outer.recipe={name}", f"outer.schedule.local_steps={local_steps}"], workers)
    assert parse(dump(config)) == config
    assert config.train.workers == workers
    if name == "ddp":
        assert config.outer.schedule is None
        assert config.outer.compressor is None
    else:
        assert config.outer.schedule.local_steps == local_steps


@pytest.mark.parametrize("name", RECIPES.names())
def test_every_recipe_says_where_it_is_from(name):
    assert RECIPES.get(name).__doc__


@pytest.mark.parametrize("name", [name for name in RECIPES.names() if name != "ddp"])
def test_the_papers_settings_are_a_recipe_of_their_own(name):
    settings = [f"outer.recipe={name}_paper", "outer.schedule.local_steps=10"]
    config = load_config(None, settings, 2)
    assert parse(dump(config)) == config
    assert config.outer.schedule.warm_start_steps == 0
    assert (config.inner.optimizer["type"] == "muon") == (name == "muloco")


def recipe(name, workers=2, **plan):
    return RECIPES.get(name)(Plan(workers, steps=1000, **plan))


@pytest.mark.parametrize("name", [name for name in RECIPES.names() if name != "ddp"])
@pytest.mark.parametrize("local_steps", [1, 2, 3, None])
def test_every_method_makes_an_outer_loop_for_any_h(name, local_steps):
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    loop = recipe(name, local_steps=local_steps).outer_loop(model, Local(LocalWorld(1), 0))
    loop.step()
    loop.close()


def test_what_makes_each_method():
    assert recipe("ddp").schedule is None
    assert recipe("opendiloco").compressor == Cast("float16")
    assert recipe("streaming").compressor == Float4("E3M0")
    assert recipe("streaming").split == "strided"
    assert recipe("eager").merge == recipe("dilocox").merge == KeepProgress(0.5)
    assert isinstance(recipe("dilocox").compressor.compressor, LowRank)
    assert isinstance(recipe("dct_momentum").compressor.compressor, DCT)
    assert isinstance(recipe("sparseloco").compressor.compressor, TopK)
    assert recipe("muloco").inner["optimizer"]["type"] == "muon"
    assert recipe("muloco").compressor.compressor.bits == 2


def test_the_page_of_recipes_has_the_inner_optimizers_of_all():
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    written = {name.strip("`"): inner for name, *_, inner in rows}

    def inside(name):
        optimizer = {"type": "adamw"} | recipe(name).inner.get("optimizer", {})
        lr = [f"lr {optimizer['lr']}"] if "lr" in optimizer else []
        return ", ".join([{"adamw": "AdamW", "muon": "Muon"}[optimizer["type"]], *lr])

    assert written == {name: inside(name) for name in RECIPES.names()}


@pytest.mark.parametrize("name", ["eager", "dilocox"])
def test_a_delayed_recipe_delays_by_a_whole_round_or_a_32nd_of_the_run(name):
    def tau(local_steps, steps=1000):
        return RECIPES.get(name)(Plan(4, steps, local_steps)).schedule.overlap_steps

    assert [tau(local_steps, 2000) for local_steps in (1, 7, 32, 200)] == [1, 7, 32, 37]
    assert [tau(200, steps) for steps in (10, 300, 10**5)] == [1, 4, 200]


@pytest.mark.parametrize("transport", ["torch_dist", "torchft"])
@pytest.mark.parametrize("name", ["eager", "dilocox"])
def test_delayed_recipes_have_equal_anchors_also_where_workers_come_and_go(name, transport):
    outer = load_config(None, [f"outer.recipe={name}", f"outer.transport.type={transport}"]).outer
    assert outer.merge == {"type": "keep_progress", "kept": 0.5}


def test_the_outer_optimizer_follows_workers_and_h():
    assert [outer_sgd(Plan(workers, steps=1000), 10)["lr"] for workers in (1, 2, 4, 8)] == [0.4, 0.6, 0.6, 0.8]

    def momenta(inside):
        return [outer_sgd(Plan(4, steps=1000), local_steps, inside)["momentum"] for local_steps in (1, 5, 10, 20, 500)]

    assert momenta("adamw") == [0.125, 0.625, 0.8, 0.8, 0.8]
    assert momenta("muon") == [0.125, 0.6, 0.6, 0.6, 0.6]


def test_the_warm_start_is_half_of_the_run_at_most_800_steps():
    starts = [warm_start(Plan(4, steps), 100, muon_every=16) for steps in (3, 7, 1500, 10**6)]
    assert [start["warm_start_steps"] for start in starts] == [0, 0, 736, 800]
    assert {start["warm_start_every"] for start in starts} == {16}
    assert warm_start(Plan(4, steps=1000), 3, muon_every=16) == {"warm_start_steps": 498, "warm_start_every": 3}


def test_the_less_a_recipe_sends_the_fewer_syncs_its_start_has():
    starts = {name: recipe(name).schedule for name in RECIPES.names() if name != "ddp"}
    assert {name: (each.warm_start_steps, each.warm_start_every) for name, each in starts.items()} == {
        "diloco": (500, 2),
        "opendiloco": (500, 2),
        "streaming": (500, 2),
        "eager": (496, 8),
        "dct_momentum": (496, 8),
        "muloco": (496, 8),
        "dilocox": (500, 10),
        "sparseloco": (500, 10),
    }


def test_where_the_loop_averages_gradients_those_with_adamw_inside_do_so_in_their_start():
    plan = Plan(4, 1000, averages_gradients=True)
    made = {name: RECIPES.get(name)(plan) for name in RECIPES.names() if name != "ddp"}
    assert {name: each.gradient_compressor for name, each in made.items() if each.gradient_compressor} == {
        "diloco": Cast(),
        "opendiloco": Cast("bfloat16"),
        "streaming": Float4("E3M0"),
    }
    assert {name: made[name].schedule.warm_start_every for name in ("diloco", "streaming", "muloco")} == {
        "diloco": 50,
        "streaming": 50,
        "muloco": 8,
    }


@pytest.mark.parametrize(("steps", "every"), [(2, 1), (60, 6), (500, 50), (10**5, 50)])
def test_a_start_that_averages_gradients_has_at_least_five_syncs_of_weights(steps, every):
    assert RECIPES.get("streaming")(Plan(4, steps, averages_gradients=True)).schedule.warm_start_every == every


def test_a_run_whose_workers_come_and_go_averages_weights_alone():
    outer = load_config(None, ["outer.recipe=diloco", "outer.transport.type=torchft"]).outer
    assert outer.gradient_compressor is None
    assert outer.schedule.warm_start_every == 2


def test_with_muon_inside_the_start_goes_further_than_the_mean_of_several_workers():
    def start_lr(name, workers):
        return RECIPES.get(name)(Plan(workers, 1000)).schedule.warm_start_lr

    assert [start_lr("muloco", workers) for workers in (1, 2, 4, 16)] == [1, 1.41, 1.41, 1.41]
    assert start_lr("eager", 4) == 1.41
    assert {start_lr(name, 4) for name in ("diloco", "opendiloco", "streaming", "muloco_paper")} == {1}


def test_recipes_with_muon_inside_get_the_rules_of_adamw_where_the_user_has_chosen_that():
    for name in ("muloco", "eager", "dct_momentum", "dilocox", "sparseloco"):
        schedule = RECIPES.get(name)(Plan(4, 1000, 30, inner_optimizer="adamw")).schedule
        assert (schedule.warm_start_steps, schedule.warm_start_every, schedule.warm_start_lr) == (500, 2, 1)
    for name, inside, momentum in [("muloco", "adamw", 0.8), ("muloco", "muon", 0.6), ("diloco", "muon", 0.6)]:
        assert RECIPES.get(name)(Plan(4, 1000, 30, inner_optimizer=inside)).optimizer["momentum"] == momentum
    for inside in (None, "muon"):
        assert str(RECIPES.get("muloco")(Plan(4, 1000, 30, inner_optimizer=inside))) == str(recipe("muloco"))


@pytest.mark.parametrize(("inner", "every"), [("{lr: 0.02}", 8), ("{type: muon}", 8), ("{type: adamw, lr: 0.02}", 2)])
def test_what_a_configuration_has_inside_decides_on_the_rules(inner, every):
    outer = load_config(None, ["outer.recipe=muloco", f"inner.optimizer={inner}"]).outer
    assert outer.schedule.warm_start_every == every


def test_the_syncs_of_the_start_are_no_rarer_than_those_after_it():
    for name in set(RECIPES.names()) - {"ddp"}:
        for local_steps in (1, 3, 10):
            schedule = RECIPES.get(name)(Plan(4, 1000, local_steps)).schedule
            assert schedule.warm_start_every <= local_steps


def test_the_fewer_syncs_the_more_each_of_them_sends():
    def sent(steps):
        plan = Plan(4, steps, local_steps=30)
        sparse, low_rank = (RECIPES.get(name)(plan).compressor.compressor for name in ("sparseloco", "dilocox"))
        return sparse.keep, low_rank.rank

    assert [sent(steps) for steps in (1000, 3000, 10**5)] == [(640, 0.999), (256, 0.329), (64, 0.125)]


def test_few_syncs_send_everything_once():
    def sent(local_steps):
        plan = Plan(4, 1000, local_steps)
        sparse, cosines = (RECIPES.get(name)(plan).compressor.compressor for name in ("sparseloco", "dct_momentum"))
        return sparse.keep, cosines.codec.keep

    assert [sent(local_steps) for local_steps in (30, 200, 1000)] == [(640, 1024), (2048, 2048), (4096, 4096)]


def my_recipe(plan):
    """A recipe of one's own."""
    return Recipe(SyncSchedule(plan.num_workers), compressor=Cast("float16"))


def test_a_recipe_of_ones_own_is_named_by_its_import_path():
    outer = load_config(None, [f"outer.recipe={__name__}:my_recipe"], workers=3).outer
    assert outer.schedule == SyncSchedule(3)
    assert outer.compressor == {"type": "cast", "format": "float16"}
