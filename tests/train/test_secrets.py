"""Keys stay in the environment: nothing that a run leaves behind or says holds them."""

import pytest
import yaml
from tests.launched import RUN, finish
from tests.program import Program

pytestmark = pytest.mark.processes

SECRETS = {"HF_TOKEN": "hf_" + "mYvErYsEcReT" * 3, "WANDB_API_KEY": "5ec2e7" * 7}


def test_keys_are_in_no_file_and_no_line(tmp_path):
    run_dir, track = tmp_path / "run", {"tensorboard": True, "wandb": "bridges"}
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(RUN | {"track": track, "train": RUN["train"] | {"run_dir": str(run_dir), "steps": 10}})
    )
    world = SECRETS | {"WANDB_MODE": "offline"}
    said = ""
    for arguments in (["launch", tmp_path / "run.yaml", "--workers", 1], ["export", run_dir, "--to", tmp_path / "out"]):
        code, out, err = finish(Program(*arguments, **world))
        assert code == 0, err
        said += out + err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert names >= {"state.safetensors", "config.yaml", "summary.json", "worker-0.log", "README.md"}
    assert {path.suffix for path in files} >= {".wandb", ".log"}
    assert any("tfevents" in name for name in names)
    for name, secret in SECRETS.items():
        assert secret not in said, name
        for path in files:
            assert secret.encode() not in path.read_bytes(), (name, path)
