"""A server that speaks what the Hugging Face Hub does when a folder is uploaded to me/toy."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


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


@contextmanager
def open_hub() -> Iterator[Hub]:
    """A Hub that answers as long as the context lasts."""
    with Hub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
