"""Wav2Vec 2.0 (arXiv 2006.11477): pre-training on sound alone, by the classes of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from isthmus.core.types import UserError
from isthmus.inner.step import Batch
from isthmus.models.base import check_at_least, check_fractions, seeded

_KERNELS, _STRIDES = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)  # of the convolutions, as published


@dataclass(frozen=True)
class SpeechEncoder:
    """The options that pre-training and fine-tuning have in common; docs/speech.md has the published sizes."""

    libraries: ClassVar = ("transformers.models.wav2vec2.modeling_wav2vec2",)

    sample_rate: int = 16_000  # of the sound, in Hz
    # numbers that a recording is cut or padded to; seven convolutions make a frame of every 320
    num_samples: int = 16_000
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    conv_size: int = 64  # channels of the convolutions
    # layer norm in every convolution and before attention, as in the large model of Libri-Light; else group norm in
    # the first convolution and layer norm after attention
    layer_norm_first: bool = False
    position_kernel: int = 32  # frames that the convolution sees which stands for position embeddings
    position_groups: int = 16  # of that convolution
    dropout: float = 0.0  # of hidden states, attention and what enters the transformer
    mask_prob: float = 0.65  # frames masked at most, as a fraction; overlaps make them fewer
    mask_length: int = 10  # frames masked together

    def __post_init__(self) -> None:
        sizes = ("sample_rate", "hidden_size", "num_layers", "num_heads", "conv_size", "position_kernel")
        check_at_least(1, self, *sizes, "position_groups")
        check_at_least(2, self, "mask_length")
        check_fractions(self, "dropout", "mask_prob")
        for name in ("num_heads", "position_groups"):
            if self.hidden_size % getattr(self, name):
                raise UserError(
                    f"model.hidden_size is {self.hidden_size}, no multiple of {name} {getattr(self, name)}; choose one"
                )
        if self.num_samples < min_num_samples(self.mask_length):
            raise UserError(
                f"model.num_samples is {self.num_samples}, less than a mask of {self.mask_length} frames takes; "
                f"choose at least {min_num_samples(self.mask_length)}"
            )

    def encoder(self) -> dict[str, Any]:
        """Return the options of transformers' `Wav2Vec2Config` that say what the network is."""
        return {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "intermediate_size": 4 * self.hidden_size,
            "conv_dim": (self.conv_size,) * len(_KERNELS),
            "conv_kernel": _KERNELS,
            "conv_stride": _STRIDES,
            "conv_bias": self.layer_norm_first,
            "feat_extract_norm": "layer" if self.layer_norm_first else "group",
            "do_stable_layer_norm": self.layer_norm_first,
            "num_conv_pos_embeddings": self.position_kernel,
            "num_conv_pos_embedding_groups": self.position_groups,
        }

    def regularisation(self) -> dict[str, Any]:
        """Return the options of transformers' `Wav2Vec2Config` that say what is random in training.

        No layer is ever dropped as a whole: DDP waits for the gradients of all.
        """
        names = ("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout")
        return dict.fromkeys(names, self.dropout) | {
            "layerdrop": 0.0,
            "mask_time_prob": self.mask_prob,
            "mask_time_length": self.mask_length,
        }


@dataclass(frozen=True)
class Wav2Vec2(SpeechEncoder):
    """Pre-training: tell what stands behind a mask from other masked frames of the same recording."""

    num_codebooks: int = 2  # groups of the quantiser
    codebook_size: int = 32  # entries of each
    code_size: int = 64  # of a quantised frame, and of what is compared with it
    num_negatives: int = 20  # frames that the right one is hidden among
    diversity_weight: float = 0.1  # of the loss that has all entries used alike
    # of the quantiser's choice: at the start, at the end, and the factor of every step between
    gumbel_temperatures: tuple[float, float, float] = (2.0, 0.5, 0.999995)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "num_codebooks", "codebook_size", "code_size", "num_negatives")
        if self.code_size % self.num_codebooks:
            raise UserError(
                f"model.code_size is {self.code_size}, no multiple of num_codebooks {self.num_codebooks}; choose one"
            )
        if self.mask_prob == 0:
            raise UserError("model.mask_prob is 0, and pre-training is about what is masked; choose 0.65, for example")
        first, last, factor = self.gumbel_temperatures
        if not (first >= last > 0 and 0 < factor <= 1):
            raise UserError(
                f"model.gumbel_temperatures are {list(self.gumbel_temperatures)}; "
                "choose a start, an end above 0 that is not larger, and a factor above 0, at most 1"
            )

    def build(self, seed: int = 0) -> nn.Module:
        """Make the model with float32 weights drawn from `seed`."""
        from transformers import Wav2Vec2Config, Wav2Vec2ForPreTraining  # takes seconds to import

        config = Wav2Vec2Config(
            **self.encoder(),
            **self.regularisation(),
            num_codevector_groups=self.num_codebooks,
            num_codevectors_per_group=self.codebook_size,
            codevector_dim=self.code_size,
            proj_codevector_dim=self.code_size,
            num_negatives=self.num_negatives,
            diversity_loss_weight=self.diversity_weight,
        )
        with seeded(seed):
            return Pretraining(Wav2Vec2ForPreTraining(config), self.gumbel_temperatures)


