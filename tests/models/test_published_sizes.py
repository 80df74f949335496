"""Published sizes have the published numbers of parameters."""

import pytest
import torch

from isthmus.config import dump
from isthmus.core import UserError
from isthmus.models import MODELS
from isthmus.models.published_sizes import PUBLISHED, with_size
from isthmus.recipes import load_config

# Pythia: "Total params" of the suite's model cards; GPT-NeoX-20B: its card; GPT-Neo: counted in the released weights
PARAMETERS = {
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
}
SIZES = [(kind, name) for kind, sizes in PUBLISHED.items() for name in sizes]


def test_all_sizes_are_checked():
    assert [name for _, name in SIZES] == list(PARAMETERS)


@pytest.mark.parametrize(("kind", "name"), SIZES)
def test_parameters_are_as_many_as_published(kind, name):
    spec = with_size({"type": kind, "size": name})
    with torch.device("meta"):
        model = MODELS.get(spec.pop("type"))(**spec).build()
    assert sum(param.numel() for param in model.parameters()) == PARAMETERS[name]


def configured(tmp_path, text, *overrides):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return dump(load_config(path, overrides))["model"]


def test_a_configuration_says_what_a_size_stands_for(tmp_path):
    model = configured(tmp_path, "model: {type: gpt_neox, size: pythia-160m, sequence_length: 512, dropout: 0.1}")
    assert "size" not in model
    assert (model["hidden_size"], model["num_layers"], model["num_heads"]) == (768, 12, 12)
    assert (model["vocab_size"], model["sequence_length"], model["dropout"]) == (50304, 512, 0.1)


def test_a_size_can_be_chosen_on_the_command_line(tmp_path):
    model = configured(tmp_path, "train: {steps: 10}", "model.size=gpt-neox-20b")
    assert (model["type"], model["hidden_size"], model["num_layers"]) == ("gpt_neox", 6144, 44)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{type: gpt_neox, size: pythia-160}", "model.size: gpt_neox has no published size 'pythia-160', did you mean"),
        ("{type: gpt_neo, size: 3}", "model.size: gpt_neo has no published size 3, known: gpt-neo-1.3b"),
        ("{type: gpt_neo, size: [a]}", "model.size: gpt_neo has no published size"),
        ("{type: huggingface, path: nowhere, size: x}", "model.size: unknown key"),
        ("{type: [gpt_neo], size: x}", "model: expected"),
    ],
)
def test_unknown_sizes_are_one_line(tmp_path, text, message):
    with pytest.raises(UserError) as error:
        configured(tmp_path, f"model: {text}")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
