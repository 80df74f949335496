"""The command line in this process; what starts processes of its own is in tests/tools/test_launch.py."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from isthmus.cli import main
from isthmus.config import dump
from isthmus.recipes import load_config
from isthmus.transport.peers import ring_bytes

RUN = {
    "model": {
        "type": "module",
        "path": "tests.train.tiny:Bigram",
        "arguments": {"hidden_size": 4},
        "sequence_length": 8,
    },
    "data": {"type": "text", "source": str(Path(__file__).parent)},
    "inner": {"batch_size": 2},
    "outer": {"recipe": "diloco", "schedule": {"local_steps": 2}},
    "train": {"steps": 4, "eval_every": 2, "eval_batches": 1},
}
PARAMETERS = 256 * 4 + 4 * 256 + 256
OVERHEAD_BYTES = 40 + 9  # to each peer: the report before a sync, and the vote after it


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | {"train": RUN["train"] | {"run_dir": str(tmp_path / "run")}}))
    return path


def isthmus(monkeypatch, *arguments: object) -> int:
    """Run the program; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["isthmus", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code or 0


BAD = {
    "no command": ([], "Missing command"),
    "unknown command": (["lunch"], "No such command 'lunch'"),
    "no configuration": (["launch"], "Missing argument 'CONFIG'"),
    "unknown option": (["launch", "CONFIG", "--worker", "2"], "No such option: --worker"),
    "no workers": (["launch", "CONFIG", "--workers", "0"], "Invalid value for '--workers'"),
    "missing file": (["launch", "nowhere.yaml"], "cannot read the configuration 'nowhere.yaml'"),
    "override without =": (["launch", "CONFIG", "--set", "train.steps"], "cannot read 'train.steps'"),
    "unknown recipe": (["launch", "CONFIG", "--set", "outer.recipe=dilocco"], "did you mean 'diloco'?"),
    "unknown key": (["launch", "CONFIG", "--set", "outer.schedule.local_step=3"], "did you mean 'local_steps'?"),
    "unknown argument": (["show", "CONFIG", "--set", "outer.compressor.formt=float16"], "did you mean 'format'?"),
    "wrong type": (["train", "CONFIG", "--set", "train.steps=many"], "train.steps"),
    "tau > H": (["show", "CONFIG", "--set", "outer.schedule.overlap_steps=3"], "overlap_steps 3 is more than"),
    "H not divisible by P": (["show", "CONFIG", "--set", "outer.schedule.num_fragments=3"], "not divisible"),
    "gradients with a memory": (
        ["launch", "CONFIG", "--set", "outer.gradient_compressor={type: error_feedback, compressor: {type: cast}}"],
        "outer.gradient_compressor: gradients are averaged without a memory of what was not sent: choose a codec",
    ),
    "gradients where workers come and go": (
        [
            "launch",
            "CONFIG",
            "--set",
            "outer.transport.type=torchft",
            "--set",
            "outer.gradient_compressor={type: cast}",
        ],
        "outer.gradient_compressor: gradients are averaged where the workers stay the same",
    ),
    "gradients, and a mean of weights that goes further": (
        ["launch", "CONFIG", "--workers=2", "--set", "outer={recipe: muloco, gradient_compressor: {type: cast}}"],
        "outer.schedule.warm_start_lr is 1.41, but workers that average their gradients step alike",
    ),
    "missing data": (["train", "CONFIG", "--set", "data.source=./nowhere"], "'./nowhere' does not exist"),
    "too few steps": (["launch", "CONFIG", "--set", "train.steps=-5"], "train.steps: should be greater than 0, got -5"),
    "a backend": (["show", "CONFIG", "--set", "outer.transport.type=nccl"], "set outer.transport.backend=nccl"),
    "fewer ranks than the config says": (["train", "CONFIG", "--set", "train.workers=2"], "2 workers, but 1 rank"),
    "nothing to resume": (["train", "CONFIG", "--resume"], "no usable checkpoint"),
    "another way to resume": (["train", "CONFIG", "--resume=perhaps"], "'perhaps' is not one of 'no', 'yes', 'auto'"),
}


@pytest.mark.processes
@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, config, arguments, message):
    assert isthmus(monkeypatch, *[config if argument == "CONFIG" else argument for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("text", ["{", "- 1", "train: 3", "\0"])
def test_a_file_that_holds_no_configuration(monkeypatch, capsys, config, text):
    config.write_text(text)
    assert isthmus(monkeypatch, "show", config) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.processes
def test_a_folder_that_cannot_be_written(monkeypatch, capsys, config, tmp_path):
    (tmp_path / "file").touch()
    for run_dir, reason in {
        f"{tmp_path}/file/run": "Not a directory",
        f"{tmp_path}/file": "File exists",
        "/proc/x": "No such file or directory",
    }.items():
        for command in ("launch", "train"):
            assert isthmus(monkeypatch, command, config, "--set", f"train.run_dir={run_dir}") == 2
            expected = f"error: train.run_dir: the folder '{run_dir}' cannot be made ({reason}): choose another\n"
            assert capsys.readouterr().err == expected


def test_an_unforeseen_error_keeps_its_traceback(monkeypatch, config):
    monkeypatch.setattr("isthmus.recipes.load_config", lambda *arguments: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["isthmus", "show", str(config)])
    with pytest.raises(ZeroDivisionError):
        main()


def test_identity_makes_a_key_once(monkeypatch, capsys, tmp_path):
    path = tmp_path / "worker.key"
    for _ in range(2):
        assert isthmus(monkeypatch, "identity", path) == 0
    first, second = capsys.readouterr().out.split()
    assert first == second
    assert first.startswith("ed25519:")
    assert path.stat().st_mode & 0o077 == 0
    assert isthmus(monkeypatch, "identity", tmp_path / "no folder" / "key") == 2
    assert "cannot be written (No such file or directory): choose another path" in capsys.readouterr().err


def test_resume_may_stand_anywhere_with_and_without_auto(monkeypatch, capsys, config):
    for arguments in (["--resume", config], [config, "--resume"]):
        assert isthmus(monkeypatch, "train", *arguments) == 2
        assert "no usable checkpoint" in capsys.readouterr().err
    for arguments in (["--resume", "auto", config], [config, "--resume=auto"]):
        assert isthmus(monkeypatch, "train", *arguments) == 0
    assert "is finished after 4 steps" in capsys.readouterr().err


def test_help_is_no_error(monkeypatch, capsys):
    assert isthmus(monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("demo", "train", "launch", "show"))


def shown(monkeypatch, capsys, *arguments: object) -> tuple[dict, str]:
    """What `show` prints: the configuration, and the rest."""
    assert isthmus(monkeypatch, "show", *arguments) == 0
    text, rest = capsys.readouterr().out.split("\n\n", 1)
    return yaml.safe_load(text), rest


def test_show_prints_the_resolved_configuration(monkeypatch, capsys, config):
    printed, _ = shown(monkeypatch, capsys, config, "--workers", 3, "--set", "train.seed=7")
    assert printed == dump(load_config(config, ["train.seed=7"], 3))
    assert printed["train"]["seed"] == 7
    assert printed["train"]["workers"] == 3


def test_show_says_how_long_a_worker_needs_to_stop(monkeypatch, capsys, config):
    _, rest = shown(monkeypatch, capsys, config, "--workers", 2, "--step-seconds", 2)
    assert "from SIGTERM to its end a worker takes up to 188.0 s: 180 s for syncs under way" in rest


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_show_counts_the_bytes_of_each_sync(monkeypatch, capsys, config, workers):
    _, rest = shown(monkeypatch, capsys, config, "--workers", workers)
    expected = ring_bytes(4 * PARAMETERS, workers) + (workers - 1) * OVERHEAD_BYTES
    assert f" {expected:,} " in rest
    assert ("--workers 2 shows what two would send" in rest) == (workers == 1)
    _, rest = shown(monkeypatch, capsys, config, "--workers", workers, "--set", "outer.recipe=ddp")
    assert f" {ring_bytes(4 * PARAMETERS, workers):,} " in rest


def test_show_counts_fragments_by_themselves(monkeypatch, capsys, config):
    sets = ["outer.schedule.num_fragments=2", "outer.split=balanced", "outer.compressor.format=float16"]
    _, rest = shown(monkeypatch, capsys, config, "--workers", 2, *[word for key in sets for word in ("--set", key)])
    for parameters in (4 * 256, 4 * 256 + 256):
        assert f" {2 * parameters + OVERHEAD_BYTES:,} " in rest  # two workers gather


def test_show_names_the_code_of_every_part(monkeypatch, capsys, config):
    _, rest = shown(monkeypatch, capsys, config, "--set", "outer.recipe=sparseloco")
    rows = dict(line.split()[:2] for line in rest.splitlines() if len(line.split()) == 2)
    assert rows["outer.recipe"] == "isthmus.recipes.sparseloco:sparseloco"
    assert rows["outer.compressor"] == "isthmus.compress.feedback:ErrorFeedback"
    assert rows["outer.compressor.compressor"] == "isthmus.compress.topk:TopK"
    assert rows["outer.compressor.compressor.values"] == "isthmus.compress.quantize:Quantize"
    assert rows["outer.optimizer"] == "torch.optim:SGD"


def test_train_alone_reports(monkeypatch, capsys, config, tmp_path):
    assert isthmus(monkeypatch, "train", config) == 0
    out, err = capsys.readouterr()
    assert "step 4/4" in err
    assert "diloco" in out
    assert (tmp_path / "run/report.png").stat().st_size > 10_000
    assert isthmus(monkeypatch, "train", config) == 2
    assert "holds a run already" in capsys.readouterr().err


@pytest.mark.parametrize("again", ["the original", "the run's own"])
def test_a_run_can_be_lengthened(monkeypatch, capsys, config, tmp_path, again):
    """What its recipe derived from the first length (a warm start of 8 steps, not 12) stays."""
    assert isthmus(monkeypatch, "train", config, "--set", "train.steps=16") == 0
    path = config if again == "the original" else tmp_path / "run/config.yaml"
    assert isthmus(monkeypatch, "train", path, "--resume", "--set", "train.steps=24") == 0
    assert "step 24/24" in capsys.readouterr().err
    kept = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert kept["train"]["steps"] == 24
    assert kept["outer"]["schedule"]["warm_start_steps"] == 8


@pytest.mark.processes
def test_what_cannot_be_resumed_is_said_before_workers_start(monkeypatch, capsys, config, tmp_path):
    assert isthmus(monkeypatch, "train", config) == 0
    log = tmp_path / "run/logs"
    for override, message in {
        "train.steps=4": f"{tmp_path}/run is finished after 4 steps: raise train.steps to train on",
        "model.arguments.hidden_size=8": "model.arguments.hidden_size is 4 there and 8 here; resume with the",
        f"data.source={tmp_path}": "data.source is",
        "train.run_dir=elsewhere": "elsewhere/checkpoints holds no usable checkpoint that all workers have",
    }.items():
        capsys.readouterr()
        assert isthmus(monkeypatch, "launch", config, "--resume", "--set", override) == 2
        assert message in capsys.readouterr().err
        assert not log.exists()


WITHOUT_HIVEMIND = """
import sys
class Absent:
    def find_spec(self, name, *rest):
        if name == "hivemind":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv = ["isthmus", "dht"]
from isthmus.cli import main
main()
"""


@pytest.mark.processes
def test_a_wheel_that_is_missing_is_named():
    ended = subprocess.run([sys.executable, "-c", WITHOUT_HIVEMIND], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (2, "error: hivemind is not installed: pip install 'isthmus[p2p]'\n")
