"""What being watched costs a step, and whether a real Prometheus finds what the dashboard asks for.

    python -m benchmarks.watched [--prometheus PATH]

A small GPT-NeoX trains alone, every step logged, once with each tracker and once with none, in turns. Then two workers
are scraped every second by a Prometheus server, and every expression of `deploy/grafana/isthmus.json` is asked there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from benchmarks.results import write

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "deploy/grafana/isthmus.json"
TRACKERS = {
    "none": [],
    "tensorboard": ["track.tensorboard=true"],
    "wandb, offline": ["track.wandb=isthmus"],
    "prometheus": ["track.prometheus_port=9300"],
    "all three": ["track.tensorboard=true", "track.wandb=isthmus", "track.prometheus_port=9300"],
}
REPEATS = 5
STEPS = 300
_WITHIN_SECONDS = 120


def main() -> None:
    """Measure, ask, write the results down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default=shutil.which("prometheus"), help="the server's binary")
    binary = parser.parse_args().prometheus
    milliseconds: dict[str, list[float]] = {name: [] for name in TRACKERS}
    for _ in range(REPEATS):
        for name, overrides in TRACKERS.items():
            milliseconds[name].append(step_milliseconds(overrides))
            print(name, f"{milliseconds[name][-1]:.3f} ms", flush=True)
    found = ask_prometheus(binary) if binary else {}
    plain = median(milliseconds["none"])
    rows = [[name, f"{median(v):.2f}", f"{min(v):.2f}", f"{median(v) / plain:.3f}"] for name, v in milliseconds.items()]
    notes = [
        f"Median and least of {REPEATS} runs of {STEPS} steps, all of them logged; the first 50 steps do not count."
    ]
    if found:
        answered = sum(count > 0 for count in found["series"].values())
        notes.append(
            f"{found['version']} scraped two workers every second: {found['up']} of 2 up, "
            f"{answered} of {len(found['series'])} expressions of the dashboard gave series."
        )
        notes += [f"No series: `{expression}`" for expression, count in found["series"].items() if not count]
    else:
        notes.append("No Prometheus server was asked: none is installed.")
    columns = ["tracker", "ms a step", "least", "times none"]
    print(write("watched", "What being watched costs", columns, rows, notes, {"ms": milliseconds, "prometheus": found}))


def step_milliseconds(overrides: list[str]) -> float:
    """Of one step, its part of the outer loop and its log line included."""
    with tempfile.TemporaryDirectory() as folder:
        sets = [
            "outer.transport.sync_budget_seconds=20",
            "train.log_every=1",
            "train.eval_every=0",
            f"train.steps={STEPS}",
        ]
        sets += ["train.checkpoint_every=0", f"train.run_dir={folder}/run", *overrides]
        isthmus("train", ROOT / "examples/tiny.yaml", sets, {"WANDB_MODE": "offline"})
        lines = [json.loads(line) for line in Path(folder, "run/metrics/worker-0.jsonl").read_text().splitlines()]
    seconds = {event["step"]: event["seconds"] for event in lines if event["event"] == "step"}
    return 1e3 * (seconds[STEPS] - seconds[50]) / (STEPS - 50)


def isthmus(command: str, config: Path, sets: list[str], world: dict[str, str]) -> None:
    """Run a command of the program."""
    arguments = [word for override in sets for word in ("--set", override)]
    line = [sys.executable, "-m", "isthmus", command, str(config), *arguments]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | world)


def ask_prometheus(binary: str) -> dict[str, Any]:
    """What a real server knows of two workers after half a minute."""
    with (
        tempfile.TemporaryDirectory() as folder,
        two_workers(Path(folder)) as ports,
        server(binary, folder, ports) as ask,
    ):
        deadline = time.monotonic() + _WITHIN_SECONDS
        while len(ask("isthmus_evaluation")) == 0 and time.monotonic() < deadline:
            time.sleep(1)
        time.sleep(20)
        up = sum(float(series["value"][1]) for series in ask("up"))
        panels = json.loads(DASHBOARD.read_text())["panels"]
        expressions = [target["expr"] for panel in panels for target in panel["targets"]]
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        version = (said.stdout + said.stderr).split("\n", 1)[0].split(" (")[0]
        return {"version": version, "up": int(up), "series": {each: len(ask(filled(each))) for each in expressions}}


def filled(expression: str) -> str:
    """An expression with the dashboard's variables replaced, as Grafana does it."""
    return re.sub(r"\$run|\$worker", ".*", expression).replace("$__rate_interval", "15s")


@contextmanager
def two_workers(folder: Path) -> Iterator[list[int]]:
    """A run that goes on; its ports."""
    port = free_port()
    sets = ["train.steps=1000000", "train.log_every=5", f"track.prometheus_port={port}", f"train.run_dir={folder}/run"]
    line = [sys.executable, "-m", "isthmus", "launch", str(ROOT / "examples/tiny.yaml"), "--workers", "2"]
    line += [word for override in sets for word in ("--set", override)]
    launcher = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    try:
        yield [port, port + 1]
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)


@contextmanager
def server(binary: str, folder: str, ports: list[int]) -> Iterator[Any]:
    """A Prometheus server that scrapes these ports every second; a function that asks it."""
    targets, port = [f"127.0.0.1:{port}" for port in ports], free_port()
    jobs = [{"job_name": "isthmus", "static_configs": [{"targets": targets}]}]
    config = Path(folder, "prometheus.yml")  # JSON is YAML
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
    where = [f"--config.file={config}", f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address=127.0.0.1:{port}"]
    process = subprocess.Popen([binary, *where], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(expression: str) -> list[dict[str, Any]]:
        try:
            with urlopen(
                f"http://127.0.0.1:{port}/api/v1/query?{urlencode({'query': expression})}", timeout=10
            ) as answer:
                return list(json.load(answer)["data"]["result"])
        except URLError as error:
            if isinstance(error.reason, ConnectionError):
                return []  # it has not begun yet
            raise

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
