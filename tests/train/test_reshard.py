"""What one rank of a new mesh takes out of the checkpoints of all ranks of the former one."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from isthmus.core import State, UserError
from isthmus.parallel import ParallelDims
from isthmus.parallel.state import TensorSlice
from isthmus.train.checkpoint import Checkpoints
from isthmus.train.reshard import RankParts, Resharding, check_fragments

MATRIX, BIAS = torch.arange(15.0).view(5, 3), torch.arange(5.0)
FORMER = ParallelDims(shard=3)


def rank_parts(start: int, stop: int) -> RankParts:
    """Of a rank that has these rows of a matrix and of its bias; the optimizers number them in other orders."""
    parts = {
        "matrix": TensorSlice((5, 3), (start, 0), (stop - start, 3)),
        "bias": TensorSlice((5,), (start,), (stop - start,)),
        "mean": TensorSlice((2,), (0,), (2,)),
    }
    return RankParts(parts, ["bias", "matrix"], [["matrix"], ["bias"]])


def rank_state(start: int, stop: int, in_flight: bool = True) -> State:
    """What such a rank saved; every tensor of a parameter is a multiple of the parameter."""
    matrix, bias = MATRIX[start:stop], BIAS[start:stop]
    low_rank = {
        "start": [torch.ones(3, 2)],
        "effective_ranks": [1.5],
        "p": {"residual": [torch.ones(stop - start, 2)], "syncs": 4},
        "bypass": {"residual": [matrix]},  # of what the compressor around has picked: which, may change
    }
    memory = {"residual": [6 * matrix], "compressor": low_rank, "peer_norms": [0.5]}
    fragments = [
        {"anchor": [4 * matrix], "state": memory, "version": 7},
        {"anchor": [4 * bias], "state": {}, "version": 8},
    ]
    inner = {0: {"step": torch.tensor(9.0), "exp_avg": 2 * bias}, 1: {"exp_avg": 2 * matrix, "step": torch.tensor(9.0)}}
    outer = {0: {"momentum_buffer": 3 * matrix}, 1: {"momentum_buffer": None}}
    return {
        "holding": asdict(rank_parts(start, stop)),
        "model": {"matrix": matrix, "bias": bias, "mean": torch.tensor([1.0, 2.0])},
        "method": {
            "inner_steps": 20,
            "outer_optimizer": {"state": outer, "param_groups": [{"lr": 0.7, "params": [0, 1]}]},
            "fragments": fragments,
            "in_flight": [{"fragment": 1, "pseudo_gradient": [5 * bias], "outer_step": 3}] if in_flight else [],
        },
        "inner_step": {"optimizer": {"state": inner, "param_groups": []}, "progress": 20},
        "stream": {"position": 11},
        "generators": {"torch": torch.zeros(8, dtype=torch.uint8)},
        "metrics_bytes": 100 + start,
    }


@pytest.fixture
def ranks(tmp_path: Path) -> list[State]:
    """Read back from the files of three ranks, which have 2, 2 and 1 rows."""
    for rank, rows in enumerate([(0, 2), (2, 4), (4, 5)]):
        Checkpoints(tmp_path, 0, {}, rank, FORMER).save(20, rank_state(*rows))
    return Checkpoints(tmp_path, 0, {}).load_ranks(20)


def test_everything_elementwise_is_cut_anew(ranks):
    resharding = Resharding(ranks, rank_parts(1, 5))
    state = resharding.state(1, {"param_groups": ["inner"]}, {"param_groups": ["outer"]})
    matrix, bias = MATRIX[1:], BIAS[1:]
    expected = rank_state(1, 5)
    assert torch.equal(state["model"]["matrix"], matrix)
    assert torch.equal(state["model"]["bias"], bias)
    assert torch.equal(state["model"]["mean"], torch.tensor([1.0, 2.0]))
    inner, method = state["inner_step"]["optimizer"], state["method"]
    assert inner["param_groups"] == ["inner"]
    assert torch.equal(inner["state"][0]["exp_avg"], 2 * bias)
    assert torch.equal(inner["state"][1]["exp_avg"], 2 * matrix)
    assert inner["state"][1]["step"] == 9
    assert method["outer_optimizer"]["param_groups"] == ["outer"]
    assert torch.equal(method["outer_optimizer"]["state"][0]["momentum_buffer"], 3 * matrix)
    assert method["outer_optimizer"]["state"][1]["momentum_buffer"] is None
    assert torch.equal(method["fragments"][0]["anchor"][0], 4 * matrix)
    assert torch.equal(method["fragments"][1]["anchor"][0], 4 * bias)
    assert [fragment["version"] for fragment in method["fragments"]] == [7, 8]
    assert torch.equal(method["fragments"][0]["state"]["residual"][0], 6 * matrix)
    assert torch.equal(method["in_flight"][0]["pseudo_gradient"][0], 5 * bias)
    assert method["in_flight"][0]["outer_step"] == 3
    assert state["stream"] == expected["stream"]
    assert state["inner_step"]["progress"] == 20
    assert "generators" not in state


def test_memory_of_parts_as_a_whole_begins_anew_and_is_named(ranks):
    resharding = Resharding(ranks, rank_parts(0, 5))
    memory = resharding.state(0, {}, {})["method"]["fragments"][0]["state"]
    assert memory["compressor"] == {"effective_ranks": [1.5], "p": {"syncs": 4}, "bypass": {}}
    assert memory["peer_norms"] == [0.5]
    assert resharding.forgotten == {"compressor.start", "compressor.p.residual", "compressor.bypass.residual"}


def test_a_rank_without_rows_has_empty_tensors(ranks):
    state = Resharding(ranks, rank_parts(5, 5)).state(2, {}, {})
    assert state["model"]["matrix"].shape == (0, 3)
    assert state["method"]["in_flight"][0]["pseudo_gradient"][0].shape == (0,)


def test_metrics_go_on_where_there_are_some(ranks):
    resharding = Resharding(ranks, rank_parts(0, 5))
    assert [resharding.state(rank, {}, {})["metrics_bytes"] for rank in range(5)] == [100, 102, 104, 0, 0]


@pytest.mark.parametrize("here", [ParallelDims(), ParallelDims(pp=2, stages_per_rank=2), ParallelDims(pp=4)])
def test_other_stages_move_only_where_there_is_one_fragment(here):
    there = ParallelDims(pp=2, shard=2)
    check_fragments(1, there, here)
    check_fragments(3, there, ParallelDims(pp=2, tp=4))
    with pytest.raises(UserError) as refused:
        check_fragments(3, there, here)
    assert str(refused.value) == (
        "mesh: pipeline stages make fragments of their own, and this run has 3: "
        "resume with mesh.pp 2 and mesh.stages_per_rank 1"
    )
