"""Every registered language model: the contract, and transformers' own loss as the reference."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from isthmus.core import UserError, split_strided
from isthmus.inner.optimizers import hidden_matrices
from isthmus.models import MODELS, Module, outline
from isthmus.models.gpt_neo import GPTNeo
from isthmus.models.gpt_neox import GPTNeoX
from isthmus.models.huggingface import HuggingFace
from isthmus.models.resnet import ResNet

SMALL = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 32, "sequence_length": 8}
OF_OTHER_KINDS = {"biggan", "wav2vec2", "wav2vec2_ctc"}  # tested beside


class Bigram(nn.Module):
    """A user's own model."""

    def __init__(self, vocab_size: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, batch):
        tokens = batch["tokens"]
        return nn.functional.cross_entropy(self.table(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.fixture
def folder(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=8))
    model.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.fixture(params=["gpt_neox", "gpt_neo", "huggingface", "resnet", "module"])
def spec(request: pytest.FixtureRequest, folder):
    options = {
        "gpt_neox": SMALL,
        "gpt_neo": SMALL,
        "huggingface": {"path": str(folder), "sequence_length": 8},
        "resnet": {"image_size": 16},
        "module": {"path": f"{__name__}:Bigram", "arguments": {"vocab_size": 32}, "sequence_length": 8},
    }
    assert set(options) == set(MODELS.names()) - OF_OTHER_KINDS
    return MODELS.get(request.param)(**options[request.param])


def batch_of(spec) -> dict[str, torch.Tensor]:
    if not isinstance(spec, ResNet):
        return tokens_of(spec)
    generator = torch.Generator().manual_seed(0)
    return {"image": torch.randn(3, 3, 16, 16, generator=generator), "label": torch.tensor([1, 0, 2])}


def tokens_of(spec, batch_size: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"tokens": torch.randint(32, (batch_size, spec.sequence_length + 1), generator=generator)}


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def test_equal_seeds_give_equal_weights_and_leave_the_generator_alone(spec):
    state = torch.get_rng_state()
    first = weights(spec.build(seed=3))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert torch.equal(weights(spec.build(seed=3)), first)
    assert not torch.equal(weights(spec.build(seed=4)), first)
    assert first.dtype == torch.float32


def test_a_batch_gives_a_loss_that_trains(spec):
    model = spec.build()
    assert model.training
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    losses = []
    for _ in range(20):
        loss = model(batch_of(spec))
        assert loss.shape == ()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("spec_class", [GPTNeoX, GPTNeo])
def test_loss_equals_transformers_own(spec_class):
    model = spec_class(**{**SMALL, "sequence_length": 9}).build()
    batch = tokens_of(spec_class(**SMALL))  # 9 tokens: transformers is given them all and shifts by itself
    own = model.network(input_ids=batch["tokens"], labels=batch["tokens"]).loss
    torch.testing.assert_close(model(batch), own)


@pytest.mark.parametrize("spec_class", [GPTNeoX, GPTNeo])
def test_the_future_is_not_seen(spec_class):
    model = spec_class(**SMALL).build()
    tokens = tokens_of(spec_class(**SMALL))["tokens"][:, :-1]
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    before, after = model.network(input_ids=tokens).logits, model.network(input_ids=changed).logits
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize(("spec_class", "matrices"), [(GPTNeoX, 4), (GPTNeo, 6)])
def test_blocks_are_found_by_fragments_and_muon(spec_class, matrices):
    """GPT-NeoX has a fused and GPT-Neo three projections for queries, keys and values, both three matrices more."""
    model = spec_class(**SMALL).build()
    assert len(hidden_matrices(model)) == 2 * matrices
    whole, sketch = (split_strided(each, 2) for each in (model, outline(spec_class(**SMALL))))
    assert [fragment.name for fragment in whole] == ["0", "1"]
    assert [fragment.param_names for fragment in sketch] == [fragment.param_names for fragment in whole]


@pytest.mark.parametrize("num_layers", [1, 3])
def test_gpt_neo_takes_odd_numbers_of_layers(num_layers):
    assert len(GPTNeo(**{**SMALL, "num_layers": num_layers}).build().network.transformer.h) == num_layers


def test_one_million_parameters_of_the_demo():
    assert sum(param.numel() for param in GPTNeoX().build().parameters()) == 858_880


def test_dropout_is_drawn_from_the_global_generator():
    model = GPTNeoX(**SMALL, dropout=0.5).build()
    batch = tokens_of(GPTNeoX(**SMALL))
    torch.manual_seed(0)
    first = model(batch)
    assert not torch.equal(model(batch), first)
    torch.manual_seed(0)
    assert torch.equal(model(batch), first)


def test_pretrained_weights_come_from_the_folder(folder):
    from transformers import GPT2LMHeadModel

    loaded = HuggingFace(str(folder), sequence_length=8, pretrained=True).build()
    assert torch.equal(weights(loaded), weights(GPT2LMHeadModel.from_pretrained(folder)))
    assert loaded.training


def refused(build: Callable[[], object], match: str) -> None:
    with pytest.raises(UserError, match=match) as error:
        build()
    assert "\n" not in str(error.value)


def test_bad_sizes_are_refused():
    for spec_class in (GPTNeoX, GPTNeo):
        refused(
            lambda s=spec_class: s(hidden_size=100, num_heads=3),
            "hidden_size is 100, which does not split into 3 heads",
        )
        refused(lambda s=spec_class: s(num_layers=0), "num_layers is 0")
        refused(lambda s=spec_class: s(num_heads=0), "num_heads is 0")
        refused(lambda s=spec_class: s(dropout=1.5), r"dropout is 1\.5")


def test_bad_folders_are_refused(tmp_path, folder):
    refused(lambda: HuggingFace(str(tmp_path / "nowhere")), r"no config\.json in")
    refused(
        lambda: HuggingFace(str(folder), sequence_length=9).build(),
        "sequence_length is 9, and the model has 8 positions",
    )
    (folder / "model.safetensors").unlink()
    refused(lambda: HuggingFace(str(folder), sequence_length=8, pretrained=True).build(), "cannot be loaded")
    for text in ("{not json", json.dumps({"model_type": "unheard_of"})):
        (folder / "config.json").write_text(text)
        refused(lambda: HuggingFace(str(folder)).build(), r"config\.json in .* cannot be used")
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    refused(lambda: HuggingFace(str(folder)).build(), "cannot be loaded")


def test_bad_import_paths_are_refused():
    refused(lambda: Module("tests.nowhere:Net").build(), "cannot be imported")
    refused(lambda: Module("torch.nn").build(), "cannot be imported")
    refused(lambda: Module("torch.nn:Nothing").build(), "cannot be imported")
    refused(lambda: Module(f"{__name__}:Bigram", {"size": 3}).build(), "does not take them")


def test_an_outline_has_the_models_parameters_without_their_values(spec):
    model, sketch = spec.build(), outline(spec)
    assert all(param.is_meta for param in sketch.parameters())
    named = [[(name, param.shape) for name, param in each.named_parameters()] for each in (model, sketch)]
    assert named[0] == named[1]


@pytest.mark.processes
def test_specs_and_outlines_import_no_transformers_and_no_dtensor():
    """They take seconds; showing or validating a configuration must not."""
    code = (
        "import sys; from isthmus.models import MODELS, outline; "
        "[MODELS.get(name) for name in MODELS.names()]; "
        "specs = [MODELS.get(name)() for name in ('gpt_neox', 'gpt_neo')]; [outline(spec) for spec in specs]; "
        "assert not {'transformers', 'torch.distributed.tensor'} & set(sys.modules); "
        "[spec.build() for spec in specs]; assert all(set(spec.libraries) <= set(sys.modules) for spec in specs)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
