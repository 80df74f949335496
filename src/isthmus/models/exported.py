"""A trained model as a folder: for transformers, where the network is theirs, else for `load_exported`."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_model, save_model
from torch import nn

from isthmus.core.imports import own_code
from isthmus.core.types import UserError, first_line
from isthmus.models.base import MODELS, Module
from isthmus.version import __version__


def save_exported(model: nn.Module, spec: dict[str, Any], folder: Path) -> nn.Module | None:
    """Write `model.safetensors` and `config.json` of a model, which its complete spec builds, into a folder.

    Returns:
        The network of transformers that was written, which its own class loads; None where `load_exported` does.
    """
    network: Any = getattr(model, "network", None)
    is_own = getattr(model, "is_transformers_own", True)
    is_all = all(name.startswith("network.") for name, _ in model.named_parameters())
    if is_own and is_all and network is not None and hasattr(network, "save_pretrained"):
        if hasattr(network.config, "use_cache"):
            network.config.use_cache = True  # whoever loads it does not train
        network.save_pretrained(folder)
        return cast(nn.Module, network)
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"isthmus": __version__, "model": spec}, indent=2) + "\n")
    return None


def load_exported(folder: str | Path, trust_imports: bool = False) -> nn.Module:
    """Load a model that `isthmus export` wrote and transformers does not know, in evaluation mode, on the CPU.

    Args:
        folder: with `config.json` and `model.safetensors`.
        trust_imports: also where `config.json` names the model's code by its import path; what is named is called.

    Raises:
        UserError: the folder holds no such model.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        if "isthmus" not in config:
            raise UserError(f"{folder} holds a model of transformers: load it with {config['architectures'][0]}")
        kind, arguments = config["model"]["type"], {k: v for k, v in config["model"].items() if k != "type"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} holds no exported model: config.json cannot be read ({error})") from error
    component = MODELS.get(kind) if kind in MODELS.names() else None
    if component in (None, Module) and not trust_imports:
        path = arguments.get("path", kind)
        raise UserError(f"{folder} names code, {path!r}: if you trust it, load with trust_imports=True")
    with own_code() if trust_imports else nullcontext():
        model: nn.Module = (component or MODELS.get(kind))(**arguments).build()
    try:
        load_model(model, str(folder / "model.safetensors"))
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{folder} holds no exported model: model.safetensors does not fit ({first_line(error)})"
        ) from error
    return model.eval()
