"""Wav2Vec 2.0, fine-tuning: CTC's loss and error rates, and what a pre-trained folder gives."""

import functools
import json
import random

import pytest
import torch
from tests.models.test_wav2vec2 import SIZES, sounds
from torch import nn
from torch.nn.functional import ctc_loss

from isthmus.core import UserError
from isthmus.data.speech_samples import VOCABULARY, encode
from isthmus.models.wav2vec2 import Wav2Vec2
from isthmus.models.wav2vec2_ctc import Wav2Vec2CTC, decode, edit_distance
from isthmus.train.evaluate import evaluate

SMALL = Wav2Vec2CTC(**SIZES)
TEXTS = ("ONE SIX", "TWO", "NINE")


def spoken(texts: tuple[str, ...] = TEXTS) -> dict[str, torch.Tensor]:
    text = torch.full((len(texts), 9), -100)
    for row, said in zip(text, texts, strict=True):
        row[: len(said)] = torch.tensor(encode(said))
    return {**sounds(len(texts)), "text": text}


@pytest.fixture
def model() -> nn.Module:
    return SMALL.build(seed=1).eval()


def test_the_loss_is_the_mean_over_recordings_of_nats_a_letter(model):
    batch = spoken()
    losses = []
    for audio, length, said in zip(batch["audio"], batch["length"], TEXTS, strict=True):
        attended = (torch.arange(8000) < length).long()[None]
        logits = model.network(audio[None], attention_mask=attended).logits[0]
        frames = int(model.network._get_feat_extract_output_lengths(int(length)))
        scores, letters = logits[:frames].log_softmax(dim=1), torch.tensor(encode(said))
        losses.append(
            ctc_loss(scores, letters, torch.tensor(frames), torch.tensor(len(said)), reduction="sum") / len(said)
        )
    torch.testing.assert_close(model(batch), torch.stack(losses).mean())


def test_a_transcript_that_is_too_long_adds_nothing(model):
    batch = spoken(("ONE", "TWO"))
    batch["length"][1] = 400  # one frame
    batch["audio"][1, 400:] = 0
    alone = {name: tensor[:1] for name, tensor in batch.items()}
    torch.testing.assert_close(model(batch), model(alone) / 2)


def test_masks_in_training_follow_torch():
    model = SMALL.build().train()
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(model(spoken()).item())
    assert losses[0] == losses[1] != losses[2]


def test_error_rates_of_what_is_written():
    """Written: 'ONE TEN', 'TWO', nothing. Said: 'ONE SIX', 'TWO', 'NINE'."""

    class Fixed(nn.Module):
        _get_feat_extract_output_lengths = SMALL.build().network._get_feat_extract_output_lengths

        def forward(self, input_values, attention_mask):
            paths = [
                [0, *(n for letter in encode(text) for n in (letter, letter, 0))] for text in ("ONE TEN", "TWO", "")
            ]
            frames = torch.zeros(3, 24, dtype=torch.int64)
            for row, path in zip(frames, paths, strict=True):
                row[: min(24, len(path))] = torch.tensor(path[:24])
            frames[1:, 20:] = encode("X")[0]  # in the padding
            logits = nn.functional.one_hot(frames, len(VOCABULARY)).float()
            return type("Output", (), {"logits": logits})

    model = SMALL.build()
    batch = spoken()
    batch["length"] = torch.tensor([8000, 5000, 5000])
    model.network = Fixed()
    assert model.measure([batch]) == {"word_error_rate": (2, 4), "character_error_rate": (3 + 4, 7 + 3 + 4)}


def test_evaluation_gives_both_rates(model):
    values = evaluate(model, [spoken()])
    assert set(values) == {"loss", "word_error_rate", "character_error_rate"}
    assert values == evaluate(model, [spoken()])


def test_repeated_letters_are_one_unless_a_blank_is_between():
    assert decode([0, 5, 5, 0, 5, 6, 6, 0, 0, 7]) == [5, 5, 6, 7]
    assert decode([]) == []


def test_edit_distance_against_its_definition():
    @functools.cache
    def naive(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(naive(a[1:], b) + 1, naive(a, b[1:]) + 1, naive(a[1:], b[1:]) + (a[0] != b[0]))

    rng = random.Random(0)
    for _ in range(200):
        a, b = ("".join(rng.choices("abc", k=rng.randrange(7))) for _ in range(2))
        assert edit_distance(a, b) == naive(a, b)


def test_a_pretrained_folder_gives_all_but_the_head(tmp_path):
    network = Wav2Vec2(**SIZES).build(seed=3).network
    network.save_pretrained(tmp_path)
    model = Wav2Vec2CTC(**SIZES, pretrained=str(tmp_path)).build(seed=4)
    assert model.training
    known = network.wav2vec2.state_dict()
    loaded = model.network.wav2vec2.state_dict()
    assert set(loaded) == set(known)
    assert all(torch.equal(loaded[name], known[name]) for name in known)
    again, other = (Wav2Vec2CTC(**SIZES, pretrained=str(tmp_path)).build(seed) for seed in (4, 5))
    assert torch.equal(again.network.lm_head.weight, model.network.lm_head.weight)
    assert not torch.equal(other.network.lm_head.weight, model.network.lm_head.weight)
    assert model.network.config.ctc_loss_reduction == "mean"


def test_an_exported_model_gives_the_same_in_transformers(tmp_path, model):
    from transformers import AutoModelForCTC

    model.network.save_pretrained(tmp_path)
    loaded = AutoModelForCTC.from_pretrained(tmp_path)
    audio = sounds()["audio"]
    torch.testing.assert_close(loaded(audio).logits, model.network(audio).logits, rtol=0, atol=0)


def refused(match: str, **options) -> None:
    with pytest.raises(UserError, match=match) as error:
        Wav2Vec2CTC(**{**SIZES, **options}).build()
    assert "\n" not in str(error.value)


def test_bad_folders_are_refused(tmp_path):
    folder = str(tmp_path)
    refused(r"no config\.json in", pretrained=folder)
    Wav2Vec2(**SIZES).build().network.save_pretrained(folder)
    refused("hidden_size is 32, and 16 in", pretrained=folder, hidden_size=32)
    refused("conv_bias is True, and False in", pretrained=folder, layer_norm_first=True)
    SMALL.build().network.save_pretrained(folder)
    refused("vocab_size is 40, and 32 in", pretrained=folder, vocab_size=40)
    (tmp_path / "model.safetensors").unlink()
    refused("cannot be loaded", pretrained=folder)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    refused("holds a gpt2, no wav2vec2", pretrained=folder)
    (tmp_path / "config.json").write_text("{")
    refused("cannot be read", pretrained=folder)


def test_bad_options_and_data_without_text_are_refused(model):
    refused("vocab_size is 4; choose at least 5", vocab_size=4)
    for use in (model, lambda batch: model.measure([batch])):
        with pytest.raises(UserError, match="needs transcripts"):
            use(sounds())