class Pretraining(nn.Module):
    """Contrastive and diversity loss; masks and negatives are drawn anew for every batch, from torch's generator."""

    buffer_rules: ClassVar = {"temperature": "replicated"}

    def __init__(self, network: nn.Module, temperatures: tuple[float, float, float]) -> None:
        super().__init__()
        self.network: Any = network  # transformers' Wav2Vec2ForPreTraining
        first, self._last_temperature, self._factor = temperatures
        self.temperature: torch.Tensor
        self.register_buffer("temperature", torch.tensor(first))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss, in nats a masked frame.

        Args:
            batch: {"audio": [batch, num_samples] float32, "length": [batch] int64, of what is not padding}.
        """
        inputs, masked, negatives = self._draw(batch)
        self.network.set_gumbel_temperature(self.temperature)
        loss: torch.Tensor = self.network(**inputs, mask_time_indices=masked, sampled_negative_indices=negatives).loss
        return loss / masked.sum()

    @torch.no_grad()
    def measure(self, batches: list[Batch]) -> dict[str, tuple[float, float]]:
        """Measure how often the right frame is found among negatives, and how many entries of the codebooks are used.

        Contrastive accuracy: of all masked frames; a tie with negatives of the same code counts as a guess among them,
        so that a quantiser which knows one code only comes to 1 / (1 + num_negatives), which is chance.
        Codevector perplexity: summed over the codebooks, mean over the batches.
        """
        hits, num_masked, perplexity = 0.0, 0, 0.0
        for batch in batches:
            inputs, masked, negatives = self._draw(batch)
            outputs = self.network(**inputs, mask_time_indices=masked)
            found, codes = outputs.projected_states[masked], outputs.projected_quantized_states
            right, wrong = codes[masked], codes.flatten(0, 1)[negatives[masked]]  # [masked, size], [masked, K, size]
            same = (wrong == right[:, None]).all(dim=-1)
            closer = cosine_similarity(found[:, None], wrong, dim=-1) >= cosine_similarity(found, right)[:, None]
            hits += (~(closer & ~same).any(dim=1) / (1 + same.sum(dim=1))).sum().item()
            num_masked += len(found)
            perplexity += outputs.codevector_perplexity.item()
        return {"contrastive_accuracy": (hits, num_masked), "codevector_perplexity": (perplexity, len(batches))}

    def after_sync(self, num_steps: int) -> None:
        """Lower the temperature of the quantiser's choice, alike on all workers."""
        self.temperature.mul_(self._factor**num_steps).clamp_(min=self._last_temperature)

    def _draw(self, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Draw network inputs, masked frames [batch, frames] bool, and indices of negatives [batch, frames, K]."""
        from transformers.models.wav2vec2.modeling_wav2vec2 import _compute_mask_indices, _sample_negative_indices

        network, config = self.network, self.network.config
        inputs = network_inputs(batch, shortest=config.mask_time_length)
        lengths = network._get_feat_extract_output_lengths(inputs["attention_mask"].sum(dim=1)).cpu()
        num_frames = int(network._get_feat_extract_output_lengths(batch["audio"].shape[1]))
        shape = (len(lengths), num_frames)
        with numpy_seeded_from_torch():
            masked = _compute_mask_indices(
                shape,
                config.mask_time_prob,
                config.mask_time_length,
                attention_mask=torch.arange(num_frames) < lengths[:, None],
                min_masks=config.mask_time_min_masks,
            )
            negatives = _sample_negative_indices(shape, config.num_negatives, masked)
        device = batch["audio"].device
        return inputs, torch.from_numpy(masked).to(device), torch.from_numpy(negatives).long().to(device)


def network_inputs(batch: Batch, shortest: int) -> dict[str, torch.Tensor]:
    """Return the inputs of transformers' networks: the sound of a batch, and where it is no padding.

    Args:
        batch: {"audio": [batch, num_samples] float32, "length": [batch] int64}.
        shortest: frames that every recording has, at the cost of hearing silence after a short one.
    """
    audio = batch["audio"]
    length = batch["length"].clamp(min=min_num_samples(shortest))[:, None]
    return {
        "input_values": audio,
        "attention_mask": (torch.arange(audio.shape[1], device=length.device) < length).long(),
    }


def min_num_samples(num_frames: int) -> int:
    """Return the smallest number of samples of which the convolutions make so many frames."""
    size = num_frames
    for kernel, stride in zip(reversed(_KERNELS), reversed(_STRIDES), strict=True):
        size = (size - 1) * stride + kernel
    return size


@contextmanager
def numpy_seeded_from_torch() -> Iterator[None]:
    """Let numpy's generator, from which transformers draws masks, follow torch's; then leave it as it was.

    So one generator decides what is drawn, which evaluation seeds and checkpoints keep.
    """
    before = np.random.get_state()
    np.random.seed(int(torch.randint(2**32, (1,))))
    try:
        yield
    finally:
        np.random.set_state(before)
