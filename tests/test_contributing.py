"""The four guides of CONTRIBUTING.md run as they are printed there, from outside the package."""

import logging
import re
import sys
from copy import deepcopy
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from isthmus.compress import COMPRESSORS
from isthmus.compress.feedback import ErrorFeedback
from isthmus.core import UserError
from isthmus.recipes import attach, load_config
from isthmus.recipes.base import Plan
from isthmus.train import assemble
from isthmus.transport.local import LocalWorld
from isthmus.transport.local import run_workers as run_local
from tests.compress import test_contract
from tests.compress.conftest import run_workers
from tests.launched import finish
from tests.program import Program
from tests.transport.transport_contract import CHECKS, run_checks

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
PARTS = ("sign", "logged", "recipes", "model")


def write_package(folder: Path) -> None:
    """Write the guides' Python code into the files that its first lines name."""
    (folder / "my_package").mkdir()
    for code in re.findall(r"^```python\n(.*?)^```$", GUIDE, flags=re.DOTALL | re.MULTILINE):
        (folder / re.match(r"# (my_package/\w+\.py)\n", code)[1]).write_text(code)


def sample() -> dict:
    """Return all YAML of the guides together, as one configuration."""
    joined: dict = {}
    for text in re.findall(r"^```yaml\n(.*?)^```$", GUIDE, flags=re.DOTALL | re.MULTILINE):
        for section, values in yaml.safe_load(text).items():
            joined.setdefault(section, {}).update(values)
    return joined


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Imports a module of the reader's package."""
    write_package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ISTHMUS_ALLOW", "my_package")
    invalidate_caches()
    yield lambda name: import_module(f"my_package.{name}")
    for name in ("my_package", *(f"my_package.{part}" for part in PARTS)):
        sys.modules.pop(name, None)


@pytest.fixture
def sign(package):
    package("sign")
    return COMPRESSORS.get("my_package.sign:Sign")


def test_the_compressor_passes_the_contract(sign, monkeypatch):
    monkeypatch.setitem(test_contract.CONFIGS, "sign", sign(block=64))
    for weights in test_contract.WEIGHTS.values():
        test_contract.test_what_was_sent_is_what_was_averaged_and_all_get_the_same_bits("sign", weights)
        test_contract.test_identity_33_sent_bytes_are_the_formula("sign", len(weights))
    test_contract.test_own_message_and_residual_make_the_input("sign", None)
    test_contract.test_same_inputs_same_bits_over_several_rounds("sign", 3)
    test_contract.test_identity_30_inputs_and_old_state_are_never_mutated("sign", 2)
    test_contract.test_identity_18_a_worker_of_weight_zero_has_no_effect("sign", 3)


def test_the_compressor_learns_with_error_feedback(sign):
    """Two workers find the mean of their targets by signs."""
    targets = [torch.linspace(-1, 1, 100), torch.linspace(3, -2, 100)]

    def work(peers):
        state, position = {}, torch.zeros(100)
        for step in range(400):
            gradient = position - targets[peers.rank]
            (mean,), _ = ErrorFeedback(sign(block=104)).average([gradient], state, peers)
            position = position - 0.3 / (1 + step / 20) * mean
        return position

    for position in run_workers(work, 2):
        assert (position - sum(targets) / 2).abs().max() < 0.05


def test_the_compressor_refuses_bad_input(sign):
    with pytest.raises(UserError, match="multiple of 8"):
        sign(block=12)


def test_the_transport_passes_the_contract_and_logs_every_call(package, caplog):
    with caplog.at_level(logging.INFO, "isthmus.logged"):
        outcome = run_checks(package("logged").Logged(), 0, 1)
    assert set(outcome) == set(CHECKS)
    assert not any(outcome.values()), outcome
    said = [record.message for record in caplog.records]
    assert said[0] == "sync 0 has 1 workers"
    assert {"all_reduce_mean sent 0 bytes", "all_gather sent 0 bytes", "all_to_all sent 0 bytes"} <= set(said)
    assert "the sync was refused; 0 bytes were sent" in said


def test_the_recipe_trains_workers_that_agree(package):
    recipe, start = package("recipes").eight_bits(Plan(num_workers=2, steps=40, local_steps=5)), nn.Linear(20, 10)

    def work(rank, transport):
        model = deepcopy(start)
        loop = recipe.outer_loop(model, transport)
        reports = train(model, loop, 40, torch.Generator().manual_seed(rank))
        return loop.anchor_hash(), reports[-1]

    (one, report), (other, _) = run_local(LocalWorld(2), work)
    assert one == other
    assert report.committed
    assert 2 * 130 <= report.sent_bytes < 420  # 210 values in two blocks of 8 bits each; 840 bytes in float32


def test_the_recipe_attaches_by_its_import_path(package):
    package("recipes")
    model = nn.Linear(20, 10)
    loop = attach("my_package.recipes:eight_bits", model, steps=60)
    reports = train(model, loop, 60, torch.Generator().manual_seed(0))
    assert len(reports) >= 60 // 8 + 1  # a warm start of an eighth, then the sync after 50 more
    loop.close()


def train(model, loop, steps, generator):
    """Train a linear model towards noise, and return the reports of all syncs."""
    optimizer, reports = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(steps):
        loss = (model(torch.randn(8, 20, generator=generator)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reports += loop.step()
    return reports + loop.finish()


def test_the_model_is_built_by_its_import_path_and_learns(package, tmp_path):
    package("model")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": sample()["model"]}))
    model = assemble.build_model_spec(load_config(path)).build()
    batch = {"tokens": torch.arange(33).expand(4, -1)}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    first = model(batch).item()
    for _ in range(20):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    assert model(batch).item() < first / 10


@pytest.mark.processes
def test_all_four_together_in_a_run_of_two_workers(tmp_path):
    write_package(tmp_path)
    run = {"inner": {"batch_size": 4}, "train": {"steps": 20, "eval_every": 10, "run_dir": "run", "eval_batches": 2}}
    chosen = sample()
    chosen["outer"]["schedule"] = {"local_steps": 5}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(chosen | run))
    code, _, err = finish(Program("launch", "run.yaml", "--workers", 2, "--allow", "my_package", cwd=tmp_path))
    assert code == 0, err
    said = "".join(path.read_text() for path in (tmp_path / "run/logs").glob("*"))
    assert re.search(r"sync 3 has 2 workers\nall_gather sent 40 bytes\nall_gather_parts sent [0-9]{3,} bytes\n", said)
    assert "the sync was committed" in said
    resolved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert resolved["outer"]["compressor"]["compressor"]["type"] == "my_package.sign:Sign"
    assert resolved["outer"]["recipe"] == "my_package.recipes:eight_bits"
