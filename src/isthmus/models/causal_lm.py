"""A causal language model of transformers, trained to predict the next token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from typing_extensions import override

from isthmus.core.fragment import block_list, is_dtensor
from isthmus.inner.step import Batch
from isthmus.models import cross_entropy


class CausalLM(nn.Module):
    """A network from tokens to logits, trained to predict the next token.

    Blocks stay where the network has them: inside its `nn.ModuleList`, by which fragments and Muon find them.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network  # of transformers: (input_ids) -> output with .logits [batch, seq, vocab]
        self._ends_with_head = True  # until it shows that the network goes on to change its logits
        self._compiled_loss: cross_entropy.LossAndGradient | None = None

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy, in nats a token, of {"tokens": [batch, seq + 1] int64}."""
        tokens = batch["tokens"]
        if self._takes_chunks(tokens):
            hidden = self._hidden_states(tokens)
            if hidden is not None:
                loss = self._compiled_loss or cross_entropy.loss_and_gradient
                return cross_entropy.chunked_next_token_loss(hidden, self._head.weight, tokens, loss)
            self._ends_with_head = False
        return cross_entropy.next_token_loss(self.network(input_ids=tokens[:, :-1]).logits, tokens)

    @override
    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile every block by itself, and the loss, in place: equal blocks share what is compiled for the first.

        Hooks (FSDP2, DDP) stay between the blocks, where they overlap with computing; names and state stay.
        """
        _, blocks = block_list(self)
        for block in blocks:
            block.forward = torch.compile(block.forward, *arguments, **options)
        network: Any = self.network
        network.get_input_embeddings().register_forward_hook(_wait)
        self._compiled_loss = torch.compile(cross_entropy.loss_and_gradient, *arguments, **options)

    @property
    def _head(self) -> Any:
        network: Any = self.network
        return network.get_output_embeddings()

    def _takes_chunks(self, tokens: torch.Tensor) -> bool:
        """Whether the loss is computed in chunks: logits are many or the loss is compiled, and the head allows it."""
        head, device = self._head, tokens.device.type
        if type(head) is not nn.Linear or head.bias is not None or is_dtensor(head.weight):  # sharded by tp
            return False
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            return False  # gradients are made in the forward pass, which does not know the loss scale
        if torch.compiler.is_compiling():  # by a user, who has the whole model compiled
            return False
        too_many = tokens[:, 1:].numel() * len(head.weight) > cross_entropy.CHUNK_ELEMENTS
        is_compiled = self._compiled_loss is not None and self.training  # evaluations give the same bits everywhere
        return self._ends_with_head and (too_many or is_compiled)

    def _hidden_states(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Return what the head would be given; None if the network changes its logits, by a soft cap for instance."""
        head, given = self._head, list[tuple[torch.Tensor, int]]()

        def pass_on(hidden: torch.Tensor) -> torch.Tensor:
            given.append((hidden, hidden._version))
            return hidden

        head.forward = pass_on
        try:
            output: torch.Tensor = self.network(input_ids=tokens[:, :-1]).logits
        finally:
            del head.forward
        hidden, version = given[-1]
        return hidden if output is hidden and output._version == version else None


def _wait(embedding: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
    """Make a plain tensor of what tp's sum still waits for, whose gradient a compiled block would return unsharded."""
    return output if type(output) is torch.Tensor else output.clone()
