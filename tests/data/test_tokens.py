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


@pytest.mark.parametrize("num_tokens", [5, 6, 8, 9, 12, 13])
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


def test_the_order_of_the_windows_of_a_text():
    samples = data_set_of(403).sample_order(seed=1)
    assert samples.num_samples == 99
    epochs = samples.read(np.arange(6 * 99))["tokens"].view(6, 99, 5)
    assert epochs.dtype == torch.int64
    assert torch.equal(epochs, epochs[..., :1] + torch.arange(5))
    starts = epochs[..., 0]
    lowest = starts.amin(1, keepdim=True)
    assert torch.equal(starts.sort(1).values, lowest + 4 * torch.arange(99))  # every window once
    assert len(lowest.unique()) > 1  # cut elsewhere in every epoch
    assert len({tuple((row - row.min()).tolist()) for row in starts}) == 6
    anywhere = np.array([400, 0, 98, 99, 7])
    assert torch.equal(samples.read(anywhere)["tokens"], epochs.view(-1, 5)[anywhere])


def test_the_fingerprint_tells_data_lengths_and_seeds_apart():
    data = [
        data_set_of(403).sample_order(),
        data_set_of(403).sample_order(1),
        data_set_of(404).sample_order(),
        data_set_of(403, 5).sample_order(),
    ]
    data.append(TokenDataSet(np.arange(403) + 1, np.arange(403), 4, 404).sample_order())
    assert len({samples.fingerprint for samples in data}) == 5
    assert data_set_of(403).sample_order().fingerprint == data[0].fingerprint
    narrow = TokenDataSet(np.arange(403).astype(np.uint16), np.arange(403), 4, 403)
    assert narrow.sample_order().fingerprint == data[0].fingerprint  # the same samples, held in fewer bytes
