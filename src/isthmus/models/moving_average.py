"""A moving average of a module's parameters, which all workers compute alike without sending a byte."""

from __future__ import annotations

import torch
from torch import nn


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
