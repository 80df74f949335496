"""Windows: every one once an epoch, cut elsewhere in the next."""

import numpy as np
import pytest
import torch

from isthmus.core import UserError
from isthmus.data.tokens import TokenDataSet


def data_set_of(num_tokens: int, sequence_length: int = 4) -> TokenDataSet:
    """Token i is the number i, so a window says where it comes from."""
    return TokenDataSet(np.arange(num_tokens), np.arange(1000, 1000 + num_tokens), sequence_length, num_tokens)


def test_samples_are_windows_of_neighbouring_tokens():
    tokens = data_set_of(100).sample_order().read(np.arange(15))["tokens"]
    assert tokens.shape == (15, 5)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(5))


def test_every_window_comes_once_an_epoch():
    samples = data_set_of(42).sample_order(seed=5)
    epochs = [samples.read(9 * epoch + np.arange(9))["tokens"][:, 0].tolist() for epoch in range(6)]
    for starts in epochs:
        assert sorted(starts) == list(range(min(starts), min(starts) + 36, 4))
    assert len({tuple(starts) for starts in epochs}) == 6
    assert len({min(starts) for starts in epochs}) > 1  # windows are cut elsewhere in every epoch


@pytest.mark.parametrize("num_tokens", [5, 6, 8, 9])
def test_the_shortest_data_works(num_tokens):
    tokens = data_set_of(num_tokens).sample_order().read(np.arange(40))["tokens"]
    assert tokens.max() < num_tokens
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(5))


def test_validation_is_fixed_and_spread_over_the_data():
    data_set = data_set_of(402)
    batches = data_set.validation(batch_size=3, num_samples=10)
    assert [len(batch["tokens"]) for batch in batches] == [3, 3, 3, 1]
    tokens = torch.cat([batch["tokens"] for batch in batches])
    assert tokens[0, 0] == 1000
    assert tokens[-1, -1] > 1390
    assert len(tokens[:, 0].unique()) == 10
    again = data_set_of(402).validation(batch_size=5, num_samples=10)
    assert torch.equal(torch.cat([batch["tokens"] for batch in again]), tokens)


def test_validation_asked_for_too_much_gives_every_window():
    (batch,) = data_set_of(42).validation(batch_size=100, num_samples=64)
    assert batch["tokens"][:, 0].tolist() == list(range(1000, 1040, 4))


def test_bad_values_are_refused():
    with pytest.raises(UserError, match="a sequence of 128 tokens needs 129, the training data has 128"):
        data_set_of(128, sequence_length=128)
