"""A worker's figures for Prometheus: `/metrics`, read when it asks for them, and `/healthz` for whoever restarts it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from isthmus.core import UserError
from isthmus.train.metrics import Totals
from isthmus.train.trackers.base import Tracker, need
from isthmus.train.trackers.figures import COUNTERS, GAUGES, Figures

_PREFIX = "isthmus_"


class Prometheus(Tracker):
    """Serves the figures of a worker over HTTP, on all addresses of this machine.

    Args:
        port: to listen on.
        labels: of every figure.
        planned_steps: of the whole run.
    """

    name = "prometheus"

    def __init__(self, port: int, labels: Mapping[str, str], planned_steps: int) -> None:
        self._client = need("prometheus_client")
        self._labels = labels
        self._figures = Figures(planned_steps)
        registry = self._client.CollectorRegistry()
        registry.register(self)
        try:
            self._server = _Server(("", port), partial(_Handler, registry, self._figures))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"track.prometheus_port: cannot listen on {port} ({reason}): choose another one") from error
        Thread(target=self._server.serve_forever, name="isthmus-metrics", daemon=True).start()

    @override
    def begin(self, step: int, totals: Totals) -> None:
        self._figures.begin(step, totals)

    @override
    def take(self, event: str, values: Mapping[str, Any]) -> None:
        self._figures.take(event, values)

    @override
    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """Yield all figures, as prometheus_client wants them."""
        gauges, counters = self._figures.gauges(), self._figures.counters()
        names, values = list(self._labels), list(self._labels.values())
        for name in [name for name in GAUGES if name in gauges]:
            family = self._client.metrics_core.GaugeMetricFamily(_PREFIX + name, GAUGES[name], labels=names)
            family.add_metric(values, gauges[name])
            yield family
        for name, text in COUNTERS.items():
            family = self._client.metrics_core.CounterMetricFamily(_PREFIX + name, text, labels=names)
            family.add_metric(values, counters[name])
            yield family
        text = "what the last evaluation of the anchor found"
        family = self._client.metrics_core.GaugeMetricFamily(f"{_PREFIX}evaluation", text, labels=[*names, "measure"])
        for measure, value in self._figures.evaluation.items():
            family.add_metric([*values, measure], value)
        yield family


class _Server(ThreadingHTTPServer):
    allow_reuse_port = False  # or two workers share a port, and each is seen now and then

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore that a client has gone."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0  # seconds; a client that says nothing holds a thread

    def __init__(self, registry: Any, figures: Figures, *arguments: Any) -> None:
        self._registry, self._figures = registry, figures
        super().__init__(*arguments)

    def do_GET(self) -> None:
        match urlsplit(self.path).path:
            case "/metrics":
                exposition = need("prometheus_client.exposition")
                encode, kind = exposition.choose_encoder(self.headers.get("Accept", ""))
                self._answer(200, kind, encode(self._registry))
            case "/healthz":
                self._answer(200, "application/json", json.dumps(self._figures.health()).encode() + b"\n")
            case _:
                self._answer(404, "text/plain", b"there are /metrics and /healthz\n")

    @override
    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: somebody asks every few seconds."""

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
