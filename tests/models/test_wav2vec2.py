"""Wav2Vec 2.0, pre-training: the published loss, masks that follow torch's generator, an honest accuracy."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from isthmus.core import UserError, buffer_rules, split_strided
from isthmus.inner.optimizers import hidden_matrices
from isthmus.models.wav2vec2 import Wav2Vec2, min_num_samples
from isthmus.train.evaluate import evaluate

SIZES = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "conv_size": 8,
    "position_kernel": 4,
    "position_groups": 4,
    "num_samples": 8000,
    "mask_length": 3,
}
SMALL = Wav2Vec2(**SIZES, codebook_size=8, code_size=8, num_negatives=5)
BASE = {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "conv_size": 512, "position_kernel": 128}
CODES = {"codebook_size": 320, "num_negatives": 100}


def sounds(num: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Noise; the last recording is the shortest."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.linspace(8000, 4000, num).long()
    audio = torch.randn(num, 8000, generator=generator) * (torch.arange(8000) < length[:, None])
    return {"audio": audio, "length": length}


@pytest.fixture
def model() -> nn.Module:
    return SMALL.build(seed=1).eval()


def outputs(model: nn.Module, batch: dict[str, torch.Tensor], seed: int = 5):
    """What the network makes of a batch, and what was drawn for it, after `torch.manual_seed(seed)`."""
    torch.manual_seed(seed)
    inputs, masked, negatives = model._draw(batch)
    with torch.no_grad():
        return model.network(**inputs, mask_time_indices=masked), masked, negatives


def frames_of(model: nn.Module, batch: dict[str, torch.Tensor], seed: int = 5):
    """(prediction, its own code, codes of its negatives) of every masked frame, one by one."""
    made, masked, negatives = outputs(model, batch, seed)
    codes = made.projected_quantized_states
    for row, frame in masked.nonzero().tolist():
        yield made.projected_states[row, frame], codes[row, frame], codes.flatten(0, 1)[negatives[row, frame]]


def test_the_loss_is_the_published_one_a_masked_frame(model):
    """-log softmax of the similarity / 0.1, equal negatives left out, plus 0.1 of what the codes lack in diversity."""
    losses = []
    for found, code, wrong in frames_of(model, sounds()):
        wrong = wrong[(wrong != code).any(dim=1)]
        scores = [cosine_similarity(found, other, dim=0).item() / 0.1 for other in (code, *wrong)]
        losses.append(math.log(sum(math.exp(score) for score in scores)) - scores[0])
    perplexity = outputs(model, sounds())[0].codevector_perplexity.item()
    torch.manual_seed(5)
    assert model(sounds()).item() == pytest.approx(np.mean(losses) + 0.1 * (16 - perplexity) / 16, rel=1e-5)


def test_accuracy_counts_a_tie_as_a_guess(model):
    hits = []
    for found, code, wrong in frames_of(model, sounds()):
        same = (wrong == code).all(dim=1)
        own, others = cosine_similarity(found, code, dim=0), cosine_similarity(found[None], wrong)
        hits.append(0.0 if (others[~same] >= own).any() else 1 / (1 + same.sum().item()))
    assert 0 < np.mean(hits) < 1
    torch.manual_seed(5)
    assert model.measure([sounds()])["contrastive_accuracy"] == (pytest.approx(np.sum(hits)), len(hits))


def test_one_code_for_everything_is_chance(model):
    nn.init.constant_(model.network.quantizer.codevectors, 0.5)
    values = model.measure([sounds(), sounds(seed=1)])
    hits, num_masked = values["contrastive_accuracy"]
    assert hits / num_masked == pytest.approx(1 / 6)


def test_masks_follow_torch_alone_and_leave_numpy_as_it_was(model):
    losses = []
    for numpy_seed, torch_seed in ((0, 7), (1, 7), (1, 8)):
        np.random.seed(numpy_seed)
        before = np.random.get_state()[1].copy()
        torch.manual_seed(torch_seed)
        losses.append(model(sounds()).item())
        assert np.array_equal(np.random.get_state()[1], before)
    assert losses[0] == losses[1] != losses[2]


def test_every_evaluation_is_the_same(model):
    values = [evaluate(model, [sounds()]) for _ in range(2)]
    assert values[0] == values[1]
    assert set(values[0]) == {"loss", "contrastive_accuracy", "codevector_perplexity"}


@pytest.mark.parametrize("training", [True, False])
def test_padding_is_neither_masked_nor_a_negative(model, training):
    batch = sounds(4)
    batch["length"][-1] = 10  # shorter than a frame: it counts as long as a mask
    num_frames = [model.network._get_feat_extract_output_lengths(int(length)) for length in batch["length"][:-1]]
    for seed in range(20):
        _, masked, negatives = outputs(model.train(training), batch, seed)
        assert masked.any(dim=1).all()
        for row, frames in enumerate([*num_frames, 3]):
            assert not masked[row, int(frames) :].any()
            drawn = negatives[row][masked[row]] - row * masked.shape[1]
            assert masked[row][drawn].all()
            assert (drawn != masked[row].nonzero()).all()


def test_what_padding_holds_does_not_matter_with_layer_norm():
    model = Wav2Vec2(**{**SIZES, "layer_norm_first": True}, codebook_size=8, code_size=8).build().eval()
    batch = sounds()
    changed = {**batch, "audio": batch["audio"].clone()}
    changed["audio"][-1, -3000:] = 9.0
    losses = []
    for each in (batch, changed):
        torch.manual_seed(0)
        losses.append(model(each).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_temperature_falls_with_the_steps_of_the_run_to_its_end():
    model = Wav2Vec2(**SIZES, gumbel_temperatures=(2.0, 0.5, 0.9)).build()
    assert buffer_rules(model) == {"temperature": "replicated"}
    model.after_sync(1)
    model.after_sync(2)
    assert model.temperature.item() == pytest.approx(2.0 * 0.9**3)
    model(sounds())
    assert model.network.quantizer.temperature is model.temperature
    model.after_sync(100)
    assert model.temperature.item() == 0.5


def test_every_parameter_has_a_gradient(model):
    """DDP waits for all."""
    model.train()(sounds()).backward()
    assert [name for name, param in model.named_parameters() if param.grad is None] == []


def test_blocks_are_found_by_fragments_and_muon(model):
    layers = model.network.wav2vec2.encoder.layers
    matrices = [param for param in layers.parameters() if param.ndim == 2]
    assert len(matrices) == 2 * 6
    assert {id(param) for param in matrices} <= {id(param) for param in hidden_matrices(model)}
    assert [fragment.name for fragment in split_strided(model, 2)] == ["0", "1"]


@pytest.mark.parametrize(
    ("options", "published"),
    [
        ({**BASE, **CODES, "code_size": 256}, {}),
        (
            {
                **BASE,
                **CODES,
                "hidden_size": 1024,
                "num_layers": 24,
                "num_heads": 16,
                "code_size": 768,
                "layer_norm_first": True,
            },
            {
                "hidden_size": 1024,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "intermediate_size": 4096,
                "codevector_dim": 768,
                "proj_codevector_dim": 768,
                "feat_extract_norm": "layer",
                "conv_bias": True,
                "do_stable_layer_norm": True,
            },
        ),
    ],
    ids=["base", "large"],
)
def test_published_sizes(options, published):
    """Parameter by parameter those of transformers' configuration, which defaults to the base model."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForPreTraining

    with torch.device("meta"):
        ours = Wav2Vec2(**options).build().network
        theirs = Wav2Vec2ForPreTraining(Wav2Vec2Config(**published))
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}


def test_samples_of_frames_are_the_fewest():
    model = SMALL.build().network
    for num_frames in (1, 2, 10):
        size = min_num_samples(num_frames)
        assert model._get_feat_extract_output_lengths(size) == num_frames
        assert model._get_feat_extract_output_lengths(size - 1) == num_frames - 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_heads": 3}, "hidden_size is 128, no multiple of num_heads 3"),
        ({"position_groups": 3}, "no multiple of position_groups 3"),
        ({"conv_size": 0}, "conv_size is 0"),
        ({"dropout": 1.0}, r"dropout is 1\.0"),
        ({"mask_prob": 0.0}, "mask_prob is 0"),
        ({"mask_length": 1}, "mask_length is 1"),
        ({"num_samples": 3279}, "choose at least 3280"),
        ({"code_size": 5}, "code_size is 5, no multiple of num_codebooks 2"),
        ({"gumbel_temperatures": (0.5, 2.0, 0.9)}, r"gumbel_temperatures are \[0\.5, 2\.0, 0\.9\]"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(UserError, match=match) as error:
        Wav2Vec2(**options)
    assert "\n" not in str(error.value)
