"""The schema: specs become components and back, every mistake becomes one line."""

from dataclasses import dataclass

import pytest
import torch
import yaml

from isthmus.compress import COMPRESSORS, Cast
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.lowrank import LowRank
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK
from isthmus.config import DEFAULTS, OUTER_OPTIMIZERS, dump, flat, parse
from isthmus.core import Registry, UserError
from isthmus.outer import Rollback
from isthmus.recipes import RECIPES, load_config
from isthmus.spec import build, complete, convert, describe, factory

WRONG = "tests.recipes.wrong_parts"


@dataclass(frozen=True)
class Colour:
    """A component of the tests."""

    name: str
    shade: float = 0.5
    mix: tuple[int, int] = (1, 2)
    notes: dict[str, str] | None = None


COLOURS = Registry("colour", {"colour": f"{__name__}:Colour"})


@pytest.mark.parametrize(
    "value",
    [
        Cast("float16"),
        ErrorFeedback(TopK(keep=32, values=Quantize(bits=4, block=32)), decay=0.9),
        LowRank(rank=3, factors=ErrorFeedback(Quantize(bits=4))),
    ],
)
def test_describe_is_the_inverse_of_build(value):
    spec = describe(COMPRESSORS, value)
    assert spec["type"] in COMPRESSORS.names()
    assert build(COMPRESSORS, spec) == value


def test_build_converts_and_fills_defaults():
    assert build(COLOURS, {"type": "colour", "name": "red", "shade": "1e-3", "mix": [3, 4]}) == Colour(
        "red", 0.001, (3, 4)
    )


def test_components_may_be_named_by_import_path():
    assert build(COMPRESSORS, {"type": "isthmus.compress.cast:Cast", "format": "float16"}) == Cast("float16")


def test_check_completes_a_spec_with_every_argument():
    assert complete(COMPRESSORS, {"type": "error_feedback", "compressor": {"type": "quantize", "bits": 4}}, "x") == {
        "type": "error_feedback",
        "compressor": {"type": "quantize", "bits": 4, "block": 128, "rounding": "nearest", "scale_bits": 16},
        "decay": 1.0,
    }


def test_factory_leaves_the_given_argument_open():
    make = factory(OUTER_OPTIMIZERS, {"type": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}, "params")
    optimizer = make([torch.nn.Parameter(torch.zeros(2))])
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.defaults["nesterov"]
    assert optimizer.defaults["lr"] == 0.7


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"type": "colour", "name": "red", "shad": 1}, "x.shad: unknown key, did you mean 'shade'?"),
        ({"type": "colour", "name": "red", "shade": "dark"}, "x.shade: should be a valid number"),
        ({"type": "colour"}, "x.name is missing: it has no default"),
        ({"type": "color", "name": "red"}, "unknown colour 'color': did you mean 'colour'?"),
        ({"name": "red"}, "x: expected {type: name, ...} with one of colour, got {'name': 'red'}"),
        ("red", "x: expected {type: name, ...} with one of colour, got 'red'"),
    ],
)
def test_a_wrong_spec_is_one_line_that_names_the_key(spec, message):
    with pytest.raises(UserError) as caught:
        complete(COLOURS, spec, "x")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mapping_with_a_type_in_a_plain_mapping_stays_plain():
    spec = {"type": "colour", "name": "red", "notes": {"type": "warm"}}
    assert complete(COLOURS, {**spec, "notes": {"a": "b"}}, "x")["notes"] == {"a": "b"}


