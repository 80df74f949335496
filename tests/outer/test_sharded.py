"""Workers sharded by FSDP2, in real processes: they end where unsharded ones end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.parallel.ranks import run_ranks
from tests.toy import inner_step, nesterov, sgd, toy_batch, toy_model, toy_run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from isthmus.compress import Cast
from isthmus.core import SyncSchedule, split_balanced
from isthmus.outer import Mix, OuterLoop, Replace
from isthmus.transport.torch_dist import TorchDist

pytestmark = pytest.mark.processes

METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"schedule": SyncSchedule(3), "merge": Replace()},
    "streaming": {"schedule": SyncSchedule(4, num_fragments=2, overlap_steps=1), "merge": Mix(0.5)},
}
STEPS = 12


def split(model: torch.nn.Module, name: str) -> list[Any]:
    return split_balanced(model, METHODS[name]["schedule"].num_fragments)


def train_sharded(name: str) -> dict[str, Any]:
    """This rank's part of two workers of two shards; the inside averages over equal batches, so it changes nothing."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
    model = toy_model()
    fully_shard(model, mesh=mesh["shard"])
    transport = TorchDist(20, expected_workers=2, ranks_per_worker=2)
    loop = OuterLoop(
        split(model, name), compressor=Cast(), outer_optimizer=nesterov, transport=transport, **METHODS[name]
    )
    optimizer, reports = sgd(model.parameters()), []
    for step in range(STEPS):
        inner_step(model, optimizer, toy_batch(transport.rank, step))
        reports += loop.step()
    reports += loop.finish()
    params = torch.cat([param.full_tensor().detach().reshape(-1) for param in model.parameters()])
    anchor_hash = loop.anchor_hash()
    loop.close()
    return {"params": params, "norms": [report.norm for report in reports], "anchor_hash": anchor_hash}


@pytest.mark.parametrize("name", METHODS)
def test_two_shards_end_where_the_whole_worker_ends(name: str) -> None:
    whole = toy_run(2, STEPS, split=lambda model: split(model, name), finish=True, **METHODS[name])
    ranks = run_ranks(train_sharded, 4, name)
    for rank in ranks:
        torch.testing.assert_close(rank["params"], whole[0].params, rtol=1e-5, atol=1e-6)
        assert rank["norms"] == pytest.approx([report.norm for report in whole[0].reports], rel=1e-4)
        assert rank["anchor_hash"] == ranks[0]["anchor_hash"]
