"""`isthmus export --push`: the Hub's own client, against a server of the test that speaks what the Hub does."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hub import Hub, open_hub
from tests.train.toy_runs import toy_config

from isthmus.cli import main
from isthmus.train.worker import train

TOKEN = "hf_" + "only0in0the0environment"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with open_hub() as server:
        yield server


@pytest.fixture
def run_dir(tmp_path) -> Path:
    train(toy_config(tmp_path))
    return tmp_path / "run"


@pytest.fixture
def push(run_dir, monkeypatch, capsys) -> Callable[[str], tuple[int, str, str]]:
    """`isthmus export --push` to a Hub at an address."""

    def run(endpoint: str) -> tuple[int, str, str]:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        command = ["isthmus", "export", str(run_dir), "--to", str(run_dir.parent / "toy"), "--push", "me/toy"]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        assert TOKEN not in out + err
        return caught.value.code or 0, out, err

    return run


def test_the_folder_is_uploaded_to_a_private_repository(push, tmp_path, hub):
    code, out, err = push(hub.url)
    assert code == 0, err
    assert f"uploaded to {hub.url}/me/toy" in out
    (created,) = hub.created
    assert (created["organization"], created["name"], created["visibility"]) == ("me", "toy", "private")
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "toy").iterdir()}
    assert hub.tokens == {f"Bearer {TOKEN}"}


def test_a_hub_that_refuses_is_one_line_and_the_folder_stays(push, tmp_path, hub):
    hub.refuses = True
    code, _, err = push(hub.url)
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("error: cannot push to me/toy: ")
    assert "this token may only read" in err
    assert f"upload {tmp_path}/toy by hand" in err


def test_a_hub_that_does_not_answer_is_one_line_and_the_folder_stays(push, tmp_path):
    code, _, err = push("http://127.0.0.1:9")
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("error: cannot push to me/toy: ")
    assert (tmp_path / "toy/model.safetensors").exists()
