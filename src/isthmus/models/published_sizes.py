"""Published sizes of GPT-Neo, Pythia and GPT-NeoX: names that stand for options of a model."""

from collections.abc import Mapping
from typing import Any

from isthmus.core import UserError, nearest

Options = dict[str, int]


def _transformer(hidden_size: int, num_layers: int, num_heads: int, vocab_size: int) -> Options:
    """Return the options of a published size; all of them were trained on 2,048 tokens at once."""
    return {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "vocab_size": vocab_size,
        "sequence_length": 2048,
    }


# Vocabularies of GPT-NeoX are as padded for the training of each size; docs/model-sizes.md names the sources.
PUBLISHED: dict[str, dict[str, Options]] = {
    "gpt_neo": {
        "gpt-neo-125m": _transformer(768, 12, 12, 50257),
        "gpt-neo-1.3b": _transformer(2048, 24, 16, 50257),
        "gpt-neo-2.7b": _transformer(2560, 32, 20, 50257),
    },
    "gpt_neox": {
        "pythia-70m": _transformer(512, 6, 8, 50304),
        "pythia-160m": _transformer(768, 12, 12, 50304),
        "pythia-410m": _transformer(1024, 24, 16, 50304),
        "pythia-1b": _transformer(2048, 16, 8, 50304),
        "pythia-1.4b": _transformer(2048, 24, 16, 50304),
        "pythia-2.8b": _transformer(2560, 32, 32, 50304),
        "pythia-6.9b": _transformer(4096, 32, 32, 50432),
        "pythia-12b": _transformer(5120, 36, 40, 50688),
        "gpt-neox-20b": _transformer(6144, 44, 64, 50432),
    },
}


def with_size(spec: Any) -> Any:
    """Replace the `size` in a model's spec, where it has one, by the options for which it stands.

    What is given beside the size stays: {type: gpt_neox, size: pythia-160m, sequence_length: 512}. A spec of another
    kind, or none, comes back as it was.

    Raises:
        UserError: there is no such size of this type.
    """
    if not isinstance(spec, Mapping) or "size" not in spec or spec.get("type") not in list(PUBLISHED):
        return spec
    sizes, size = PUBLISHED[spec["type"]], spec["size"]
    if size not in list(sizes):
        raise UserError(f"model.size: {spec['type']} has no published size {size!r}, {nearest(str(size), list(sizes))}")
    return {"type": spec["type"]} | sizes[size] | {name: value for name, value in spec.items() if name != "size"}
