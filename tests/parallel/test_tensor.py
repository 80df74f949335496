"""A worker on ranks of tensor parallelism, alone and under FSDP2, against one process with the whole batch."""

from dataclasses import replace

import pytest
from ranks import run_ranks
from training import CASES, MODELS, assert_trained_alike, sharded, train_cases

from isthmus.core import UserError
from isthmus.core.fragment import local_view
from isthmus.models import Module
from isthmus.parallel import ParallelDims, open_mesh, tensor_plan

pytestmark = pytest.mark.processes

MESHES = {"tp": ParallelDims(tp=2), "shard-tp": ParallelDims(shard=2, tp=2)}


@pytest.fixture(scope="module", params=MESHES)
def trained(request: pytest.FixtureRequest):
    mesh = MESHES[request.param]
    return run_ranks(train_cases, mesh.num_ranks, mesh)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_trains_as_unsplit(trained, case: tuple[str, str]):
    assert_trained_alike([rank[CASES.index(case)] for rank in trained], *case)


def look_inside(name: str) -> tuple[dict[str, int], bool]:
    """Sizes of this rank's parts, and whether head and embedding are one."""
    model = sharded(MODELS[name], MESHES["tp"], open_mesh(MESHES["tp"], 1))
    network = model.network
    sizes = {key: local_view(param).numel() for key, param in model.named_parameters()}
    return sizes, network.lm_head.weight is network.get_input_embeddings().weight


@pytest.mark.parametrize("name", MODELS)
def test_only_norms_positions_and_added_biases_are_whole_on_every_rank(name: str):
    model = MODELS[name].build()
    whole = {"norm", "ln_1", "ln_2", "ln_f", "wpe"}
    added = {"attention.dense.bias", "dense_4h_to_h.bias", "out_proj.bias", "c_proj.bias"}
    ranks = run_ranks(look_inside, 2, name)
    for sizes, tied in ranks:
        assert list(sizes) == [key for key, _ in model.named_parameters()]
        assert tied == (name == "gpt_neo")
    for key, param in model.named_parameters():
        replicated = any(word in key for word in whole) or any(key.endswith(word) for word in added)
        assert sum(sizes[key] for sizes, _ in ranks) == param.numel() * (2 if replicated else 1), key


@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_do_not_divide_the_heads_are_refused(name: str):
    with pytest.raises(UserError, match=r"^mesh\.tp is 3, which does not divide the model's 4 heads; choose a divisor"):
        tensor_plan(MODELS[name], 3)
    assert tensor_plan(replace(MODELS[name], num_heads=2), 2)


def test_a_model_without_a_plan_is_refused_unless_it_is_not_split():
    spec = Module("torch.nn:Identity")
    assert tensor_plan(spec, 1) == {}
    with pytest.raises(
        UserError, match="^mesh: Module has no tensor parallelism, but tp is 2: set tp to 1 and raise shard"
    ):
        tensor_plan(spec, 2)
