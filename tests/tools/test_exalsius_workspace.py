"""Every variable that exalsius' chart gives its trainer, as the run of isthmus that it becomes."""

import re
from pathlib import Path

import pytest
import yaml

from isthmus.config import flat
from isthmus.core import UserError
from isthmus.recipes import load_config
from isthmus.tools.exalsius import read_workspace

ROOT = Path(__file__).parents[2]

# fields of their TrainingConfig, which are the variables of their chart's ConfigMap, and pgroupBackend's
THEIRS = """
    ASYNC_COMMUNICATION BATCH_SIZE CHECKPOINT_INTERVAL CHECKPOINT_PATH COMPILE_BACKEND COMPILE_MODE COMPILE_MODEL
    COMPRESSION_DECAY COMPRESSION_TOPK DATASET DATASET_CACHE_DIR DEVICE EXPERIMENT_DESCRIPTION EXPERIMENT_TAGS GPU_TYPE
    GROUP_PERC_VARIANCE HETEROGENEOUS HF_UPLOAD LOCAL_STEPS LR MAX_BATCH_SIZE MIN_BATCH_SIZE MODEL MODEL_CACHE_DIR
    OPTIM_METHOD OUTER_LR PER_DEVICE_TRAIN_BATCH_SIZE PGROUP_BACKEND QUANTIZATION SEED TOTAL_STEPS TRAINED_MODEL_HF_NAME
    WANDB_GROUP WANDB_LOGGING WANDB_PROJECT_NAME WANDB_RUN_ID WARMUP_STEPS
"""
WITHOUT_MEANING = """
    COMPILE_BACKEND COMPILE_MODE GPU_TYPE GROUP_PERC_VARIANCE MAX_BATCH_SIZE MIN_BATCH_SIZE PGROUP_BACKEND WANDB_GROUP
    WANDB_RUN_ID
"""

RUNS = [  # variables, what they become
    ("MODEL=gpt-neo", {"model.type": "gpt_neo", "model.hidden_size": 512, "data.type": "text"}),
    ("MODEL=gpt-neo-tiny", {"model.type": "gpt_neo", "model.hidden_size": 8}),
    (
        "MODEL=gpt-neo-x",
        {"model.type": "gpt_neox", "model.hidden_size": 896, "data.tokenizer": "EleutherAI/gpt-neo-1.3B"},
    ),
    ("MODEL=resnet50 DATASET=imagenet", {"model.depth": 50, "data.type": "images", "data.source": "imagenet-1k"}),
    ("MODEL=resnet101 DATASET=imagenet", {"model.depth": 101, "model.num_classes": 1000}),
    ("MODEL=wav2vec2 DATASET=librispeech", {"model.type": "wav2vec2_ctc", "data.type": "speech"}),
    ("DATASET=c4", {"data.source": "c4", "data.streaming": True}),
    ("DATASET=c4_prime", {"data.source": "PrimeIntellect/c4-tiny", "data.config": "en"}),
    ("DATASET=me/mine", {"data.source": "me/mine", "data.streaming": False}),
    ("LR=8e-4", {"inner.optimizer.type": "adamw", "inner.optimizer.lr": 8e-4, "inner.optimizer.weight_decay": 0.1}),
    ("TOTAL_STEPS=200 WARMUP_STEPS=50", {"train.steps": 200, "inner.lr_schedule.warmup_fraction": 0.25}),
    ("TOTAL_STEPS=20 WARMUP_STEPS=500", {"inner.lr_schedule.warmup_fraction": 1.0}),
    ("BATCH_SIZE=64", {"inner.batch_size": 64, "inner.micro_batch_size": 32}),
    ("BATCH_SIZE=64 PER_DEVICE_TRAIN_BATCH_SIZE=16", {"inner.micro_batch_size": 16}),
    ("BATCH_SIZE=8 PER_DEVICE_TRAIN_BATCH_SIZE=16", {"inner.micro_batch_size": 8}),
    ("HETEROGENEOUS=true", {"inner.micro_batch_size": "auto"}),
    ("DEVICE=cuda", {"inner.precision": "bfloat16"}),
    ("DEVICE=cpu", {"inner.precision": "float32"}),
    ("COMPILE_MODEL=true", {"inner.compile": True}),
    ("LOCAL_STEPS=20", {"outer.schedule.local_steps": 20, "outer.schedule.warm_start_steps": 0}),
    ("OUTER_LR=0.7", {"outer.optimizer.lr": 0.7, "outer.optimizer.momentum": 0.9, "outer.optimizer.nesterov": True}),
    ("OPTIM_METHOD=sgd", {"outer.recipe": "diloco", "outer.compressor.type": "cast"}),
    ("OPTIM_METHOD=demo", {"outer.recipe": "dct_momentum", "inner.optimizer.type": "adamw"}),
    ("OPTIM_METHOD=demo COMPRESSION_DECAY=0.95", {"outer.compressor.decay": 0.95}),
    ("OPTIM_METHOD=demo COMPRESSION_TOPK=16", {"outer.compressor.compressor.codec.keep": 16}),
    ("OPTIM_METHOD=ddp", {"outer.recipe": "ddp", "outer.schedule": None, "train.checkpoint_every": 512}),
    ("QUANTIZATION=true", {"outer.compressor.type": "quantize", "outer.compressor.bits": 8}),
    ("QUANTIZATION=false", {"outer.compressor.type": "cast"}),
    ("ASYNC_COMMUNICATION=true LOCAL_STEPS=20", {"outer.recipe": "eager", "outer.schedule.overlap_steps": 20}),
    ("CHECKPOINT_PATH=/data/mine.pth", {"train.run_dir": "/data/mine"}),
    ("CHECKPOINT_INTERVAL=5 LOCAL_STEPS=20", {"train.checkpoint_every": 100, "train.eval_every": 100}),
    ("SEED=7", {"train.seed": 7}),
]


