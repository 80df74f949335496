"""`isthmus export --push`: the Hub's own client, against a server of the test that speaks what the Hub does."""

import base64
import json
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests.train.toy_runs import toy_config

from isthmus.cli import main
from isthmus.train.worker import train

TOKEN = "hf_" + "only0in0the0environment"


class Hub(ThreadingHTTPServer):
    """Keeps what is committed to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.created: list[dict] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        self.refuses, self.url = False, f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size) if size else self._chunks()
        if self.server.refuses:
            return self._say(403, {"error": "this token may only read"})
        match self.path.partition("?")[0]:
            case "/api/repos/create":
                self.server.created.append(json.loads(body))
                return self._say(200, {"url": f"{self.server.url}/me/toy"})
            case "/api/models/me/toy/preupload/main":
                paths = [file["path"] for file in json.loads(body)["files"]]
                modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
                return self._say(200, {"files": modes})
            case "/api/models/me/toy/commit/main":
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                return self._say(200, {"commitOid": "c0ffee", "commitUrl": f"{self.server.url}/me/toy/commit/c0ffee"})
            case "/api/validate-yaml":
                return self._say(200, {"errors": [], "warnings": []})
        return self._say(404, {"error": self.path})

    def _chunks(self) -> bytes:
        body = b""
        while self.headers.get("Transfer-Encoding") == "chunked" and (size := int(self.rfile.readline(), 16)):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def _say(self, status: int, value: dict) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


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
