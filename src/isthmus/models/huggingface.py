"""Any causal language model of transformers that a local folder describes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from isthmus.core.types import UserError, first_line
from isthmus.models.base import seeded
from isthmus.models.causal_lm import CausalLM


@dataclass(frozen=True)
class HuggingFace:
    """The model that the `config.json` of a folder describes; nothing is downloaded, no code of the folder is run."""

    libraries: ClassVar = ("transformers.models.auto.modeling_auto",)

    path: str
    sequence_length: int = 128
    pretrained: bool = False  # load the folder's weights instead of drawing them from the seed

    def __post_init__(self) -> None:
        if not (Path(self.path) / "config.json").is_file():
            raise UserError(f"model.path: there is no config.json in {self.path!r}; give a folder with one")

    def build(self, seed: int = 0) -> nn.Module:
        """Make the model with float32 weights, drawn from `seed` or loaded."""
        from transformers import AutoModelForCausalLM  # takes seconds to import

        make: Any = AutoModelForCausalLM

        config = self._config()
        with seeded(seed):
            try:
                if self.pretrained:
                    network = make.from_pretrained(self.path, config=config, dtype=torch.float32, local_files_only=True)
                else:
                    network = make.from_config(config, dtype=torch.float32)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"model.path: the model in {self.path!r} cannot be loaded: {first_line(error)}"
                ) from error
        if config.model_type == "gpt_neo":
            from isthmus.models.gpt_neo_attention import fuse_attention

            fuse_attention(network)
        return CausalLM(network.train())

    def outline(self) -> nn.Module:
        """Make the parameters that the folder's configuration describes; weights are not read."""
        return replace(self, pretrained=False).build()

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the model knows; no such attribute where its configuration does not say."""
        size: int = self._config().get_text_config().vocab_size
        return size

    def _config(self) -> Any:
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(self.path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UserError(
                f"model.path: the config.json in {self.path!r} cannot be used: {first_line(error)}"
            ) from error
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and self.sequence_length > longest:
            raise UserError(
                f"model.sequence_length is {self.sequence_length}, and the model has {longest} positions: lower it"
            )
        config.use_cache = False
        return config
