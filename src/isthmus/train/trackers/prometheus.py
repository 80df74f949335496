"""A worker's figures for Prometheus: `/metrics`, read when it asks for them.

Beside them are `/healthz` for whoever restarts it, and `/readyz` for whoever waits until it takes part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from isthmus.core import UserError
from isthmus.train.metrics import Totals
from isthmus.train.trackers.base import Tracker, need

_PREFIX = "isthmus_"


GAUGES = {
    "alive": "1 while the worker runs",
    "participating": "1 where the last sync was committed",
    "peers": "workers in the last sync, this one included",
    "outer_version": "the outer step that the last committed sync made, counted over all fragments",
    "step": "steps of the whole run that are done",
    "planned_steps": "steps of the whole run",
    "loss": "training loss",
    "learning_rate": "of the inner optimizer",
    "gradient_norm": "before it is clipped",
    "pseudo_gradient_norm": "of the mean of the last committed sync",
    "pseudo_gradient_cosine": "between the mean of the last committed sync and this worker's own pseudo-gradient",
    "hidden_share": "share of the time of all syncs during which training went on",
    "last_event_timestamp_seconds": "when the worker last said anything",
}
COUNTERS = {
    "inner_steps": "inner steps that this worker took",
    "skipped_steps": "of these, without a finite gradient",
    "tokens": "that this worker trained on",
    "train_seconds": "of inner and outer steps, waiting included",
    "syncs": "finished",
    "committed_syncs": "of these, committed",
    "sent_bytes": "by this worker to others",
    "received_bytes": "by this worker from others",
    "sync_seconds": "from quorum to commit, hidden or not",
    "hidden_seconds": "of these, while training went on",
    "faults": "since the process began",
}


class Prometheus(Tracker):
    """Serves a worker's figures over HTTP, on all addresses of this machine; all of them have the same labels.

    Gauges are as of the last event, counters since the run began.
    """

    name = "prometheus"

    def __init__(self, port: int, labels: Mapping[str, str], planned_steps: int) -> None:
        self.evaluation = dict[str, float]()  # what the last one found, by name; only worker 0 evaluates
        self._totals = Totals()
        self._at_start = replace(self._totals)
        self._faults = 0
        self._gauges: dict[str, float] = {"participating": 0, "outer_version": 0, "step": 0}
        self._gauges |= {"planned_steps": planned_steps, "last_event_timestamp_seconds": time.time()}
        self._client, self._labels = need("prometheus_client"), labels
        registry = self._client.CollectorRegistry()
        registry.register(self)
        try:
            self._server = _Server(("", port), partial(_Handler, registry, self))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"track.prometheus_port: cannot listen on {port} ({reason}): choose another one") from error
        Thread(target=self._server.serve_forever, name="isthmus-metrics", daemon=True).start()

    @override
    def begin(self, step: int, totals: Totals) -> None:
        self._totals, self._at_start = totals, replace(totals)
        self._gauges["step"] = step

    @override
    def take(self, event: str, values: Mapping[str, Any]) -> None:
        new: dict[str, float] = {"step": values["step"], "last_event_timestamp_seconds": time.time()}
        match event:
            case "step":
                names = {"loss": "loss", "lr": "learning_rate", "grad_norm": "gradient_norm"}
                new |= {names[name]: values[name] for name in names}
            case "sync":
                new |= {"participating": float(values["committed"]), "peers": values["num_peers"]}
                if values["committed"] and values["outer_step"] >= 0:  # else gradients were averaged
                    new |= {f"pseudo_gradient_{name}": values[name] for name in ("norm", "cosine")}
                    new["outer_version"] = max(self._gauges["outer_version"], values["outer_step"] + 1)
            case "eval":
                self.evaluation = {k: v for k, v in values.items() if isinstance(v, int | float) and k != "step"}
            case "fault":
                self._faults += 1
        self._gauges = self._gauges | new  # at once: another thread may read it

    def gauges(self) -> dict[str, float]:
        """Return those of `GAUGES` that are known."""
        totals = self._totals
        share = totals.hidden_seconds / totals.sync_seconds if totals.sync_seconds else 0.0
        return {**self._gauges, "alive": 1, "hidden_share": share}

    def counters(self) -> dict[str, float]:
        """Return all of `COUNTERS`."""
        totals = replace(self._totals)  # it grows meanwhile
        committed = totals.num_syncs - totals.refused_syncs
        own = {"inner_steps": totals.steps, "syncs": totals.num_syncs, "committed_syncs": committed}
        known = vars(totals) | own | {"faults": self._faults}
        return {name: known[name] for name in COUNTERS}

    @property
    def is_ready(self) -> bool:
        """Whether the worker takes part: it has taken a step or committed a sync since it was started."""
        now, before = self._totals, self._at_start
        committed = (now.num_syncs - now.refused_syncs) - (before.num_syncs - before.refused_syncs)
        return now.steps > before.steps or committed > 0

    def health(self) -> dict[str, Any]:
        """Return whether and how the worker trains, in a few figures."""
        gauges, counters = self.gauges(), self.counters()
        return {
            "alive": True,
            "ready": self.is_ready,
            "participating": bool(gauges["participating"]),
            "step": gauges["step"],
            "planned_steps": gauges["planned_steps"],
            "committed_syncs": counters["committed_syncs"],
            "outer_version": gauges["outer_version"],
            "seconds_since_last_event": round(time.time() - gauges["last_event_timestamp_seconds"], 3),
        }

    @override
    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """Yield all figures, as prometheus_client wants them."""
        families, labels, values = self._client.metrics_core, list(self._labels), list(self._labels.values())
        for make_family, texts, figures in (
            (families.GaugeMetricFamily, GAUGES, self.gauges()),
            (families.CounterMetricFamily, COUNTERS, self.counters()),
        ):
            for name in [name for name in texts if name in figures]:
                family = make_family(_PREFIX + name, texts[name], labels=labels)
                family.add_metric(values, figures[name])
                yield family
        text = "what the last evaluation of the anchor found"
        family = families.GaugeMetricFamily(f"{_PREFIX}evaluation", text, labels=[*labels, "measure"])
        for measure, value in self.evaluation.items():
            family.add_metric([*values, measure], value)
        yield family


class _Server(ThreadingHTTPServer):
    allow_reuse_port = False  # or two workers share a port, and each is seen now and then

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore that a client has gone."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0  # seconds; a client that says nothing holds a thread

    def __init__(self, registry: Any, figures: Prometheus, *arguments: Any) -> None:
        self._registry, self._figures = registry, figures
        super().__init__(*arguments)

    def do_GET(self) -> None:
        match urlsplit(self.path).path:
            case "/metrics":
                exposition = need("prometheus_client.exposition")
                encode, kind = exposition.choose_encoder(self.headers.get("Accept", ""))
                self._answer(200, kind, encode(self._registry))
            case "/healthz" | "/readyz" as path:
                health = self._figures.health()
                status = 200 if path == "/healthz" or health["ready"] else 503
                self._answer(status, "application/json", json.dumps(health).encode() + b"\n")
            case _:
                self._answer(404, "text/plain", b"there are /metrics, /healthz and /readyz\n")

    @override
    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: somebody asks every few seconds."""

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
