"""Every sample in the README and the documentation is run, or at least loaded, as a reader would."""

import ast
import inspect
import re
import shlex
import tomllib
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
import typer.main
import yaml
from torch import nn

from isthmus import attach
from isthmus.cli import app
from isthmus.config import RunConfig
from isthmus.recipes import load_config
from tests.test_contributing import write_package
from tests.test_docs import ROOT, pages
from tests.test_docs_names import HISTORY, SPAN

PAGES = [page for page in pages() if not str(page.relative_to(ROOT)).startswith(HISTORY)]
NOT_OURS = {"scrape_configs"}  # top-level keys of other programs' files
OURS = ("isthmus ", "make ", "python ", "torchrun ", "pip install ", "pytest ")
COMMANDS = typer.main.get_command(app)
MORE_THAN_A_TOY = ("Trainer", "accelerator", "peft", "lighthouse")
FLAGS = {"--resume", "--json"}  # options that stand alone
CONFIGS = {"run.yaml": "docs/command-line.md", "runs/first/config.yaml": "docs/command-line.md"}


def blocks(language: str) -> list:
    """Return the fenced blocks of a language in all pages, as parameters of a test."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
    return [
        pytest.param(match[1], id=f"{page.relative_to(ROOT)}:{page.read_text()[: match.start()].count(chr(10)) + 1}")
        for page in PAGES
        for match in fence.finditer(page.read_text())
    ]


def sample_config(name: str, folder: Path) -> Path:
    """Return the file that a command of the documentation means by `name`."""
    if name not in CONFIGS:
        return ROOT / name
    (text,) = re.findall(r"^```yaml\n(model.*?)^```$", (ROOT / CONFIGS[name]).read_text(), re.DOTALL | re.MULTILINE)
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def entries(block: str) -> list[dict]:
    """Return the top-level entries of a block one by one, since a block may show one key in several ways."""
    return [yaml.safe_load(entry) for entry in re.split(r"^(?=\w)", block, flags=re.MULTILINE) if entry.strip("\n# ")]


@pytest.mark.parametrize("block", blocks("yaml"))
def test_yaml_loads_as_a_run(block, tmp_path, monkeypatch):
    monkeypatch.setenv("ISTHMUS_ALLOW", "my_package")
    monkeypatch.syspath_prepend(tmp_path)
    write_package(tmp_path)
    base = yaml.safe_load((ROOT / "examples/tiny.yaml").read_text())
    whole = dict(pair for entry in entries(block) if entry for pair in entry.items())
    alternatives = [entry for entry in entries(block) if entry]
    for chosen in [whole] if len(whole) == len(alternatives) else alternatives:
        if NOT_OURS & chosen.keys():
            continue
        if not chosen.keys() <= RunConfig.model_fields.keys():
            chosen = {"outer": chosen}  # an excerpt of that section
        path = tmp_path / "sample.yaml"
        path.write_text(yaml.safe_dump({**base, **chosen}))
        load_config(path, workers=2)


def commands(text: str) -> list[str]:
    """Return the lines of a shell block that are commands of this project, without comments."""
    joined = text.replace("\\\n", " ")
    lines = [line.split(" # ")[0].split("  #")[0].strip() for line in joined.splitlines()]
    return [line for line in lines if re.sub(r"^(\w+=\S+ )+", "", line).startswith(OURS)]


def check_command(line: str, folder: Path) -> None:
    """Fail where a command names a program, option, target, file or extra that there is not."""
    words = [word for word in shlex.split(re.split(r" (?:\||>>?) ", line)[0]) if word != "..."]
    while "=" in words[0]:
        words.pop(0)
    if words[0] == "torchrun" or words[:3] == ["python", "-m", "isthmus"]:
        words = words[words.index("-m") + 1 :] if "-m" in words else ["python", words[-1]]
        if words[-1].startswith("-"):
            return  # an option of torchrun's, spoken of
    match words:
        case ["isthmus", "--help"]:
            pass
        case ["isthmus", command, *arguments]:
            check_options(command, arguments, folder)
        case ["make", *targets]:
            assert set(targets) <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        case ["python", "-m", module, *_]:
            places = [folder / module.replace(".", "/") for folder in (ROOT, ROOT / "src")]
            assert any(place.exists() or place.with_suffix(".py").exists() for place in places)
        case ["python", script, *_]:
            assert (ROOT / script).exists() or script == "program.py", script
        case ["pip", "install", *packages]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for extra in re.findall(r"\[(.*?)\]", " ".join(packages)):
                assert set(extra.split(",")) <= extras.keys()
        case ["pytest", *arguments]:
            for path in [word.split("::")[0] for word in arguments if word.startswith("tests")]:
                assert (ROOT / path).exists(), path


def check_options(name: str, arguments: list[str], folder: Path) -> None:
    """Parse the options of one of our commands, and load the configuration that it names with its overrides."""
    command = COMMANDS.commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in arguments if word.startswith("--")} <= options
    if not arguments or arguments == ["CONFIG"] or arguments[-1] in options - FLAGS:
        return  # spoken of, not written out
    with command.make_context(name, list(arguments)) as context:
        config, overrides = context.params.get("config"), context.params.get("overrides")
    if config and str(config) != "CONFIG":
        settled = [item for item in overrides or [] if "HOST:PORT" not in item]
        load_config(sample_config(str(config), folder), settled, context.params.get("workers"))


@pytest.mark.parametrize("block", blocks("(?:bash|sh)"))
def test_commands_parse(block, tmp_path):
    for line in commands(block):
        check_command(line, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_within_a_sentence_parse(page, tmp_path):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for span in SPAN.findall(text):
        for line in commands(" ".join(span.split())):
            check_command(line, tmp_path)


@pytest.mark.parametrize("name", ["README.md", "docs/own-loop.md"])
def test_python_runs_in_a_loop(name, tmp_path):
    """The blocks of a page run one after the other, with a toy in place of what the reader has.

    What needs more than a toy is compiled, its imports are made, and its calls of `attach` bind: other tests train it.
    """
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    used = {"attach": attach, "torch": torch, "model": model, "batches": torch.randn(130, 8, 4)}
    used["inner_step"] = partial(inner_step, model, optimizer)
    for code in re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), flags=re.DOTALL | re.MULTILINE):
        if any(word in code for word in MORE_THAN_A_TOY):
            check_calls(code)
            continue
        before = [parameter.clone() for parameter in used["model"].parameters()]
        exec(compile(code, name, "exec"), used)
        if ".finish()" in code:
            assert not any(map(torch.equal, before, used["model"].parameters()))
        if "attach(" in code and ".close()" not in code and "def " not in code:
            used["outer_loop"].close()
        if "def resume" in code:
            resumes(used, tmp_path / "saved.pt")


def check_calls(code: str) -> None:
    tree = ast.parse(code)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), "imports", "exec"), {})
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "attach":
            keywords = {str(keyword.arg): None for keyword in node.keywords}
            inspect.signature(attach).bind(*node.args, **keywords)


def resumes(used: dict, path: Path) -> None:
    """Save in the middle of a run, spoil what was saved, and resume from the file."""
    used["outer_loop"] = used["attach"]("streaming", used["model"], steps=200, local_steps=20)
    for _ in range(30):
        used["outer_loop"].step()
    used["save"](path, 30)
    saved, anchor = deepcopy(used["model"].state_dict()), used["outer_loop"].anchor_hash()
    used["outer_loop"].close()
    torch.nn.init.zeros_(next(used["model"].parameters()))
    outer_loop, step = used["resume"](path)
    assert step == 30
    assert outer_loop.anchor_hash() == anchor
    assert all(map(torch.equal, saved.values(), used["model"].state_dict().values()))
    outer_loop.close()


class Blocks(nn.Module):
    """A model with a list of blocks, as fragments want them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_the_measured_table_is_what_was_measured():
    """Every figure of the README's table, against the results that it names."""
    text = (ROOT / "README.md").read_text()
    links = [contenders(ROOT / path) for path in re.findall(r"`(benchmarks/results/\S+-wan-[AB]\.md)`", text)]
    rows = re.findall(
        r"^\| (.+?) \| ([\d.,]+) \| ([\d.]+ %) \| ([\d.]+) \| ([\d.]+ %) \| ([\d.]+) \|$", text, re.MULTILINE
    )
    assert len(links) == 2
    assert len(rows) >= 6
    for name, kilobytes, *figures in rows:
        contender = {"torchft's DiLoCo": "torchft DiLoCo", "hivemind's averaging": "hivemind averaging"}.get(name, name)
        for link, share, loss in zip(links, figures[::2], figures[1::2], strict=True):
            measured = link[contender.strip("`")]
            assert measured["utilisation"] == share
            assert abs(float(measured["loss, equal tokens"]) - float(loss)) < 0.00051
        sent = float(links[0][contender.strip("`")]["kB per step, by the kernel"].replace(",", ""))
        assert abs(sent - float(kilobytes.replace(",", ""))) <= (0.5 if sent > 100 else 0.05)


def contenders(path: Path) -> dict[str, dict[str, str]]:
    """Return the rows of a result's table by their first column."""
    table = [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")]
    return {row[0]: dict(zip(table[0], row, strict=True)) for row in table[1:]}
