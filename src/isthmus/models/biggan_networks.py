"""BigGAN's generator and discriminator (arXiv 1809.11096, appendix B; for 128 x 128 pixels they are its table 4)."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, interpolate, max_pool2d, relu
from torch.nn.utils.parametrizations import spectral_norm

_FIRST_SIZE = 4  # of the features that the generator begins with, in pixels
_WIDEST = 16  # times the width of the last features
_ATTENTION_SIZE = 64  # at most: attention costs its fourth power


class Generator(nn.Module):
    """The generator: from latent vectors and classes to images.

    The latent vector is cut into chunks: the first becomes 4 x 4 features, every other one goes, with the embedding of
    the class, into the batch norms of one block. Each block doubles the features' size. `BigGAN` explains the sizes.
    """

    def __init__(
        self, image_size: int, num_channels: int, num_classes: int, width: int, chunk_size: int, class_size: int
    ) -> None:
        super().__init__()
        sizes = [_FIRST_SIZE << i for i in range((image_size // _FIRST_SIZE).bit_length())]
        channels = [_channels(size, image_size, width) for size in sizes]
        condition_size = class_size + chunk_size
        self.chunk_size, self.latent_size = chunk_size, chunk_size * len(sizes)
        self.attention_size = _attention_size(image_size)
        self.classes = nn.Embedding(num_classes, class_size)
        nn.init.orthogonal_(self.classes.weight)
        self.first = _linear(chunk_size, channels[0] * _FIRST_SIZE**2)
        self.blocks = nn.ModuleList(_UpBlock(before, after, condition_size) for before, after in pairwise(channels))
        self.attention = _Attention(_channels(self.attention_size, image_size, width))
        self.norm = nn.BatchNorm2d(channels[-1])
        self.last = _conv(channels[-1], num_channels, 3)

    def forward(self, latents: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Make images [batch, channels, height, width], from -1 to 1, of [batch, latent_size] and [batch] int64."""
        first, *chunks = torch.split(latents, self.chunk_size, dim=1)
        embedding = self.classes(labels)
        x = self.first(first).unflatten(1, (-1, _FIRST_SIZE, _FIRST_SIZE))
        for chunk, block in zip(chunks, self.blocks, strict=True):
            if x.shape[-1] == self.attention_size:
                x = self.attention(x)
            x = block(x, torch.cat([embedding, chunk], dim=1))
        images: torch.Tensor = self.last(relu(self.norm(x))).tanh()
        return images


class Discriminator(nn.Module):
    """The discriminator: from images and classes to scores, large for what it takes for a real image of the class.

    The score is a linear one plus the projection of the features on the embedding of the class (arXiv 1802.05637).
    """

    def __init__(self, image_size: int, num_channels: int, num_classes: int, width: int) -> None:
        super().__init__()
        sizes = [image_size >> i for i in range(1, (image_size // _FIRST_SIZE).bit_length())]
        channels = [num_channels, *(_channels(2 * size, image_size, width) for size in sizes)]
        blocks = [_DownBlock(channels[i], channels[i + 1], first=i == 0) for i in range(len(sizes))]
        self.blocks = nn.ModuleList([*blocks, _DownBlock(channels[-1], channels[-1], shrinks=False)])
        self.attended = sizes.index(_attention_size(image_size))  # the block before attention
        self.attention = _Attention(channels[self.attended + 1])
        self.score = _linear(channels[-1], 1)
        self.classes = _normalised(nn.Embedding(num_classes, channels[-1]))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return scores [batch] of images [batch, channels, height, width] and [batch] int64."""
        x = images
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == self.attended:
                x = self.attention(x)
        x = relu(x).sum(dim=(2, 3))
        score: torch.Tensor = self.score(x).squeeze(1) + (self.classes(labels) * x).sum(dim=1)
        return score


class _UpBlock(nn.Module):
    """A residual block that doubles height and width; the condition sets gains and biases of its batch norms."""

    def __init__(self, before: int, after: int, condition_size: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = (_ConditionalNorm(channels, condition_size) for channels in (before, after))
        self.conv_1, self.conv_2 = _conv(before, after, 3), _conv(after, after, 3)
        self.skip = _conv(before, after, 1)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.conv_1(_double(relu(self.norm_1(x, condition))))
        hidden = self.conv_2(relu(self.norm_2(hidden, condition)))
        return hidden.add(_double(self.skip(x)))  # a convolution of single pixels may as well come first


class _DownBlock(nn.Module):
    """A residual block that halves height and width, or, as the last one, does not."""

    def __init__(self, before: int, after: int, first: bool = False, shrinks: bool = True) -> None:
        super().__init__()
        self.first, self.shrinks = first, shrinks  # the first one gets pixels, which are not cut off at zero
        self.conv_1, self.conv_2 = _conv(before, after, 3), _conv(after, after, 3)
        self.skip = _conv(before, after, 1) if shrinks else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.conv_2(relu(self.conv_1(x if self.first else relu(x))))
        if not self.shrinks:
            return hidden.add(self.skip(x))
        return avg_pool2d(hidden, 2).add(self.skip(avg_pool2d(x, 2)))


class _ConditionalNorm(nn.Module):
    """Batch norm whose gains and biases are linear in the condition."""

    def __init__(self, channels: int, condition_size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.gain, self.bias = (_linear(condition_size, channels, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        gain, bias = 1 + self.gain(condition), self.bias(condition)
        return torch.addcmul(bias[..., None, None], self.norm(x), gain[..., None, None])


class _Attention(nn.Module):
    """Attention: every position looks at all positions of the features at half their size (SAGAN, arXiv 1805.08318)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        small, half = max(1, channels // 8), max(1, channels // 2)
        self.query, self.key = (_conv(channels, small, 1, bias=False) for _ in range(2))
        self.value, self.out = _conv(channels, half, 1, bias=False), _conv(half, channels, 1, bias=False)
        self.share = nn.Parameter(torch.zeros(()))  # of what is seen; at first nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x).flatten(2)  # [batch, small, positions]
        key, value = (max_pool2d(conv(x), 2).flatten(2) for conv in (self.key, self.value))
        seen = value @ (query.mT @ key).softmax(dim=-1).mT  # [batch, half, positions]
        attended: torch.Tensor = self.out(seen.unflatten(2, x.shape[2:]))
        return x + self.share * attended


def _channels(size: int, image_size: int, width: int) -> int:
    """Return the number of channels of features of this size: the smaller they are, the more."""
    return width * min(_WIDEST, image_size // size)


def _attention_size(image_size: int) -> int:
    """Return the size of the features with attention: half the image's, as in the paper at 128 pixels."""
    return min(_ATTENTION_SIZE, image_size // 2)


def _double(x: torch.Tensor) -> torch.Tensor:
    return interpolate(x, scale_factor=2.0)


def _conv(before: int, after: int, size: int, bias: bool = True) -> nn.Module:
    return _normalised(nn.Conv2d(before, after, size, padding=size // 2, bias=bias))


def _linear(before: int, after: int, bias: bool = True) -> nn.Module:
    return _normalised(nn.Linear(before, after, bias=bias))


def _normalised(layer: nn.Conv2d | nn.Linear | nn.Embedding) -> nn.Module:
    nn.init.orthogonal_(layer.weight)
    return spectral_norm(layer)
