"""The adversarial training step: two networks train each other, each with its own loss and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from typing_extensions import Unpack

from isthmus.core.types import UserError
from isthmus.inner.optimizers import AdamW, CombinedOptimizer
from isthmus.inner.step import Batch, Metrics
from isthmus.inner.supervised import StepOptions, SupervisedStep


class InnerOptimizer(Protocol):
    """The description of an optimizer, such as `AdamW`."""

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer of all trainable parameters."""
        ...


@dataclass(frozen=True)
class Adversarial:
    """The descriptions of an optimizer for each of two networks that train each other.

    The defaults are Adam (AdamW without decay) with BigGAN's betas and learning rates for 128 pixels (arXiv 1809.11096,
    appendix C).
    """

    generator: InnerOptimizer = AdamW(5e-5, (0.0, 0.999), weight_decay=0.0)  # noqa: RUF009 (a frozen value)
    discriminator: InnerOptimizer = AdamW(2e-4, (0.0, 0.999), weight_decay=0.0)  # noqa: RUF009 (a frozen value)
    discriminator_steps: int = 2  # for each step of the generator

    def __post_init__(self) -> None:
        if self.discriminator_steps < 1:
            raise UserError(f"inner.optimizer.discriminator_steps is {self.discriminator_steps}; choose at least 1")

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model, or its outline, that is not two networks."""
        if not is_adversarial(model):
            raise UserError(
                "inner.optimizer: adversarial trains two networks (biggan), and this model is one: use adamw"
            )

    def build(self, model: nn.Module) -> CombinedOptimizer:
        """Make one optimizer of those of the model's `discriminator` and `generator`, in this order."""
        self.check_model(model)
        networks: Any = model
        return CombinedOptimizer(
            self.discriminator.build(networks.discriminator), self.generator.build(networks.generator)
        )


def is_adversarial(model: nn.Module) -> bool:
    """Tell whether a model has a `generator` and a `discriminator`, each with its loss (`generator_loss(batch)`)."""
    return hasattr(model, "generator_loss") and hasattr(model, "discriminator_loss")


class NetworkWithLoss(nn.Module):
    """One of two networks together with its mean loss, in which other parameters are constants."""

    def __init__(self, network: nn.Module, loss: Callable[[Batch], torch.Tensor]) -> None:
        super().__init__()
        self.network, self._loss = network, loss

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the network's mean loss."""
        return self._loss(batch)


class AdversarialStep:
    """Trains on one batch a call: some steps of the discriminator, then one of the generator.

    A batch is shared out among the discriminator's steps; the generator's takes the last share. Each network has a
    `SupervisedStep` of its own, by which it clips, accumulates, rounds, and skips what is not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: CombinedOptimizer,
        lr_schedule: Callable[[int], float] = lambda step: 1.0,
        *,
        discriminator_steps: int = 2,
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
        **options: Unpack[StepOptions],
    ) -> None:
        """Wrap both networks and their optimizers.

        Args:
            model: see `is_adversarial`.
            optimizer: as `Adversarial.build` makes it; holds the peak learning rates.
            lr_schedule: factor of the learning rates at a step of the whole run.
            discriminator_steps: for each step of the generator.
            wrap: puts what averages gradients between workers around a network with its loss.
            options: of each network's `SupervisedStep`.
        """
        self.model, self.optimizer, self.discriminator_steps = model, optimizer, discriminator_steps
        self.progress = 0  # step of the whole run that comes next
        networks: Any = model
        with_losses = [
            NetworkWithLoss(networks.discriminator, networks.discriminator_loss),
            NetworkWithLoss(networks.generator, networks.generator_loss),
        ]
        self.discriminator, self.generator = (
            SupervisedStep(wrap(network), part, lr_schedule, **options)
            for network, part in zip(with_losses, optimizer.parts, strict=True)
        )

    @property
    def micro_batch_size(self) -> int | None:
        """The number of samples per forward pass."""
        return self.generator.micro_batch_size

    @micro_batch_size.setter
    def micro_batch_size(self, size: int | None) -> None:
        self.discriminator.micro_batch_size = self.generator.micro_batch_size = size

    @property
    def skipped_steps(self) -> int:
        """The number of steps of both networks that were skipped for a gradient that is not finite."""
        return self.discriminator.skipped_steps + self.generator.skipped_steps

    def __call__(self, batch: Batch) -> Metrics:
        """Train on one batch.

        Returns:
            loss (the discriminator's, over its steps), generator_loss, grad_norm (of both networks in their last steps,
            before clipping), lr (of the discriminator), skipped (1 where any of the steps was skipped, else 0).
        """
        num_samples, num_steps = len(next(iter(batch.values()))), self.discriminator_steps
        if num_samples < num_steps:
            raise UserError(
                f"inner.batch_size is {num_samples}, fewer samples than the {num_steps} discriminator_steps: raise it"
            )
        parts = {name: tensor.tensor_split(num_steps) for name, tensor in batch.items()}
        shares = [{name: part[i] for name, part in parts.items()} for i in range(num_steps)]
        steps = [*([self.discriminator] * num_steps), self.generator]
        done = []
        for step, share in zip(steps, [*shares, shares[-1]], strict=True):
            step.set_progress(self.progress)
            done.append(step(share))
        self.progress += 1
        *_, discriminator, generator = done
        return {
            "loss": sum(each["loss"] for each in done[:-1]) / num_steps,
            "generator_loss": generator["loss"],
            "grad_norm": (discriminator["grad_norm"] ** 2 + generator["grad_norm"] ** 2) ** 0.5,
            "lr": discriminator["lr"],
            "skipped": max(each["skipped"] for each in done),
        }

    def set_progress(self, step: int) -> None:
        """Say which step of the whole run comes next; without it every call counts as one."""
        self.progress = step

    def state_dict(self) -> dict[str, Any]:
        """Return optimizers, loss scales and counters; tensors are live, not copies."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "discriminator": self.discriminator.counters(),
            "generator": self.generator.counters(),
            "progress": self.progress,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state; peak learning rates stay those of this object's optimizers."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.discriminator.load_counters(state_dict["discriminator"])
        self.generator.load_counters(state_dict["generator"])
        self.progress = state_dict["progress"]

    def forward_backward(self, part: Batch) -> None:
        """Run a forward and backward pass of both networks, to measure it; the gradients it leaves are of no use."""
        self.discriminator.forward_backward(part)
        self.generator.forward_backward(part)
