"""What is known of a run before its workers start."""

import time

import pytest
from tests.launched import ROOT

from isthmus.core import UserError
from isthmus.recipes import RECIPES, load_config
from isthmus.tools.preflight import check_run
from isthmus.tools.sync_traffic import sync_traffic

TINY = ROOT / "examples/tiny.yaml"
BAD = {
    "missing data": (["data.source=./nowhere"], "data: './nowhere' does not exist"),
    "a small vocabulary": (["model.vocab_size=100"], "model.vocab_size is 100, the data has 256: raise it"),
    "data for other models": (["data={type: images}"], "data: images is for models with"),
    "too few tensors": (
        ["outer.recipe=streaming", "outer.schedule={local_steps: 40, num_fragments: 40}"],
        "the model has 28 trainable tensors, too few for 40 fragments",
    ),
    "a whole model in fragments": (["outer.schedule.num_fragments=2"], "outer.split is whole, which makes 1 fragment"),
    "too few layers": (["mesh.pp=3"], "3 pipeline stages are too many for a model of 2 layers"),
    "heads that do not split": (["mesh.tp=4"], "mesh.tp is 4, which does not divide the model's 2 heads"),
    "micro-batches": (["mesh.pp=2", "inner.micro_batch_size=8"], "needs at least 2 micro-batches"),
    "one network": (["inner.optimizer.type=adversarial"], "adversarial trains two networks"),
    "two networks": (["model={type: biggan}", "data={type: images, source: digits}"], "adamw trains one network"),
}


@pytest.mark.parametrize("recipe", RECIPES.names())
def test_a_run_that_can_begin_passes(recipe):
    check_run(load_config(TINY, [f"outer.recipe={recipe}"], 2))


@pytest.mark.parametrize(("overrides", "message"), BAD.values(), ids=BAD)
def test_a_run_that_cannot_begin_is_refused_in_one_line(overrides, message):
    with pytest.raises(UserError) as caught:
        check_run(load_config(TINY, overrides, 2))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no text"):
        check_run(load_config(TINY, [f"data.source={tmp_path}"]))


def test_a_model_that_fits_in_no_memory_is_looked_at_in_a_moment():
    began = time.process_time()
    check_run(load_config(TINY, ["model={type: gpt_neox, size: gpt-neox-20b}", "outer.recipe=streaming"], 2))
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("recipe", "more", "num_rounds"),
    [("opendiloco", [], 1), ("sparseloco", [], 1), ("dilocox", ["outer.compressor.compressor.rank=4"], 3)],
)
def test_what_a_robust_mean_costs_is_counted(recipe, more, num_rounds):
    """Norms of every worker's message, from each owner to each other worker: 8 bytes each, once a round."""
    base = ["model.hidden_size=64", "model.num_layers=1", "train.workers=4", f"outer.recipe={recipe}", *more]
    plain, robust = (sync_traffic(load_config(None, [*base, f"outer.aggregation={a}"])) for a in ("mean", "median"))
    assert {name: robust[name].sent_bytes - plain[name].sent_bytes for name in plain} == {"all": num_rounds * 8 * 4 * 3}
