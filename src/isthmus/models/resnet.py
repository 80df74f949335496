"""Residual networks for images, by the classes of transformers."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from isthmus.core.types import UserError
from isthmus.inner.step import Batch
from isthmus.models.base import check_at_least, seeded

_LARGE = [256, 512, 1024, 2048]
_OPTIONS = ("layer_type", "embedding_size", "hidden_sizes", "depths")  # of transformers
_DEPTHS = {  # kind of block, channels of the stem, channels of each stage, blocks of each stage
    8: ("basic", 16, [16, 32, 64], [1, 1, 1]),
    18: ("basic", 64, [64, 128, 256, 512], [2, 2, 2, 2]),
    34: ("basic", 64, [64, 128, 256, 512], [3, 4, 6, 3]),
    50: ("bottleneck", 64, _LARGE, [3, 4, 6, 3]),
    101: ("bottleneck", 64, _LARGE, [3, 4, 23, 3]),
    152: ("bottleneck", 64, _LARGE, [3, 8, 36, 3]),
}
_TOP = 5  # classes of which one must be right, where there are more than twice as many


@dataclass(frozen=True)
class ResNet:
    """A residual network (arXiv 1512.03385, table 1), strides in the 3 x 3 filters as is usual now ("v1.5").

    Depth 8 is for small images and machines: the channels of the paper's nets for CIFAR (section 4.2, n = 1) behind the
    stem of the others, which makes images four times smaller.
    """

    libraries: ClassVar = ("transformers.models.resnet.modeling_resnet",)

    depth: int = 8  # 8, 18, 34, 50, 101 or 152
    image_size: int = 32  # pixels across, of square images
    num_channels: int = 3
    num_classes: int = 10
    norm: str = "batch"  # or "group" (arXiv 1803.08494), for workers whose images differ in kind

    def __post_init__(self) -> None:
        if self.depth not in _DEPTHS:
            raise UserError(f"model.depth is {self.depth}; choose one of {', '.join(map(str, _DEPTHS))}")
        if self.norm not in ("batch", "group"):
            raise UserError(f"model.norm is {self.norm!r}; choose batch or group")
        check_at_least(1, self, "image_size", "num_channels")
        check_at_least(2, self, "num_classes")

    def build(self, seed: int = 0) -> nn.Module:
        """Make the model with float32 weights drawn from `seed`."""
        from transformers import ResNetConfig, ResNetForImageClassification  # takes seconds to import

        make: Any = ResNetConfig  # which takes `num_labels`, though its signature does not say so
        options = dict(zip(_OPTIONS, _DEPTHS[self.depth], strict=True))
        config = make(**options, num_channels=self.num_channels, num_labels=self.num_classes)
        with seeded(seed):
            network = ResNetForImageClassification(config)
        if self.norm == "group":
            _use_group_norm(network)
        return ImageClassifier(network)


def _use_group_norm(network: nn.Module) -> None:
    """Replace every batch norm by a group norm of 32 groups, as the paper has it, or of pairs of channels."""
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            num_channels, device = layer.num_features, layer.weight.device
            network.set_submodule(name, nn.GroupNorm(min(32, num_channels // 2), num_channels, device=device))


class ImageClassifier(nn.Module):
    """A network from images to logits, trained by cross-entropy. Its running statistics are averaged at every sync."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.has_batch_norm = any(isinstance(layer, nn.BatchNorm2d) for layer in network.modules())
        self.is_transformers_own = self.has_batch_norm  # their class builds no other
        self.network = network  # of transformers: (pixel_values) -> output with .logits [batch, num_classes]

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy, in nats, of {"image": [batch, channels, size, size], "label": [batch] int64}.

        Raises:
            UserError: one image alone, while training with batch norm.
        """
        if self.training and self.has_batch_norm and len(batch["image"]) == 1:
            raise UserError(
                "model: batch norm learns nothing from one image alone: raise inner.batch_size and micro_batch_size, "
                "or set model.norm to group"
            )
        return cross_entropy(self.network(pixel_values=batch["image"]).logits.float(), batch["label"])

    def measure(self, batches: list[Batch]) -> dict[str, tuple[float, float]]:
        """Count images whose class is the likeliest, and with more than 10 classes those among the 5 likeliest."""
        right: dict[str, float] = {}
        for batch in batches:
            logits, label = self.network(pixel_values=batch["image"]).logits, batch["label"][:, None]
            few = {"accuracy": 1} | ({"accuracy_top5": _TOP} if logits.shape[1] > 2 * _TOP else {})
            for name, count in few.items():
                hits = (logits.topk(count).indices == label).sum().item()
                right[name] = right.get(name, 0) + hits
        num_images = sum(len(batch["label"]) for batch in batches)
        return {name: (hits, num_images) for name, hits in right.items()}