def test_a_compressor_where_a_compressor_belongs():
    with pytest.raises(UserError, match=r"x.compressor: expected \{type: name, ...\}, got 3"):
        complete(COMPRESSORS, {"type": "error_feedback", "compressor": 3}, "x")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inner.batchsize=3", "inner.batchsize: unknown key, did you mean 'batch_size'?"),
        ("outr.recipe=ddp", "outr: unknown key, did you mean 'outer'?"),
        ("outer.compressor.bits=4", "outer.compressor.bits: unknown key, known: format"),
        ("train.steps=many", "train.steps: should be a valid integer"),
        ("train.steps=0", "train.steps: should be greater than 0, got 0"),
        (
            "inner.micro_batch_size=0",
            "inner.micro_batch_size: should be a number, at least 1, or auto, got 0",
        ),
        (
            "inner.micro_batch_size=fast",
            "inner.micro_batch_size: should be a number, at least 1, or auto, got 'fast'",
        ),
        ("inner.precision=int8", "inner.precision: should be 'float32', 'bfloat16' or 'float16', got 'int8'"),
        ("outer.schedule={local_steps: 5, overlap_steps: 6}", "overlap_steps 6 is more than local_steps 5"),
        ("outer.schedule={local_steps: 5, num_fragments: 3}", "local_steps 5 is not divisible by num_fragments 3"),
        ("outer.schedule=often", "outer.schedule: expected {local_steps: ..., ...}, got 'often'"),
        ("outer.guard.max_norm_factor=1", "guard: max_norm_factor 1.0 must be above 1, or null for no norm check"),
        ("outer.guard.factor=5", "outer.guard.factor: unknown key, known: max_norm_factor"),
        ("outer.aggregation=medain", "unknown aggregation 'medain': did you mean 'median'?"),
        ("outer.aggregation={type: trimmed_mean, trim: -2}", "trimmed_mean: trim -2 must not be negative"),
        ("outer.rollback.max_loss_factor=1", "rollback: max_loss_factor 1.0 must be above 1"),
        ("outer.rollback=true", "outer.rollback: expected {max_loss_factor: ..., ...}, got True"),
        ("outer.recipe=dilocco", "unknown recipe 'dilocco': did you mean 'diloco'?"),
        ("outer.split=halves", "unknown split 'halves'"),
        ("outer.optimizer.momentum=0", "outer.optimizer: Nesterov momentum requires a momentum and zero dampening"),
        ("outer.optimizer.lr=-1", "outer.optimizer: Invalid learning rate: -1.0"),
        ("outer.optimizer.momentun=1", "outer.optimizer.momentun: unknown key, did you mean 'momentum'?"),
        ("model.hidden_size=30", "hidden_size is 30, which does not split into 4 heads"),
        ("train.steps=-5", "train.steps: should be greater than 0, got -5"),
        ("train.workers=0", "train.workers: should be greater than 0, got 0"),
        ("inner.optimizer.lr=nan", "inner.optimizer.lr: should be a finite number, got nan"),
        ("inner.clip_norm=.inf", "inner.clip_norm: should be a finite number, got inf"),
        ("outer.optimizer={type: adam, betas: [.nan, 0.9]}", "outer.optimizer: Invalid beta parameter at index 0: nan"),
        ("outer.optimizer.weight_decay=.nan", "outer.optimizer.weight_decay: should be a finite number, got nan"),
        ("outer.transport.type=gloo", "gloo is a backend of torch_dist: set outer.transport.backend=gloo"),
        ("model=big", "model: expected keys and values, got 'big'"),
        ("outer.recipe=my.recipes.mine", "(name a recipe of your own as package.module:Name)"),
        (f"outer.recipe={WRONG}:no_recipe", f"recipe '{WRONG}:no_recipe' should return a Recipe, got [Plan("),
        (f"outer.recipe={WRONG}:no_plan", "should be a function from a Plan to a Recipe, got <function no_plan"),
        (f"outer.recipe={WRONG}:Nothing", "should be a function from a Plan to a Recipe, got <class"),
        (f"outer.recipe={WRONG}:torch", "should be a function from a Plan to a Recipe, got <module"),
        (f"outer.recipe={WRONG}:a_function", "its optimizer is {type: name, ...} or partial(Class, ...)"),
        (
            f"outer.recipe={WRONG}:no_dataclass",
            "cannot be written into a configuration as compressor: make it a dataclass",
        ),
        (
            f"outer.compressor.type={WRONG}:Nothing",
            f"'{WRONG}:Nothing' cannot be used as compressor: it has no method average",
        ),
        (
            f"outer.merge.type={WRONG}:Nothing",
            "cannot be used as merge: it has no method outer_gradient and no method resume",
        ),
        (
            f"outer.optimizer.type={WRONG}:Nothing",
            "cannot be used as outer optimizer: it has no method step and no method state_dict",
        ),
        (
            f"outer.transport.type={WRONG}:Nothing",
            "cannot be used as transport: it has no method join and no method quorum",
        ),
    ],
)
def test_a_wrong_configuration_is_one_line(override, message):
    with pytest.raises(UserError) as caught:
        load_config(None, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_optimizer_of_a_recipe_may_be_a_class_with_arguments():
    optimizer = load_config(None, [f"outer.recipe={WRONG}:a_class_and_arguments"]).outer.optimizer
    assert (optimizer["type"], optimizer["lr"], optimizer["momentum"]) == ("sgd", 0.25, 0.5)


@pytest.mark.parametrize("recipe", RECIPES.names())
def test_parse_reads_what_dump_writes(recipe):
    """To the letter: workers compare what they read, some of them from the file that another wrote."""
    written = dump(load_config("examples/tiny.yaml", [f"outer.recipe={recipe}"], 2))
    read = dump(parse(yaml.safe_load(yaml.safe_dump(written))))
    assert {key: str(value) for key, value in flat(read).items()} == {
        key: str(value) for key, value in flat(written).items()
    }


def test_a_missing_section_key_is_named():
    values = {section: dict(content) for section, content in DEFAULTS.items()}
    del values["train"]["steps"]
    with pytest.raises(UserError, match="train.steps is missing"):
        parse(values)


def test_sections_are_frozen():
    config = load_config()
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3


def test_convert_names_the_path():
    assert convert("3", int, "a.b") == 3
    with pytest.raises(UserError, match=r"a\.b: should be a valid integer.*got 'x'"):
        convert("x", int, "a.b")


def test_flat_joins_keys_with_dots():
    assert flat({"a": {"b": {"c": 1}, "d": [2]}, "e": None}) == {"a.b.c": 1, "a.d": [2], "e": None}


def test_a_rollback_needs_evaluations():
    assert load_config(None, ["outer.rollback={}"]).outer.rollback == Rollback(max_loss_factor=1.5, max_rollbacks=3)
    with pytest.raises(UserError, match="outer.rollback goes by evaluations: set train.eval_every above 0"):
        load_config(None, ["outer.rollback={}", "train.eval_every=0"])
