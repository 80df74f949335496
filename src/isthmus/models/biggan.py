"""BigGAN (arXiv 1809.11096): two networks that train each other, and a moving average of the generator."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import relu

from isthmus.core.types import UserError
from isthmus.inner.step import Batch
from isthmus.models.base import check_at_least, check_fractions, seeded
from isthmus.models.biggan_networks import Discriminator, Generator
from isthmus.models.frechet import class_agreement, frechet_distance, random_features

_NUM_PASSES = 16  # whose mean the standing statistics are


@dataclass(frozen=True)
class BigGAN:
    """Class-conditional BigGAN at any size that is a power of two; the defaults are for digits on a laptop.

    The paper's, for ImageNet at 128 pixels: image_size 128, num_channels 3, num_classes 1000, width 96, chunk_size 20,
    class_size 128, average_decay 0.9999.
    """

    image_size: int = 8  # height and width, in pixels
    num_channels: int = 1
    num_classes: int = 10
    width: int = 32  # channels of the generator's last and the discriminator's first features
    chunk_size: int = 16  # numbers in a chunk of the latent vector: there is one for each block, and one more
    class_size: int = 32  # numbers in the generator's embedding of a class
    orthogonal: float = 1e-4  # weight of the orthogonal regularisation of the generator
    average_decay: float = 0.999  # of the averaged generator, a step

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_channels", "num_classes", "width", "chunk_size", "class_size")
        check_fractions(self, "average_decay")
        if self.image_size < 8 or self.image_size & (self.image_size - 1):
            raise UserError(f"model.image_size is {self.image_size}; choose a power of two, at least 8")
        if self.orthogonal < 0:
            raise UserError(f"model.orthogonal is {self.orthogonal}; choose at least 0")

    def build(self, seed: int = 0) -> nn.Module:
        """Make both networks with float32 weights drawn from `seed`."""
        images = (self.image_size, self.num_channels, self.num_classes, self.width)
        with seeded(seed):
            generator = Generator(*images, self.chunk_size, self.class_size)
            return GAN(generator, Discriminator(*images), self.orthogonal, self.average_decay)


class GAN(nn.Module):
    """A generator and a discriminator, to be trained by `isthmus.inner.adversarial`.

    Batches are {"image": [batch, channels, height, width] float32 from -1 to 1, "label": [batch] int64}. Generated
    images are of the same classes as the real ones beside them. Latent vectors are drawn from the global generator.

    What syncs do to its buffers: batch norm's statistics are averaged; the averaged generator is computed by every
    worker from the anchors; the singular vectors of spectral norm follow each worker's own weights, by one power
    iteration in every pass.
    """

    def __init__(
        self, generator: Generator, discriminator: Discriminator, orthogonal: float, average_decay: float
    ) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.average = MovingAverage(generator, average_decay)
        self.orthogonal = orthogonal

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the discriminator's loss, which says little about the images: see `measure`."""
        return self.discriminator_loss(batch)

    def discriminator_loss(self, batch: Batch) -> torch.Tensor:
        """Return the hinge loss (arXiv 1705.02894): 0 where it tells all images apart by a margin, 2 at the start."""
        images, labels = batch["image"], batch["label"]
        with torch.no_grad():
            generated = self.generator(self.draw(labels), labels)
        scores = self.discriminator(torch.cat([images, generated]), torch.cat([labels, labels]))
        real, fake = scores.float().chunk(2)
        return relu(1 - real).mean() + relu(1 + fake).mean()

    def generator_loss(self, batch: Batch) -> torch.Tensor:
        """Return minus the score of generated images plus orthogonal regularisation; the discriminator is constant."""
        labels = batch["label"]
        with _frozen(self.discriminator):
            scores = self.discriminator(self.generator(self.draw(labels), labels), labels)
        loss: torch.Tensor = -scores.float().mean() + self.orthogonal * self._overlap()
        return loss

    def draw(self, labels: torch.Tensor) -> torch.Tensor:
        """Draw latent vectors [batch, latent_size], one for each label."""
        return torch.randn(len(labels), self.generator.latent_size, device=labels.device)

    def after_sync(self, num_steps: int) -> None:
        """Add the anchors to the averaged generator."""
        self.average.follow(self.generator, num_steps)

    @torch.no_grad()
    def averaged_generator(self, labels: torch.Tensor) -> Generator:
        """Return the generator with averaged weights, in evaluation mode, to be called with latent vectors and labels.

        Its statistics are standing ones (the paper's section 4.1): of passes over images of these classes, [batch]
        int64, which bring the singular vectors of spectral norm to the averaged weights, too.
        """
        generator = copy.deepcopy(self.generator).train()
        self.average.copy_to(generator)
        for module in generator.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None  # the plain mean of all passes
        for _ in range(_NUM_PASSES):
            generator(self.draw(labels), labels)
        return generator.eval()

    @torch.no_grad()
    def measure(self, batches: list[Batch]) -> dict[str, tuple[float, float]]:
        """Measure images of the averaged generator, as many as there are real ones and of the same classes.

        Returns:
            frechet_distance: see `isthmus.models.frechet`; of all images together.
            class_agreement: share of them whose nearest real image is of the class that was asked for.
        """
        generator = self.averaged_generator(batches[0]["label"])
        labels = torch.cat([batch["label"] for batch in batches]).cpu().numpy()
        real = random_features(torch.cat([batch["image"] for batch in batches]))
        generated = random_features(torch.cat([generator(self.draw(b["label"]), b["label"]) for b in batches]))
        return {
            "frechet_distance": (frechet_distance(real, generated), 1),
            "class_agreement": (class_agreement(real, labels, generated, labels), 1),
        }

    def _overlap(self) -> torch.Tensor:
        """Return how far the generator's filters are from orthogonal: R of section 3.1, classes left out."""
        total = torch.zeros((), device=self.average.seen.device)
        for name, param in self.generator.named_parameters():
            if param.ndim > 1 and not name.startswith("classes."):
                filters = param.flatten(1)
                products = filters @ filters.mT
                total = total + (products - products.diag().diag()).square().sum()
        return total


