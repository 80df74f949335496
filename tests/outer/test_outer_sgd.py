"""The outer step in one pass: what torch's SGD and the merge rules do, with the same bits from every kernel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from isthmus.core import Fragment, kernels
from isthmus.core.kernels import cpu, gpu
from isthmus.outer.merge import KeepProgress, Mix, Replace
from isthmus.outer.outer_sgd import Left, is_plain_sgd, take_sgd_step

SHAPES = [(5000,), (7, 11), ()]
SETTINGS = [
    {"lr": 0.7, "momentum": 0.9, "nesterov": True},
    {"lr": 0.3, "momentum": 0.6},
    {"lr": 1.0},
]
RULES = [Replace(), Mix(0.3), Mix(0.7), Mix(1.0), KeepProgress(), KeepProgress(0.3)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there the interpreter runs what is compiled for a GPU
HALVES = [torch.float16, torch.bfloat16][: 1 + torch.cuda.is_available()]  # the interpreter cuts where a GPU rounds


def after_three_steps(
    settings: dict[str, Any], rule: Any, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[torch.Tensor]:
    """Anchors, parameters and momentum."""
    generator = torch.Generator().manual_seed(0)

    def values() -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]

    params = {str(number): nn.Parameter(value.to(dtype)) for number, value in enumerate(values())}
    fragment = Fragment.of("all", params)
    optimizer = SGD(fragment.anchor, **settings)
    for _ in range(3):
        for param, change in zip(fragment.params, values(), strict=True):
            param.add_(0.1 * change)
        gradients, left = values(), Left(values(), 0.3) if rule.kept else None
        take_sgd_step(optimizer, fragment, gradients, rule, left)
    buffers = [optimizer.state[anchor].get("momentum_buffer", torch.zeros(())) for anchor in fragment.anchor]
    return [tensor.detach().float().cpu() for tensor in (*fragment.anchor, *fragment.params, *buffers)]


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_same_bits_from_every_kernel(settings, rule, monkeypatch):
    ran, run = set(), cpu.run
    monkeypatch.setattr(cpu, "run", lambda name, *args, **kwargs: ran.add(name) or run(name, *args, **kwargs))
    found = [after_three_steps(settings, rule)]
    assert ran == {"outer_sgd"}
    monkeypatch.setattr(cpu, "run", gpu.run)  # by Triton's interpreter
    found.append(after_three_steps(settings, rule, device=DEVICE))
    monkeypatch.setenv("ISTHMUS_NATIVE", "0")
    expected = after_three_steps(settings, rule)
    for kernel in found:
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(kernel, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_parameters_of_half_the_bytes(rule, dtype, monkeypatch):
    expected = after_three_steps(SETTINGS[0], rule, dtype)
    monkeypatch.setattr(cpu, "run", gpu.run)
    assert all(map(torch.equal, after_three_steps(SETTINGS[0], rule, dtype, DEVICE), expected))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_it_is_torchs_sgd_but_for_rounding(settings):
    generator = torch.Generator().manual_seed(0)
    fragment = Fragment.of("all", {"a": nn.Parameter(torch.randn(1000, generator=generator))})
    theirs = copy.deepcopy(fragment.anchor)
    optimizer, expected = SGD(fragment.anchor, **settings), SGD(theirs, **settings)
    for _ in range(4):
        theirs[0].grad = torch.randn(1000, generator=generator)
        take_sgd_step(optimizer, fragment, [theirs[0].grad], Replace(), None)
        expected.step()
    assert torch.allclose(fragment.anchor[0], theirs[0], rtol=0, atol=2e-6)
    assert torch.equal(fragment.params[0], fragment.anchor[0])
    assert optimizer.state_dict()["state"].keys() == expected.state_dict()["state"].keys()


@pytest.mark.parametrize("setting", ["weight_decay", "dampening", "maximize"])
def test_other_settings_are_torchs_own_affair(setting):
    parameters = [nn.Parameter(torch.zeros(1))]
    assert is_plain_sgd(SGD(parameters, lr=1.0, momentum=0.5))
    assert not is_plain_sgd(SGD(parameters, lr=1.0, momentum=0.5, **{setting: 1}))
    assert not is_plain_sgd(torch.optim.Adam(parameters))
    assert not kernels._is_triton_broken
