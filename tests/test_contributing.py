"""The worked example of CONTRIBUTING.md runs as it is printed there."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from isthmus.compress import COMPRESSORS
from isthmus.compress.feedback import ErrorFeedback
from isthmus.core import UserError
from tests.compress import test_contract
from tests.compress.conftest import run_workers

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"


@pytest.fixture
def sign(tmp_path, monkeypatch):
    (example,) = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "sign_of_the_guide.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return COMPRESSORS.get("sign_of_the_guide:Sign")


def test_the_example_passes_the_contract(sign, monkeypatch):
    monkeypatch.setitem(test_contract.CONFIGS, "sign", sign(block=64))
    for weights in test_contract.WEIGHTS.values():
        test_contract.test_what_was_sent_is_what_was_averaged_and_all_get_the_same_bits("sign", weights, rounds=3)
        test_contract.test_identity_33_sent_bytes_are_the_formula("sign", len(weights))
    test_contract.test_own_message_and_residual_make_the_input("sign", None)
    test_contract.test_same_inputs_same_bits_over_several_rounds("sign", 3)
    test_contract.test_identity_30_inputs_and_old_state_are_never_mutated("sign", 2)
    test_contract.test_identity_18_a_worker_of_weight_zero_has_no_effect("sign", 3)


def test_the_example_learns_with_error_feedback(sign):
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


def test_the_example_refuses_bad_input(sign):
    with pytest.raises(UserError, match="multiple of 8"):
        sign(block=12)
