"""What exalsius' chart `diloco-training` tells its workers (`DILOCO_*`), as a run of isthmus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from isthmus.core import UserError
from isthmus.spec import sentence

PREFIX = "DILOCO_"
_TOKENIZER = "EleutherAI/gpt-neo-1.3B"  # of their text, whatever the model
_LANGUAGE = {"sequence_length": 1024, "num_heads": 16, "num_layers": 3}
_IMAGES = {"type": "resnet", "image_size": 224, "num_channels": 3, "num_classes": 1000}
_MODELS: dict[str, dict[str, Any]] = {  # as they build them; inner sizes are isthmus' own, four times the hidden size
    "gpt-neo": {"type": "gpt_neo", "hidden_size": 512, "vocab_size": 50257, **_LANGUAGE},
    "gpt-neo-tiny": {
        "type": "gpt_neo",
        "hidden_size": 8,
        "num_layers": 2,
        "num_heads": 1,
        "vocab_size": 50257,
        "sequence_length": 512,
    },
    "gpt-neo-x": {"type": "gpt_neox", "hidden_size": 896, "vocab_size": 50432, **_LANGUAGE},
    "resnet50": {**_IMAGES, "depth": 50},
    "resnet101": {**_IMAGES, "depth": 101},
    "wav2vec2": {  # base; recordings of more than 16 seconds are left out
        "type": "wav2vec2_ctc",
        "num_samples": 256_000,
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "conv_size": 512,
        "position_kernel": 128,
    },
}
_DATA_TYPES = {"gpt_neo": "text", "gpt_neox": "text", "resnet": "images", "wav2vec2_ctc": "speech"}
_DATASETS: dict[str, dict[str, Any]] = {  # any other is a source of its own: a folder, or a name on the Hub
    "c4": {"source": "c4", "streaming": True},
    "c4_prime": {"source": "PrimeIntellect/c4-tiny", "config": "en"},
    "imagenet": {"source": "imagenet-1k"},
    "librispeech": {"source": "librispeech"},
}
_TILE = 64 * 64  # values of which the largest cosine coefficients are kept, theirs and ours
_NOT_HERE = ("gcn", "biggan", "ogbn_arxiv", "tencent_ml", "test_squence_dataset")  # of theirs: graphs, noise as images
_WITHOUT_MEANING = {  # what isthmus does instead
    "WANDB_GROUP": "the group is called after the run's folder",
    "WANDB_RUN_ID": "each worker keeps an identity of its own",
    "MIN_BATCH_SIZE": "each worker finds the fastest micro-batch",
    "MAX_BATCH_SIZE": "each worker finds the fastest micro-batch",
    "GROUP_PERC_VARIANCE": "workers wait for one another at syncs",
    "COMPILE_BACKEND": "torch chooses",
    "COMPILE_MODE": "torch chooses",
    "GPU_TYPE": "torch finds the GPUs",
    "PGROUP_BACKEND": "workers are connected by a link of their own",
}


class _Values(BaseModel):
    """The values that have a meaning here, with the defaults of their trainer."""

    model: str = "gpt-neo-x"
    dataset: str = "c4"
    local_steps: PositiveInt = 500
    lr: PositiveFloat = 1e-4
    outer_lr: PositiveFloat = 1e-3
    warmup_steps: NonNegativeInt = 50
    total_steps: PositiveInt = 88_000
    per_device_train_batch_size: PositiveInt = 32
    batch_size: PositiveInt = 512
    optim_method: Literal["sgd", "demo", "ddp"] = "sgd"
    quantization: bool = False
    async_communication: bool = False
    checkpoint_path: str = "checkpoint.pth"
    checkpoint_interval: PositiveInt = 512
    hf_upload: bool = False
    trained_model_hf_name: str | None = None
    device: Literal["cuda", "rocm", "cpu"] = "cuda"
    dataset_cache_dir: str | None = None
    model_cache_dir: str | None = None
    wandb_project_name: str = "diloco_training"
    wandb_logging: bool = True
    heterogeneous: bool = False
    compression_decay: float = Field(default=0.9, ge=0, lt=1)
    compression_topk: PositiveInt = 32
    experiment_description: str | None = None
    experiment_tags: str | None = None
    seed: NonNegativeInt = 42
    compile_model: bool = False


@dataclass(frozen=True)
class Workspace:
    """A workspace of exalsius as isthmus understands it.

    Attributes:
        run: a run's configuration.
        environment: what the libraries find in the environment under other names.
        device: "cpu", or "cuda", which AMD's GPUs are called, too.
        upload_to: the repository on the Hub for the trained model, if any.
        left_out: variables without a meaning here, and what isthmus does instead.
    """

    run: dict[str, Any]
    environment: dict[str, str]
    device: str
    upload_to: str | None
    left_out: dict[str, str]


def read_workspace(environ: Mapping[str, str]) -> Workspace:
    """Return what the environment of a worker says; variables that are empty count as not set.

    Raises:
        UserError: a value makes no sense, or isthmus has nothing like it; one line that names the variable.
    """
    given = {name.removeprefix(PREFIX): text for name, text in environ.items() if name.startswith(PREFIX) and text}
    try:
        values = _Values.model_validate({name.lower(): text for name, text in given.items()})
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(sentence(f"{PREFIX}{str(first['loc'][0]).upper()}", first)) from None
    left_out = {
        PREFIX + name: _WITHOUT_MEANING.get(name, "isthmus does not know it")
        for name in sorted(given)
        if name.lower() not in _Values.model_fields
    }
    tokens = {name: environ.get(name, "") for name in ("WANDB_USER_KEY", "HUGGINGFACE_TOKEN")}
    tokens = {
        name: text for name, text in tokens.items() if text.upper().strip("X") not in ("", "HF_")
    }  # their samples
    run = {
        "model": _model(values),
        "data": _data(values),
        "inner": _inner(values),
        "outer": _outer(values),
        "train": _train(values),
    }
    if values.wandb_logging and "WANDB_USER_KEY" in tokens:
        run["track"] = {"wandb": values.wandb_project_name}
    device = "cpu" if values.device == "cpu" else "cuda"
    return Workspace(run, _environment(values, tokens), device, _upload_to(values, tokens), left_out)


def _model(values: _Values) -> dict[str, Any]:
    if values.model not in _MODELS:
        found = f"{PREFIX}MODEL is {values.model}, which isthmus does not train in a workspace of exalsius"
        raise UserError(f"{found}: choose one of {', '.join(_MODELS)}")
    return _MODELS[values.model]


def _data(values: _Values) -> dict[str, Any]:
    if values.dataset in _NOT_HERE:
        found = f"{PREFIX}DATASET is {values.dataset}, which isthmus does not read"
        raise UserError(f"{found}: choose {', '.join(_DATASETS)}, a folder, or a name on the Hub")
    kind = _DATA_TYPES[_model(values)["type"]]
    tokenizer = {"tokenizer": _TOKENIZER} if kind == "text" else {}
    return {"type": kind, **_DATASETS.get(values.dataset, {"source": values.dataset}), **tokenizer}


def _inner(values: _Values) -> dict[str, Any]:
    """Return the inner section; their batch size is that of one worker, whatever it is called."""
    micro_batch_size = min(values.per_device_train_batch_size, values.batch_size)
    warmup_fraction = min(1.0, values.warmup_steps / values.total_steps)
    return {
        "optimizer": {"type": "adamw", "lr": values.lr, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "lr_schedule": {"type": "cosine", "warmup_fraction": warmup_fraction, "final_fraction": 0.0},
        "batch_size": values.batch_size,
        "micro_batch_size": "auto" if values.heterogeneous else micro_batch_size,
        "precision": "float32" if values.device == "cpu" else "bfloat16",
        "compile": values.compile_model,
    }


def _outer(values: _Values) -> dict[str, Any]:
    transport = {"type": "torch_dist", "sync_budget_seconds": 600.0}  # they bear slow links, and give NCCL half an hour
    if values.optim_method == "ddp":
        return {"recipe": "ddp", "transport": transport}
    outer: dict[str, Any] = {
        "recipe": "diloco",
        "transport": transport,
        "schedule": {"local_steps": values.local_steps, "warm_start_steps": 0},
        "optimizer": {"type": "sgd", "lr": values.outer_lr, "momentum": 0.9, "nesterov": True},
    }
    if values.optim_method == "demo":
        keep = min(values.compression_topk, _TILE)
        codec = {"codec": {"keep": keep, "values": {"block": keep}}}
        return outer | {
            "recipe": "dct_momentum",
            "compressor": {"decay": values.compression_decay, "compressor": codec},
        }
    outer["compressor"] = {"type": "quantize", "bits": 8} if values.quantization else {"type": "cast"}
    if values.async_communication:  # syncs that come a round later bear less momentum: the recipe knows how much
        outer |= {"recipe": "eager", "optimizer": {"lr": values.outer_lr}}
    return outer


def _train(values: _Values) -> dict[str, Any]:
    """Return the train section; their interval counts syncs, and steps where every step is one."""
    every = values.checkpoint_interval * (1 if values.optim_method == "ddp" else values.local_steps)
    return {
        "steps": values.total_steps,
        "eval_every": every,
        "checkpoint_every": every,
        "seed": values.seed,
        "run_dir": values.checkpoint_path.removesuffix(".pth"),
    }


def _environment(values: _Values, tokens: Mapping[str, str]) -> dict[str, str]:
    """Return what is said under other names: their keys, caches, and what only Weights & Biases is told."""
    tags = (values.experiment_tags or "").strip("[] ").split(",")
    named = {
        "WANDB_API_KEY": tokens.get("WANDB_USER_KEY"),
        "HF_TOKEN": tokens.get("HUGGINGFACE_TOKEN"),
        "HF_HUB_CACHE": values.model_cache_dir,
        "HF_DATASETS_CACHE": values.dataset_cache_dir,
        "WANDB_NOTES": values.experiment_description,
        "WANDB_TAGS": ",".join(tag.strip(" \"'") for tag in tags),
    }
    return {name: text for name, text in named.items() if text}


def _upload_to(values: _Values, tokens: Mapping[str, str]) -> str | None:
    """Return where the model is uploaded; refuse before the training what would fail after it."""
    if not values.hf_upload:
        return None
    if values.trained_model_hf_name is None:
        raise UserError(f"{PREFIX}HF_UPLOAD needs a name for the model: set {PREFIX}TRAINED_MODEL_HF_NAME")
    if "HUGGINGFACE_TOKEN" not in tokens:
        raise UserError(
            f"{PREFIX}HF_UPLOAD needs a token of the Hugging Face Hub that may write: set HUGGINGFACE_TOKEN"
        )
    return values.trained_model_hf_name
