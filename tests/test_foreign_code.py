"""A configuration may come from somebody else: what it names is not imported unless the user allowed it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from isthmus.core import UserError
from isthmus.core.imports import ALLOW, check_allowed
from tests.test_cli import RUN, isthmus

NAMING = {  # by the key that names it: all of a configuration that names code
    "model.type": {"model": {"type": "foreign:Thing"}},
    "model.path": {"model": RUN["model"] | {"path": "foreign:Thing"}},
    "data.type": {"data": {"type": "foreign:Thing"}},
    "inner.optimizer.type": {"inner": {"optimizer": {"type": "foreign:Thing"}}},
    "inner.lr_schedule.type": {"inner": {"lr_schedule": {"type": "foreign:Thing"}}},
    "outer.recipe": {"outer": {"recipe": "foreign:Thing"}},
    "outer.split": {"outer": {"split": "foreign:Thing"}},
    "outer.transport.type": {"outer": {"transport": {"type": "foreign:Thing"}}},
    "outer.compressor.type": {"outer": {"compressor": {"type": "foreign:Thing"}}},
    "nested": {"outer": {"compressor": {"type": "error_feedback", "compressor": {"type": "foreign:Thing"}}}},
    "outer.merge.type": {"outer": {"merge": {"type": "foreign:Thing"}}},
    "outer.optimizer.type": {"outer": {"optimizer": {"type": "foreign:Thing"}}},
    "adversarial": {"inner": {"optimizer": {"type": "adversarial", "generator": {"type": "foreign:Thing"}}}},
}
COMMANDS = ("show", "doctor", "profile", "launch", "train", "export")


@pytest.fixture
def foreign(tmp_path, monkeypatch) -> Path:
    """A module that everybody can import, and that leaves a file beside it when anybody does."""
    (tmp_path / "foreign.py").write_text(
        "from pathlib import Path\n"
        "Path(__file__).with_name('was_run').touch()\n"
        "from isthmus.core import UserError\n"
        "def Thing(*args, **kwargs): raise UserError('it was called')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(ALLOW, "tests")
    yield tmp_path / "was_run"
    sys.modules.pop("foreign", None)


def command_line(command: str, tmp_path: Path, naming: dict) -> list[object]:
    """Return the arguments of a command that reads a configuration, or a run's folder that holds one."""
    values = {section: RUN[section] | naming.get(section, {}) for section in RUN} | {
        "train": RUN["train"] | {"run_dir": str(tmp_path / "run")}
    }
    (tmp_path / "run").mkdir()
    path = tmp_path / "run/config.yaml"
    path.write_text(yaml.safe_dump(values))
    return [command, tmp_path / "run", "--to", tmp_path / "exported"] if command == "export" else [command, path]


@pytest.mark.parametrize("key", NAMING)
def test_show_imports_nothing_that_was_not_allowed(monkeypatch, capsys, tmp_path, foreign, key):
    assert isthmus(monkeypatch, *command_line("show", tmp_path, NAMING[key])) == 2
    said = capsys.readouterr().err
    assert "'foreign:Thing' is code that is not isthmus's: if you trust it, allow it with --allow foreign" in said
    assert said.count("\n") == 1
    assert not foreign.exists()


@pytest.mark.processes  # `launch` starts its server while it reads
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_what_was_not_allowed(monkeypatch, capsys, tmp_path, foreign, command):
    key = "outer.compressor.type" if command != "export" else "model.type"
    assert isthmus(monkeypatch, *command_line(command, tmp_path, NAMING[key])) == 2
    assert "--allow foreign" in capsys.readouterr().err
    assert not foreign.exists()


@pytest.mark.parametrize("how", ["option", "environment"])
def test_what_is_allowed_is_imported(monkeypatch, capsys, tmp_path, foreign, how):
    arguments = command_line("show", tmp_path, NAMING["outer.recipe"])
    if how == "option":
        arguments += ["--allow", "foreign"]
    else:
        monkeypatch.setenv(ALLOW, "tests, foreign")
    assert isthmus(monkeypatch, *arguments) == 2
    assert "it was called" in capsys.readouterr().err
    assert foreign.exists()


def test_a_package_is_allowed_with_all_that_is_in_it_and_nothing_beside(monkeypatch):
    monkeypatch.setenv(ALLOW, "mine,theirs.part")
    for path in ("mine:Name", "mine.deep.down:Name", "theirs.part:Name"):
        check_allowed(path, "model")
    for path in ("mine2:Name", "theirs:Name", "theirs.party:Name", ".mine:Name", ":Name", "subprocess:Popen"):
        with pytest.raises(UserError, match="is code that is not isthmus's"):
            check_allowed(path, "model")
    monkeypatch.delenv(ALLOW)
    with pytest.raises(UserError, match="is code that is not isthmus's"):
        check_allowed("mine:Name", "model")
