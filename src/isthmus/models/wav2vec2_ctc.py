"""Wav2Vec 2.0 that transcribes speech, one letter or none a frame (CTC), by the classes of transformers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isthmus.core.types import UserError, first_line
from isthmus.inner.step import Batch
from isthmus.models.base import seeded
from isthmus.models.wav2vec2 import SpeechEncoder, network_inputs, numpy_seeded_from_torch

_BLANK, _BETWEEN_WORDS = 0, 4  # <pad> and | of wav2vec 2.0's vocabulary


@dataclass(frozen=True)
class Wav2Vec2CTC(SpeechEncoder):
    """Fine-tuning, or training from scratch, on sound with transcripts."""

    mask_prob: float = 0.05
    vocab_size: int = 32  # letters and signs; 0 stands for none, 4 between words
    # the folder of an exported `wav2vec2` to begin from; None draws all weights from the seed
    pretrained: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size <= _BETWEEN_WORDS:
            raise UserError(f"model.vocab_size is {self.vocab_size}; choose at least {_BETWEEN_WORDS + 1}")
        if self.pretrained is not None and not (Path(self.pretrained) / "config.json").is_file():
            raise UserError(
                f"model.pretrained: no config.json in {self.pretrained!r}; give the folder of an exported model"
            )

    def build(self, seed: int = 0) -> nn.Module:
        """Make the model with float32 weights; those that `pretrained` does not hold are drawn from `seed`."""
        from transformers import Wav2Vec2Config, Wav2Vec2ForCTC  # takes seconds to import

        config = Wav2Vec2Config(
            **self.encoder(),
            **self.regularisation(),
            vocab_size=self.vocab_size,
            pad_token_id=_BLANK,
            ctc_loss_reduction="mean",
            ctc_zero_infinity=True,
        )
        with seeded(seed):
            if self.pretrained is None:
                return Recogniser(Wav2Vec2ForCTC(config))
            self._compare(config)
            try:
                network = Wav2Vec2ForCTC.from_pretrained(
                    self.pretrained, config=config, dtype=torch.float32, local_files_only=True
                )
            except (OSError, ValueError, RuntimeError) as error:
                raise UserError(
                    f"model.pretrained: {self.pretrained!r} cannot be loaded: {first_line(error)}"
                ) from error
        return Recogniser(network.train())

    def _compare(self, config: Any) -> None:
        """Refuse a folder with a model of other sizes, or that writes with other letters."""
        path = Path(str(self.pretrained)) / "config.json"
        try:
            known = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"model.pretrained: {path} cannot be read: give the folder of an exported model") from error
        if known.get("model_type") != "wav2vec2":
            raise UserError(
                f"model.pretrained: {self.pretrained} holds a {known.get('model_type')}, no wav2vec2: give another"
            )
        names = list(self.encoder())
        if known.get("architectures") == ["Wav2Vec2ForCTC"]:
            names.append("vocab_size")
        ours, theirs = config.to_dict(), type(config).from_dict(known).to_dict()
        for name in names:
            if _plain(ours[name]) != _plain(theirs[name]):
                raise UserError(
                    f"model.{name} is {_plain(ours[name])}, and {_plain(theirs[name])} in {self.pretrained!r}; "
                    "choose the sizes of the pre-trained model"
                )


class Recogniser(nn.Module):
    """CTC loss; frames are masked in training alone (SpecAugment), as torch's generator decides."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network  # transformers' Wav2Vec2ForCTC

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the recordings' mean loss, in nats a letter; a transcript longer than its frames adds nothing.

        Args:
            batch: {"audio": [batch, num_samples] float32, "length": [batch] int64, of what is not padding,
                "text": [batch, letters] int64, padded with -100}.
        """
        _check_text(batch)
        with numpy_seeded_from_torch():
            loss: torch.Tensor = self.network(**network_inputs(batch, shortest=1), labels=batch["text"]).loss
        return loss

    @torch.no_grad()
    def measure(self, batches: list[Batch]) -> dict[str, tuple[float, float]]:
        """Count words and letters that are wrong, missing or too many, in the likeliest transcript."""
        errors, counts = {"word": 0, "character": 0}, {"word": 0, "character": 0}
        for batch in batches:
            _check_text(batch)
            inputs = network_inputs(batch, shortest=1)
            written = self.network(**inputs).logits.argmax(dim=-1)
            lengths = self.network._get_feat_extract_output_lengths(inputs["attention_mask"].sum(dim=1))
            for row, length, text in zip(written.tolist(), lengths.tolist(), batch["text"].tolist(), strict=True):
                right, understood = [letter for letter in text if letter >= 0], decode(row[:length])
                for name, of in (("word", _words), ("character", list)):
                    errors[name] += edit_distance(of(right), of(understood))
                    counts[name] += len(of(right))
        return {f"{name}_error_rate": (errors[name], counts[name]) for name in errors}


def decode(frames: Sequence[int]) -> list[int]:
    """Return the letters of a path: repetitions are one letter, unless there is a blank between them."""
    return [letter for letter, _ in groupby(frames) if letter != _BLANK]


def edit_distance(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the fewest insertions, deletions and substitutions that make `second` of `first` (Levenshtein 1965)."""
    row = list(range(len(second) + 1))
    for i, one in enumerate(first, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (one != other))
    return row[-1]


def _words(letters: list[int]) -> list[tuple[int, ...]]:
    parts = groupby(letters, lambda letter: letter == _BETWEEN_WORDS)
    return [tuple(word) for is_gap, word in parts if not is_gap]


def _check_text(batch: Batch) -> None:
    if "text" not in batch:
        raise UserError("model: wav2vec2_ctc needs transcripts, and the data have none: set data.transcripts to true")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