def workspace(variables="", **environment):
    given = dict(each.split("=", 1) for each in variables.split())
    return read_workspace({f"DILOCO_{name}": text for name, text in given.items()} | environment)


def settings(run, tmp_path):
    """Return a run's whole configuration, flat, read as `isthmus train` reads it."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return flat(load_config(tmp_path / "run.yaml", workers=2).model_dump())


@pytest.mark.parametrize(("variables", "expected"), RUNS, ids=[variables for variables, _ in RUNS])
def test_a_variable_becomes_settings(variables, expected, tmp_path):
    found = settings(workspace(variables).run, tmp_path)
    assert {key: found[key] for key in expected} == expected


def test_each_of_their_variables_is_understood_or_has_a_reason():
    told = {f"DILOCO_{name}": "1" for name in WITHOUT_MEANING.split()}
    left_out = read_workspace(told | {"DILOCO_NOBODY": "1"}).left_out
    assert left_out.pop("DILOCO_NOBODY") == "isthmus does not know it"
    assert left_out.keys() == told.keys()
    assert "isthmus does not know it" not in left_out.values()
    tested = {each.split("=")[0] for variables, _ in RUNS for each in variables.split()}
    tested |= {"WANDB_PROJECT_NAME", "WANDB_LOGGING", "EXPERIMENT_DESCRIPTION", "EXPERIMENT_TAGS", "MODEL_CACHE_DIR"}
    tested |= {"DATASET_CACHE_DIR", "HF_UPLOAD", "TRAINED_MODEL_HF_NAME"}  # below
    assert sorted(tested | set(WITHOUT_MEANING.split())) == THEIRS.split()


@pytest.mark.parametrize(
    ("level", "variables", "recipe", "local_steps"),
    [
        ("no", "LOCAL_STEPS=1 OPTIM_METHOD=sgd COMPRESSION_DECAY=0.9", "diloco", 1),
        ("weak", "LOCAL_STEPS=20 OPTIM_METHOD=sgd COMPRESSION_DECAY=0.9", "diloco", 20),
        ("medium", "LOCAL_STEPS=50 OPTIM_METHOD=sgd COMPRESSION_DECAY=0.9", "diloco", 50),
        ("strong", "LOCAL_STEPS=100 OPTIM_METHOD=sgd COMPRESSION_DECAY=0.9", "diloco", 100),
        ("ultra", "LOCAL_STEPS=100 OPTIM_METHOD=demo COMPRESSION_DECAY=0.999", "dct_momentum", 100),
    ],
)
def test_a_gradient_compression_of_their_command_line_is_a_recipe(level, variables, recipe, local_steps, tmp_path):
    """What `exls workspaces deploy distributed-training --gradient-compression` writes into the values."""
    found = settings(workspace(f"{variables} COMPRESSION_TOPK=32 LR=4e-4 OUTER_LR=0.7").run, tmp_path)
    assert (found["outer.recipe"], found["outer.schedule.local_steps"]) == (recipe, local_steps)


def test_keys_and_what_only_others_read_go_into_the_environment():
    told = workspace(
        "MODEL_CACHE_DIR=/data/models DATASET_CACHE_DIR=/data/sets WANDB_PROJECT_NAME=ours",
        DILOCO_EXPERIMENT_DESCRIPTION="two sites",
        DILOCO_EXPERIMENT_TAGS='["diloco", "c4"]',
        WANDB_USER_KEY="k3y",
        HUGGINGFACE_TOKEN="hf_t0ken",
    )
    assert told.environment == {
        "WANDB_API_KEY": "k3y",
        "HF_TOKEN": "hf_t0ken",
        "HF_HUB_CACHE": "/data/models",
        "HF_DATASETS_CACHE": "/data/sets",
        "WANDB_NOTES": "two sites",
        "WANDB_TAGS": "diloco,c4",
    }
    assert told.run["track"] == {"wandb": "ours"}
    assert "track" not in workspace("WANDB_LOGGING=false", WANDB_USER_KEY="k3y").run
    assert workspace("EXPERIMENT_TAGS=a,b").environment == {"WANDB_TAGS": "a,b"}


def test_the_sample_keys_of_their_values_are_none():
    told = workspace(WANDB_USER_KEY="XXXXXXXXXx", HUGGINGFACE_TOKEN="hf_XXXXXXXX", DILOCO_WANDB_RUN_ID="")
    assert (told.environment, told.left_out) == ({}, {})
    assert "track" not in told.run


def test_our_values_for_their_chart_are_a_run(tmp_path):
    values = yaml.safe_load((ROOT / "deploy/exalsius/values.yaml").read_text())
    assert values["elastic"]["minNodes"] == values["elastic"]["maxNodes"]
    keys = {"wandbUserKey", "huggingfaceToken"}  # which are no DILOCO_ variables; the chart leaves out what is false
    told = {name: str(value) for name, value in values["diloco"].items() if value and name not in keys}
    told = {"DILOCO_" + re.sub("[A-Z]", lambda found: f"_{found[0]}", name).upper(): told[name] for name in told}
    read = read_workspace(told)
    assert (read.left_out, read.upload_to) == ({}, None)
    found = settings(read.run, tmp_path)
    assert (found["train.run_dir"], found["outer.schedule.local_steps"]) == ("/data/checkpoint", 100)


def test_a_model_is_uploaded_only_where_asked():
    assert workspace("TRAINED_MODEL_HF_NAME=toy", HUGGINGFACE_TOKEN="hf_t0ken").upload_to is None
    assert workspace("HF_UPLOAD=true TRAINED_MODEL_HF_NAME=toy", HUGGINGFACE_TOKEN="hf_t0ken").upload_to == "toy"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("MODEL=gcn DATASET=ogbn_arxiv", "DILOCO_MODEL is gcn, which isthmus does not train"),
        ("MODEL=biggan", "choose one of gpt-neo, gpt-neo-tiny, gpt-neo-x, resnet50, resnet101, wav2vec2$"),
        ("DATASET=tencent_ml", "DILOCO_DATASET is tencent_ml, which isthmus does not read: choose c4, c4_prime"),
        ("LOCAL_STEPS=0", "DILOCO_LOCAL_STEPS: should be greater than 0, got '0'"),
        ("LR=fast", "DILOCO_LR: should be a valid number, unable to parse string as a number, got 'fast'"),
        ("OPTIM_METHOD=adam", "DILOCO_OPTIM_METHOD: should be 'sgd', 'demo' or 'ddp', got 'adam'"),
        ("COMPRESSION_DECAY=1", "DILOCO_COMPRESSION_DECAY: should be less than 1, got '1'"),
        ("HF_UPLOAD=true", "DILOCO_HF_UPLOAD needs a name for the model: set DILOCO_TRAINED_MODEL_HF_NAME"),
        ("HF_UPLOAD=true TRAINED_MODEL_HF_NAME=toy", "set HUGGINGFACE_TOKEN"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line_that_names_the_variable(variables, message):
    with pytest.raises(UserError, match=message):
        workspace(variables)
