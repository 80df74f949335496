"""Streams: every window once an epoch, exact positions, and orders that know no world size."""

import copy
from itertools import islice

import numpy as np
import pytest
import torch

from isthmus.core import UserError
from isthmus.data.tokens import TokenCorpus, TokenStream


def corpus_of(num_tokens: int, sequence_length: int = 4) -> TokenCorpus:
    """Token i is the number i, so a window says where it comes from."""
    return TokenCorpus(np.arange(num_tokens), np.arange(1000, 1000 + num_tokens), sequence_length, num_tokens)


def take(stream: TokenStream, num_batches: int) -> torch.Tensor:
    """[num_batches x batch, sequence_length + 1]."""
    return torch.cat([batch["tokens"] for batch in islice(stream, num_batches)])


def test_batches_are_windows_of_neighbouring_tokens():
    stream = corpus_of(100).stream(worker=0, batch_size=3)
    tokens = take(stream, 5)
    assert tokens.shape == (15, 5)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(5))
    assert stream.tokens_per_batch == 3 * 4


def test_every_window_comes_once_an_epoch():
    stream = corpus_of(42).stream(worker=1, batch_size=1, seed=5)
    epochs = [[] for _ in range(6)]
    for batch in stream:
        epoch = stream.state_dict()["epoch"]
        if epoch == len(epochs):
            break
        epochs[epoch].append(batch["tokens"][0, 0].item())
    for starts in epochs:
        assert min(starts) < 4
        assert sorted(starts) == list(range(min(starts), 38, 4))
    assert len({tuple(starts) for starts in epochs}) == 6
    assert len({min(starts) for starts in epochs}) > 1  # windows are cut elsewhere in every epoch


@pytest.mark.parametrize("batch_size", [3, 7, 100])
def test_batches_join_epochs_without_gaps(batch_size):
    """Whatever the batch size, the samples are those of batches of one; 100 hold ten epochs."""
    corpus = corpus_of(42)
    one_by_one = take(corpus.stream(worker=1, batch_size=1), 6 * batch_size)
    assert torch.equal(take(corpus.stream(worker=1, batch_size=batch_size), 6), one_by_one)


def test_orders_are_reproducible_and_differ_between_workers_seeds_and_epochs():
    corpus = corpus_of(4000)
    first = take(corpus.stream(worker=3, batch_size=8, seed=1), 10)
    assert torch.equal(first, take(corpus.stream(worker=3, batch_size=8, seed=1), 10))
    assert torch.equal(first, take(corpus.stream(worker=3, batch_size=4, seed=1), 20))
    others = [corpus.stream(worker=2, batch_size=8, seed=1), corpus.stream(worker=3, batch_size=8, seed=2)]
    others.append(corpus.stream(worker=10**9, batch_size=8, seed=1))  # ids have no upper end
    for other in others:
        assert not torch.equal(first, take(other, 10))


def test_identity_37_a_restored_position_goes_on_bitwise():
    """At every position of two epochs, through a copy of the state."""
    corpus = corpus_of(42)
    stream = corpus.stream(worker=0, batch_size=3)
    for _ in range(8):
        state = copy.deepcopy(stream.state_dict())
        resumed = corpus.stream(worker=0, batch_size=3)
        resumed.load_state_dict(state)
        expected = take(stream, 1)
        assert torch.equal(take(resumed, 1), expected)


def test_a_position_in_other_data_is_refused():
    state = corpus_of(42).stream(worker=0, batch_size=3).state_dict()
    with pytest.raises(UserError, match="belongs to 42 training tokens, this data has 43"):
        corpus_of(43).stream(worker=0, batch_size=3).load_state_dict(state)


@pytest.mark.parametrize("num_tokens", [5, 6, 8, 9])
def test_the_shortest_data_works(num_tokens):
    tokens = take(corpus_of(num_tokens).stream(worker=0, batch_size=2), 20)
    assert tokens.max() < num_tokens
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(5))


def test_validation_is_fixed_and_spread_over_the_data():
    corpus = corpus_of(402)
    batches = corpus.validation(batch_size=3, num_sequences=10)
    assert [len(batch["tokens"]) for batch in batches] == [3, 3, 3, 1]
    tokens = torch.cat([batch["tokens"] for batch in batches])
    assert tokens[0, 0] == 1000
    assert tokens[-1, -1] > 1390
    assert len(tokens[:, 0].unique()) == 10
    again = corpus_of(402).validation(batch_size=5, num_sequences=10)
    assert torch.equal(torch.cat([batch["tokens"] for batch in again]), tokens)


def test_validation_asked_for_too_much_gives_every_window():
    (batch,) = corpus_of(42).validation(batch_size=100, num_sequences=64)
    assert batch["tokens"][:, 0].tolist() == list(range(1000, 1040, 4))


def test_bad_values_are_refused():
    with pytest.raises(UserError, match="a sequence of 128 tokens needs 129, the training data has 128"):
        corpus_of(128, sequence_length=128)
    with pytest.raises(UserError, match="batch_size is 0"):
        corpus_of(42).stream(worker=0, batch_size=0)
