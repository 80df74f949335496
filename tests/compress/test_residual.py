"""What a message loses is computed where somebody asks for it, and nothing else depends on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from typing_extensions import override

from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.quantize import Quantize
from tests.toy import toy_run

from .conftest import run_workers
from .test_contract import CONFIGS, equal_states, tensors_of


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_without_a_residual_all_else_is_the_same(name: str, num_workers: int) -> None:
    def work(peers: Any) -> None:
        results = []
        for with_residual in (True, False):
            state: dict[str, Any] = {}
            sent_before = peers.sent_bytes
            for round_ in range(2):
                mean, residual = CONFIGS[name].average(tensors_of(peers.rank, round_), state, peers, with_residual)
            results.append((mean, state, peers.sent_bytes - sent_before))
        (mean, state, sent), (mean2, state2, sent2) = results
        assert residual == []
        assert all(torch.equal(a, b) for a, b in zip(mean, mean2, strict=True))
        assert equal_states(state, state2)
        assert sent == sent2

    run_workers(work, num_workers)


class Forgetful(Quantize):
    """A codec that cannot tell what its messages lose."""

    @override
    def encode_with_residual(
        self, rows: torch.Tensor, residual: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        raise NotImplementedError("what was not sent is forgotten")


@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_loop_asks_for_a_residual_only_where_it_is_needed(num_workers: int) -> None:
    for worker in toy_run(num_workers, compressor=Forgetful(8, 8)):
        assert worker.reports
        assert all(report.committed for report in worker.reports)
    with pytest.raises(NotImplementedError, match="forgotten"):
        toy_run(num_workers, compressor=ErrorFeedback(Forgetful(8, 8)))
