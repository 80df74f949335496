"""The loss in chunks of tokens where the head is sharded: FSDP2 gathers it first, tp never does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from training import MODELS, Trained, assert_trained_alike, rows_of, sharded, train, weights

from isthmus.models import cross_entropy
from isthmus.parallel import ParallelDims, open_mesh

pytestmark = pytest.mark.processes

MESHES = {
    "shard": ParallelDims(shard=2),
    "mixed": ParallelDims(shard=2, mixed_precision=True),
    "tp": ParallelDims(tp=2),
}
NAMES = list(MODELS)


def train_in_chunks(mesh: ParallelDims) -> tuple[list[Trained], int]:
    """Train on one rank of a worker, at most four tokens' logits at once; count the calls in chunks, too."""
    chunks = count_chunks()
    device_mesh, trained = open_mesh(mesh, 1), []
    for name in NAMES:
        model = sharded(MODELS[name], mesh, device_mesh)
        metrics = train(model, "adamw", rows_of(mesh), device_mesh)
        trained.append((weights(model), metrics))
    return trained, len(chunks)


def count_chunks() -> list[int]:
    cross_entropy.CHUNK_ELEMENTS = 31 * 4
    chunks, in_chunks = list[int](), cross_entropy.chunked_next_token_loss

    def counted(hidden: torch.Tensor, *given: Any) -> torch.Tensor:
        chunks.append(hidden.shape[0])
        return in_chunks(hidden, *given)

    cross_entropy.chunked_next_token_loss = counted
    return chunks


@pytest.fixture(scope="module", params=MESHES)
def trained(request: pytest.FixtureRequest) -> tuple[str, list[Any]]:
    mesh = MESHES[request.param]
    return request.param, run_ranks(train_in_chunks, mesh.num_ranks, mesh)


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_one_process_with_all_logits(trained: tuple[str, list[Any]], name: str) -> None:
    kind, ranks = trained
    assert [num_calls for _, num_calls in ranks] == [0 if kind == "tp" else 2 * 4 * len(NAMES)] * 2
    all_ranks = [cases[NAMES.index(name)] for cases, _ in ranks]
    if kind != "mixed":
        assert_trained_alike(all_ranks, name, "adamw")
        return
    model = MODELS[name].build()  # in bfloat16 the losses are close, not equal
    expected = train(model, "adamw", slice(0, 4))
    for found, metrics in all_ranks:
        assert [each["loss"] for each in metrics] == pytest.approx([each["loss"] for each in expected], rel=1e-2)
        assert {tensor.dtype for tensor in found.values()} == {torch.float32}


def soft_capped(mesh: ParallelDims) -> list[float]:
    """Train a network that changes its logits, as Gemma does: it runs twice the first time."""
    chunks = count_chunks()
    device_mesh = open_mesh(mesh, 1)
    model = sharded(MODELS["gpt_neox"], mesh, device_mesh)
    cap(model.network)
    metrics = train(model, "adamw", rows_of(mesh), device_mesh)
    assert not chunks
    return [value for each in metrics for value in (each["loss"], each["grad_norm"])]


def cap(network: nn.Module) -> None:
    forward = network.forward

    def capped(**given: Any) -> Any:
        output = forward(**given)
        output.logits = output.logits.tanh()
        return output

    network.forward = capped  # type: ignore[method-assign]


def test_a_network_that_changes_its_logits_trains_under_fsdp2() -> None:
    model = MODELS["gpt_neox"].build()
    cap(model.network)
    whole = train(model, "adamw", slice(0, 4))
    expected = [value for each in whole for value in (each["loss"], each["grad_norm"])]
    for found in run_ranks(soft_capped, 2, MESHES["shard"]):
        assert found == pytest.approx(expected, rel=1e-5)
