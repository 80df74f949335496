"""What `isthmus export` writes is the anchor: loaded elsewhere, by others, it gives the same bits."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from exported_outputs import output_of
from safetensors.torch import load_file
from tests.train.toy_runs import Toy, toy_config
from tests.train.worker_processes import events

from isthmus.cli import main
from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.data.tokenizer import load_tokenizer
from isthmus.models import load_exported
from isthmus.recipes import load_config
from isthmus.tools.export import export, save_tokenizer
from isthmus.train.assemble import build_model_spec, run_identity
from isthmus.train.checkpoint import Checkpoints
from isthmus.train.worker import train
from isthmus.transport.peers import ring_bytes

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
SMALL = "hidden_size: 16, num_layers: 2, num_heads: 2, sequence_length: 8"


def anchors(run_dir: Path, step: int) -> list[torch.Tensor]:
    """As they stand in worker 0's checkpoint of a run with one fragment."""
    checkpoints = Checkpoints(run_dir / "checkpoints", 0, {})
    return checkpoints.load(step)["method"]["fragments"][0]["anchor"]


def cut_back(run_dir: Path, step: int) -> None:
    """Forget the checkpoints after a step."""
    for path in (run_dir / "checkpoints").iterdir():
        if int(path.name[5:]) > step:
            shutil.rmtree(path)


@pytest.fixture
def stopped(tmp_path) -> Path:
    """A run whose newest checkpoint is of step 10, two steps after a sync."""
    train(toy_config(tmp_path))
    cut_back(tmp_path / "run", 10)
    return tmp_path / "run"


def test_the_exported_weights_are_the_anchors_not_the_workers_own(stopped, tmp_path):
    assert export(stopped, tmp_path / "toy") == 10
    weights = load_file(tmp_path / "toy/model.safetensors")
    names = [name for name, _ in Toy().named_parameters()]
    assert weights.keys() == set(names)
    own = Checkpoints(stopped / "checkpoints", 0, {}).load(10)["model"]
    for name, anchor in zip(names, anchors(stopped, 10), strict=True):
        assert torch.equal(weights[name], anchor)
        assert not torch.equal(weights[name], own[name])


