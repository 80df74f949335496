"""The card that goes with an exported model: how to load it, and the figures of the run that trained it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from isthmus.config import RunConfig
from isthmus.models import CausalLM
from isthmus.tools.report import readable_bytes
from isthmus.train.metrics import Totals
from isthmus.transport.peers import ring_bytes

_UNITS = {"images": "images", "speech": "seconds of sound"}  # what is counted as tokens where there are none

_LOAD = 'from transformers import {loader}\n\nmodel = {loader}.from_pretrained("path/to/this/folder")'
_GENERATE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
tokens = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=50)
print(tokenizer.decode(tokens[0]))"""
_GENERATION_TAG = "pipeline_tag: text-generation"


@dataclass(frozen=True)
class TrainingFacts:
    """The facts about a run that a model card tells."""

    config: RunConfig
    step: int  # after which the model was saved
    worker: int  # whose checkpoint it is from, and whose totals these are
    totals: Totals
    model: nn.Module
    tokenizer: str | None  # its name in the configuration, such as "bytes"; None where there is none in the folder
    evaluation: dict[str, Any]  # the last eval event, {} where there is none


def model_card(name: str, facts: TrainingFacts, network: nn.Module | None) -> str:
    """Write the card of the model of this name, in Markdown, with the Hub's header.

    `network` is of transformers, where one was exported; without it the model is loaded with isthmus.
    """
    recipe, workers = facts.config.outer.recipe, facts.config.train.workers
    load, header = _loading(facts, network)
    model = facts.config.model
    own = model["path"] if model["type"] == "module" else model["type"]
    kind = own if network is None else type(network).__name__
    num_parameters = sum(param.numel() for param in facts.model.parameters())
    sections = [
        "\n".join(["---", *header, "tags:", "- isthmus", f"- {recipe}", "---"]),
        f"# {name}",
        f"A `{kind}` of {num_parameters:,} parameters, trained with isthmus by `{recipe}` on "
        f"{'one worker' if workers == 1 else f'{workers} workers'}.",
        f"## Use\n\n```python\n{load}\n```",
    ]
    if facts.tokenizer == "bytes":
        sections.append("Its tokens are the bytes of UTF-8 text: `list(text.encode())`. A zero ends a text.")
    sections.append("## Training\n\n" + _table(_training(facts)))
    if facts.evaluation:
        sections.append("## Evaluation\n\n" + _evaluation(facts))
    return "\n\n".join(sections) + "\n"


def _loading(facts: TrainingFacts, network: nn.Module | None) -> tuple[str, list[str]]:
    """Return the code that loads the model, and the card's header."""
    if network is None:
        kind = facts.config.model["type"]
        trust = ", trust_imports=True" if kind == "module" or ":" in kind else ""
        code = f'from isthmus.models import load_exported\n\nmodel = load_exported("path/to/this/folder"{trust})'
        return code, ["library_name: isthmus"]
    header = ["library_name: transformers"]
    if isinstance(facts.model, CausalLM):
        return _GENERATE if facts.tokenizer else _LOAD.format(loader="AutoModelForCausalLM"), [*header, _GENERATION_TAG]
    return _LOAD.format(loader=type(network).__name__), header


def _training(facts: TrainingFacts) -> list[tuple[str, str]]:
    config, totals = facts.config, facts.totals
    unit = _UNITS.get(config.data["type"], "tokens")
    inner, schedule = config.inner, config.outer.schedule
    planned = f" of {config.train.steps:,} planned" if facts.step < config.train.steps else ""
    rows = [
        ("recipe", f"`{config.outer.recipe}`"),
        ("workers", str(config.train.workers)),
        ("inner steps", f"{facts.step:,}{planned}"),
    ]
    if schedule is not None and config.outer.compressor and config.outer.optimizer:
        rows += [
            ("inner steps between two syncs of a fragment (H)", f"{schedule.local_steps:,}"),
            ("compressor", f"`{config.outer.compressor['type']}`"),
            ("outer optimizer", _settings(config.outer.optimizer, "lr", "momentum", "nesterov")),
        ]
    rows += [
        ("inner optimizer", _settings(inner.optimizer, "lr", "weight_decay")),
        ("samples a worker and step", f"{inner.batch_size:,}"),
        (f"{unit} worker {facts.worker} trained on", f"{totals.tokens:,}"),
        (f"sent by worker {facts.worker}", f"{readable_bytes(totals.sent_bytes)} in {totals.num_syncs:,} syncs"),
        (f"received by worker {facts.worker}", readable_bytes(totals.received_bytes)),
        ("seconds of training, syncs included", f"{totals.train_seconds:,.0f}"),
    ]
    num_trained = sum(param.numel() for param in facts.model.parameters() if param.requires_grad)
    all_reduce = ring_bytes(4 * num_trained, config.train.workers) * totals.steps
    if schedule is not None and totals.sent_bytes and all_reduce:
        times = f"{all_reduce / totals.sent_bytes:,.1f} times"
        rows.append(("fewer bytes than averaging float32 gradients at every step", times))
    return [*rows, ("seed", str(config.train.seed))]


def _evaluation(facts: TrainingFacts) -> str:
    values = {name: value for name, value in facts.evaluation.items() if name not in ("event", "step", "of")}
    rows = [(name, "not finite" if value is None else f"{value:.4g}") for name, value in values.items()]
    of = "anchor, which is what is exported here," if facts.evaluation["of"] == "anchor" else "model"
    samples = facts.config.train.eval_batches * facts.config.inner.batch_size
    return (
        f"Of the {of} after step {facts.evaluation['step']:,}, on up to {samples:,} validation samples.\n\n"
        + _table(rows)
    )


def _settings(spec: dict[str, Any], *names: str) -> str:
    """Write a spec with these of its options: '`sgd`, lr 0.6, momentum 0.8'."""
    return ", ".join([f"`{spec['type']}`", *(f"{name} {spec[name]}" for name in names if spec.get(name))])


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