class MovingAverage(nn.Module):
    """The exponentially weighted mean of what a module's parameters were after every sync.

    A sync n steps ago weighs decay ** n, over the sum of all weights: what came first, which is noise, is soon
    forgotten (Adam's bias correction, arXiv 1412.6980, section 3). Every worker computes it from the anchors, which are
    equal, and one that joins is handed it.

    Args:
        module: whose parameters are followed; the mean starts at their present values, which do not count.
        decay: of the weights, a step.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.names = {name: name.replace(".", "/") for name, _ in module.named_parameters()}  # a buffer's has no dots
        for name, param in module.named_parameters():
            self.register_buffer(self.names[name], param.detach().clone())
        self.seen: torch.Tensor  # 1 - decay ** steps: the sum of all weights
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.buffer_rules = dict.fromkeys([*self.names.values(), "seen"], "replicated")

    @torch.no_grad()
    def follow(self, module: nn.Module, num_steps: int) -> None:
        """Add the module's present parameters to the mean, `num_steps` after the last ones."""
        kept = self.decay**num_steps
        self.seen.copy_(1 - (1 - self.seen) * kept)
        params = dict(module.named_parameters())
        averages = [getattr(self, buffer) for buffer in self.names.values()]
        # three operations, each rounded for itself, so that unlike machines get the same bits
        change = torch._foreach_sub([params[name].detach() for name in self.names], averages)
        torch._foreach_mul_(change, (1 - kept) / self.seen.item())
        torch._foreach_add_(averages, change)

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Copy the mean into the parameters of a module of the same kind."""
        params = dict(module.named_parameters())
        for name, buffer in self.names.items():
            params[name].copy_(getattr(self, buffer))


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """Let a module's parameters get no gradient from what is computed with it within the context."""
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)
