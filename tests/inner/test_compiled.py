"""Compiled language models train as eager ones do, and save and resume alike; every model is compiled once here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from tests.parallel.ranks import run_ranks
from tests.parallel.training import MODELS, rows_of, sharded, whole
from torch import nn

from isthmus.core import UserError
from isthmus.inner import AdamW, Cosine, SupervisedStep
from isthmus.models import ModelSpec
from isthmus.models.huggingface import HuggingFace
from isthmus.parallel import ParallelDims, open_mesh
from isthmus.train.evaluate import evaluate

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]  # a compiler is slow beside other tests

NUM_STEPS = 6


def batch_of(step: int, rows: slice = slice(0, 5)) -> dict[str, torch.Tensor]:
    """Five rows a step: with micro-batches of two the last one has another shape."""
    tokens = torch.randint(31, (5, 9), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[rows]}


def step_of(model: nn.Module, is_compiled: bool, **options: Any) -> SupervisedStep:
    """A step that accumulates micro-batches and clips."""
    schedule = Cosine().over(NUM_STEPS)
    return SupervisedStep(
        model, AdamW().build(model), schedule, micro_batch_size=2, clip_norm=0.5, compile=is_compiled, **options
    )


@dataclass
class Run:
    """One model, trained in the middle of which it is saved."""

    spec: ModelSpec
    is_compiled: bool
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.spec.build()
        self.step = step_of(self.model, self.is_compiled)

    def train(self, numbers: range) -> Run:
        for number in numbers:
            metrics = self.step(batch_of(number))
            self.losses.append(metrics["loss"])
            self.norms.append(metrics["grad_norm"])
        return self

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "step": self.step.state_dict()})

    def resume(self, state: dict[str, Any]) -> Run:
        self.model.load_state_dict(state["model"])
        self.step.load_state_dict(copy.deepcopy(state["step"]))
        return self


@pytest.fixture(scope="module", params=["gpt_neox", "gpt_neo", "huggingface"])
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelSpec]:
    torch.compiler.reset()
    if request.param == "huggingface":
        from transformers import LlamaConfig

        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 31}
        folder = tmp_path_factory.mktemp("llama")
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2).save_pretrained(folder)
        yield HuggingFace(str(folder), sequence_length=8)
    else:
        yield MODELS[request.param]
    torch.compiler.reset()


def test_compiled_models_train_evaluate_and_resume_as_eager_ones(spec: ModelSpec) -> None:
    eager, compiled = Run(spec, False).train(range(NUM_STEPS)), Run(spec, True)
    assert compiled.model.state_dict().keys() == eager.model.state_dict().keys()
    assert [name for name, _ in compiled.model.named_modules()] == [name for name, _ in eager.model.named_modules()]

    compiled.train(range(3))
    saved = compiled.state()
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    compiled.train(range(3, NUM_STEPS))
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)
    assert compiled.norms == pytest.approx(eager.norms, rel=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs  # nothing new after the first step
    assert not torch._dynamo.utils.counters["graph_break"]

    again = Run(spec, True).resume(saved).train(range(3, NUM_STEPS))
    assert again.losses == compiled.losses[3:]  # bit for bit
    for a, b in zip(again.model.parameters(), compiled.model.parameters(), strict=True):
        assert torch.equal(a, b)
    elsewhere = Run(spec, False).resume(saved).train(range(3, NUM_STEPS))
    assert elsewhere.losses == pytest.approx(eager.losses[3:], rel=1e-5)

    plain = spec.build()
    plain.load_state_dict(compiled.model.state_dict())
    assert evaluate(compiled.model, [batch_of(9)]) == evaluate(plain, [batch_of(9)])  # never compiled


MESHES = {"shard": ParallelDims(shard=2), "tp": ParallelDims(tp=2)}


def train_on_a_mesh(mesh: ParallelDims, is_compiled: bool) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """On one rank: losses and norms, whole weights, and how many graphs were compiled."""
    device_mesh = open_mesh(mesh, 1)
    model = sharded(MODELS["gpt_neox"], mesh, device_mesh)
    names = list(model.state_dict())
    step = step_of(model, is_compiled, device_mesh=device_mesh)
    rows = rows_of(mesh)
    metrics = [step(batch_of(number, rows)) for number in range(3)]
    assert list(model.state_dict()) == names
    losses = [value for each in metrics for value in (each["loss"], each["grad_norm"])]
    return losses, {name: whole(param) for name, param in model.named_parameters()}, len(names)


@pytest.mark.parametrize("name", MESHES)
def test_a_worker_of_several_ranks_trains_as_one_that_is_not_compiled(name: str) -> None:
    mesh = MESHES[name]
    eager = run_ranks(train_on_a_mesh, 2, mesh, False)
    compiled = run_ranks(train_on_a_mesh, 2, mesh, True, within_seconds=500)
    for (losses, weights, _), (expected, expected_weights, _) in zip(compiled, eager, strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-3, atol=1e-5)


@pytest.fixture
def no_compiler() -> Iterator[None]:
    torch.compiler.reset()
    without = {
        "cpp.cxx": (None, "/no/such/c++"),
        "force_disable_caches": True,
    }  # another run may have compiled the same
    with torch._inductor.config.patch(without):
        yield
    torch.compiler.reset()


def test_without_a_c_compiler_one_line_says_so(no_compiler: None) -> None:
    step = step_of(MODELS["gpt_neox"].build(), True)
    for work in (lambda: step(batch_of(0)), lambda: step.forward_backward(batch_of(0))):
        with pytest.raises(UserError) as error:
            work()
        line = str(error.value)
        assert line.startswith("inner.compile: torch cannot compile the model here (InvalidCxxCompiler: No working C++")
        assert line.endswith("): set it to false")
        assert "\n" not in line


class Broken(nn.Module):
    """A model whose own error is no compiler's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        raise torch.OutOfMemoryError("too large")


def test_errors_that_are_not_the_compiler_s_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """`inner.micro_batch_size: auto` goes by them."""
    model = Broken()
    monkeypatch.setattr(model, "compile", lambda: None)
    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        step_of(model, True).forward_backward(batch_of(0))