def test_code_that_a_folder_names_is_not_run_unasked(stopped, tmp_path):
    export(stopped, tmp_path / "toy")
    with pytest.raises(UserError, match="names code, 'tests.train.toy_runs:Toy': if you trust it"):
        load_exported(tmp_path / "toy")
    config = {"isthmus": "0.1.0", "model": {"type": "os:system", "command": f"touch {tmp_path}/owned"}}
    (tmp_path / "toy/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="names code, 'os:system'"):
        load_exported(tmp_path / "toy")
    assert not (tmp_path / "owned").exists()


def language_model(folder: Path, model: str) -> RunConfig:
    """A run of 4 steps."""
    overrides = (f"model={model}", "train.steps=4", "train.checkpoint_every=0", f"train.run_dir={folder}")
    return toy_config(folder.parent, *overrides)


def test_a_tokenizer_of_a_folder_is_exported_and_missed_in_one_line(tmp_path, caplog):
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
    load_tokenizer("bytes").save(tmp_path / "first")
    assert save_tokenizer(str(tmp_path / "first"), tmp_path / "second")
    (tokens,) = load_tokenizer(str(tmp_path / "second")).encode(["naïve"])
    assert tokens.tolist() == [*"naïve".encode(), 0]
    assert not save_tokenizer(str(tmp_path / "nowhere"), tmp_path / "third")
    (record,) = caplog.records
    assert "exported without its tokenizer: data.tokenizer: " in record.getMessage()
    assert not (tmp_path / "third").exists()


SPEECH = "hidden_size: 16, num_layers: 2, num_heads: 2, conv_size: 8, position_groups: 4, num_samples: 8000"
KINDS = {
    "gpt_neox": [f"model={{type: gpt_neox, {SMALL}}}"],
    "gpt_neo": [f"model={{type: gpt_neo, {SMALL}}}"],  # its head is tied
    "huggingface": ["model={type: huggingface, path: GPT2, sequence_length: 8}"],
    "resnet": ["model={type: resnet, image_size: 16, num_channels: 1}", "data={type: images}"],
    "resnet_group": ["model={type: resnet, image_size: 16, num_channels: 1, norm: group}", "data={type: images}"],
    "wav2vec2": [f"model={{type: wav2vec2, {SPEECH}}}", "data={type: speech, source: formants, transcripts: false}"],
    "wav2vec2_ctc": [f"model={{type: wav2vec2_ctc, {SPEECH}}}", "data={type: speech, source: formants}"],
    "biggan": [
        "model={type: biggan, width: 8, class_size: 8, chunk_size: 4}",
        "data={type: images}",
        "inner.optimizer={type: adversarial}",
    ],
    "toy": [],
}


@pytest.mark.processes
def test_models_of_all_kinds_load_in_a_fresh_process_with_the_same_outputs(tmp_path):
    """Weights are the anchors'; running statistics, moving averages and the like come from the same checkpoint."""
    from transformers import GPT2Config

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 256}
    GPT2Config(**sizes, bos_token_id=None, eos_token_id=None).save_pretrained(tmp_path / "GPT2")
    expected, folders = {}, {name: str(tmp_path / "exported" / name) for name in KINDS}
    common = ["outer.schedule.local_steps=2", "train.steps=3", "train.checkpoint_every=0", "train.eval_batches=1"]
    for name, options in KINDS.items():
        own = [option.replace("GPT2", str(tmp_path / "GPT2")) for option in options]
        config = toy_config(tmp_path, *common, f"train.run_dir={tmp_path / name}", *own)
        train(config)
        assert export(tmp_path / name, Path(folders[name])) == 3
        built = build_model_spec(config).build(seed=9)
        built.load_state_dict(Checkpoints(tmp_path / name / "checkpoints", 0, {}).load(3)["model"], strict=False)
        for param, anchor in zip(built.parameters(), anchors(tmp_path / name, 3), strict=True):
            param.data.copy_(anchor)
        expected[name] = output_of(name, getattr(built, "network", built))
        unit = {"speech": "seconds of sound", "images": "images"}.get(config.data["type"], "tokens")
        assert f"{unit} worker 0 trained on" in card_of(Path(folders[name]))[1]
    command = [sys.executable, str(HERE / "exported_outputs.py"), str(tmp_path / "outputs"), json.dumps(folders)]
    command.append(str(torch.get_num_threads()))
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}  # where the toy model is
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    got = load_file(tmp_path / "outputs")
    assert got.keys() == KINDS.keys()
    for name, output in expected.items():
        assert output.isfinite().all()
        assert torch.equal(got[name], output), name


def test_a_run_without_anchors_exports_its_weights(tmp_path):
    train(toy_config(tmp_path, "outer.recipe=ddp"))
    export(tmp_path / "run", tmp_path / "toy")
    saved = Checkpoints(tmp_path / "run/checkpoints", 0, {}).load(12)["model"]
    weights = load_file(tmp_path / "toy/model.safetensors")
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    assert "fewer bytes" not in (tmp_path / "toy/README.md").read_text()


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_exported(stopped, tmp_path, logged):
    (stopped / "checkpoints/step-00000010/worker-0/state.json").write_text("{}")
    assert export(stopped, tmp_path / "toy") == 5
    assert any(line.startswith("checkpoint refused: ") for line in logged.messages)


def test_the_newest_of_all_workers_is_taken(stopped, tmp_path):
    checkpoints = stopped / "checkpoints"
    (checkpoints / "step-00000010/worker-0").rename(checkpoints / "step-00000010/worker-3")
    assert export(stopped, tmp_path / "toy") == 10
    assert "sent by worker 3" in card_of(tmp_path / "toy")[1]


def card_of(folder: Path) -> tuple[dict, dict[str, str]]:
    """The header of a card, and its tables."""
    _, header, body = (folder / "README.md").read_text().split("---\n", 2)
    rows = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("| ") and line != "| | |"]
    return yaml.safe_load(header), dict(rows)


def test_the_card_tells_the_runs_own_figures(stopped, tmp_path):
    export(stopped, tmp_path / "toy")
    header, rows = card_of(tmp_path / "toy")
    assert header == {"library_name": "isthmus", "tags": ["isthmus", "diloco"]}
    assert rows["recipe"] == "`diloco`"
    assert rows["workers"] == "1"
    assert rows["inner steps"] == "10 of 12 planned"
    assert rows["inner steps between two syncs of a fragment (H)"] == "4"
    assert rows["tokens worker 0 trained on"] == f"{10 * 4 * 8}"
    assert rows["sent by worker 0"] == "0 B in 2 syncs"
    (evaluation,) = [event for event in events(stopped, 0, "eval") if event["step"] == 10]
    assert rows["loss"] == f"{evaluation['loss']:.4g}"
    assert "after step 10" in (tmp_path / "toy/README.md").read_text()


def test_the_card_compares_with_averaging_every_step(stopped, tmp_path):
    """The bytes of a run of two workers, put into the checkpoint's totals by hand."""
    config = load_config(stopped / "config.yaml", [], workers=2)
    (stopped / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    spec_layout = run_identity(config, Toy())
    checkpoints = Checkpoints(stopped / "checkpoints", 0, spec_layout)
    state = checkpoints.load(10)
    state["totals"]["sent_bytes"] = 1000
    checkpoints.save(11, state)
    export(stopped, tmp_path / "toy")
    _, rows = card_of(tmp_path / "toy")
    parameters = sum(param.numel() for param in Toy().parameters())
    times = ring_bytes(4 * parameters, 2) * 10 / 1000
    assert rows["fewer bytes than averaging float32 gradients at every step"] == f"{times:,.1f} times"


def test_the_card_of_a_language_model_says_how_to_load_it(tmp_path):
    train(language_model(tmp_path / "run", f"{{type: gpt_neox, {SMALL}}}"))
    export(tmp_path / "run", tmp_path / "small")
    header, rows = card_of(tmp_path / "small")
    assert (header["library_name"], header["pipeline_tag"]) == ("transformers", "text-generation")
    assert float(rows["perplexity"]) > 1
    text = (tmp_path / "small/README.md").read_text()
    assert "# small\n" in text
    assert 'AutoModelForCausalLM.from_pretrained("path/to/this/folder")' in text
    assert 'AutoTokenizer.from_pretrained("path/to/this/folder")' in text
    assert "the bytes of UTF-8 text" in text
    assert str(tmp_path) not in text  # nor in any other file: where a run lay is nobody's business
    assert str(tmp_path) not in (tmp_path / "small/config.json").read_text()


def isthmus(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["isthmus", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code or 0, *capsys.readouterr()


def test_the_command(stopped, tmp_path, monkeypatch, capsys):
    code, out, err = isthmus(monkeypatch, capsys, "export", stopped, "--to", tmp_path / "toy")
    assert (code, err) == (0, "")
    assert out == f"{tmp_path}/toy holds the model after step 10: model.safetensors, config.json, README.md\n"
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]


def test_what_cannot_be_exported_is_one_line(stopped, tmp_path, monkeypatch, capsys):
    cases = {
        "folder taken": ((stopped, stopped), "is not an empty folder: choose another one"),
        "no run": ((tmp_path / "nowhere", tmp_path / "toy"), "holds no run: config.yaml cannot be read (No such file"),
    }
    shutil.copytree(stopped, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints"))
    cases["no checkpoint"] = ((tmp_path / "bare", tmp_path / "toy"), "holds no undamaged checkpoint: train on")
    shutil.copytree(stopped, tmp_path / "other")
    text = (stopped / "config.yaml").read_text()
    (tmp_path / "other/config.yaml").write_text(text.replace("sequence_length: 8", "sequence_length: 9"))
    cases["another model"] = ((tmp_path / "other", tmp_path / "toy"), "belongs to another run: model.sequence_length")
    for (run, to), message in cases.values():
        code, out, err = isthmus(monkeypatch, capsys, "export", run, "--to", to)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert message in err
        assert not (tmp_path / "toy").exists()


def test_a_push_needs_a_token_in_the_environment_before_anything_is_written(stopped, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    code, _, err = isthmus(monkeypatch, capsys, "export", stopped, "--to", tmp_path / "toy", "--push", "me/toy")
    assert (code, err) == (2, "error: --push needs a token of the Hugging Face Hub that may write: set HF_TOKEN\n")
    assert not (tmp_path / "toy").exists()
