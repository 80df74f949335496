"""The endpoint of every worker, asked by a real client while a real run goes on; the dashboard asks it nothing else."""

import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
import yaml
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from tests.launched import finish, wait_until
from tests.program import Program
from toy_runs import toy_config
from worker_processes import events

from isthmus.core import UserError
from isthmus.train.metrics import Totals
from isthmus.train.trackers.prometheus import COUNTERS, GAUGES, Prometheus
from isthmus.train.worker import train
from isthmus.transport.address import free_port

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/isthmus.json"
RUN = {
    "model": {
        "type": "module",
        "path": "tests.train.tiny:Paced",
        "arguments": {"hidden_size": 4},
        "sequence_length": 8,
    },
    "data": {"type": "text", "source": str(ROOT / "src/isthmus/core")},
    "inner": {"batch_size": 2},
    "outer": {"recipe": "diloco", "schedule": {"local_steps": 5, "warm_start_steps": 0}},
    "train": {"workers": 2, "steps": 100_000, "eval_every": 10, "eval_batches": 1, "log_every": 1},
}


def free_ports() -> int:
    """The first of two ports that are free."""
    while True:
        port = free_port()
        with socket.socket() as second, suppress(OSError):
            second.bind(("127.0.0.1", port + 1))
            return port


def ask(port: int, path: str, accept: str = "*/*") -> tuple[str, str]:
    """Body and type of an answer."""
    with urlopen(Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept}), timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def values(port: int) -> dict[str, float]:
    """What a worker says now: samples by name, evaluations by what was measured."""
    families = text_string_to_metric_families(ask(port, "/metrics")[0])
    return {s.labels.get("measure", s.name): s.value for family in families for s in family.samples}


@dataclass
class Watched:
    """What two workers told in the middle of a run, and what their metrics files held before and after."""

    text: list[str] = field(default_factory=list)
    said: list[dict[str, float]] = field(default_factory=list)
    health: list[dict] = field(default_factory=list)
    before: list[list[dict]] = field(default_factory=list)
    after: list[list[dict]] = field(default_factory=list)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder, port = tmp_path_factory.mktemp("watched"), free_ports()
    run, told = folder / "bridge", Watched()
    arguments = RUN["model"]["arguments"] | {"go": str(folder / "never")}
    values_of = RUN | {"model": RUN["model"] | {"arguments": arguments}, "track": {"prometheus_port": port}}
    values_of["train"] = RUN["train"] | {"run_dir": str(run)}
    (folder / "run.yaml").write_text(yaml.safe_dump(values_of))
    launcher = Program("launch", folder / "run.yaml")
    try:
        files = [run / f"metrics/worker-{worker}.jsonl" for worker in (0, 1)]
        wait_until(lambda: all(path.exists() and path.read_text().count('"sync"') >= 3 for path in files))
        for worker in (0, 1):
            told.before.append(events(run, worker))
            told.text.append(ask(port + worker, "/metrics")[0])
            told.said.append(values(port + worker))
            told.health.append(json.loads(ask(port + worker, "/healthz")[0]))
            wait_until(lambda: len(events(run, worker)) > len(told.before[worker]) + 2)  # noqa: B023
            told.after.append(events(run, worker))
        launcher.send_signal(signal.SIGINT)
        assert finish(launcher)[0] == 75
        yield told
    finally:
        launcher.kill()


def counted(lines: list[dict], kind: str, value: str) -> float:
    return sum(event[value] for event in lines if event["event"] == kind)


@pytest.mark.processes
@pytest.mark.parametrize("worker", [0, 1])
def test_the_figures_are_those_of_the_metrics_file(watched, worker):
    said, before, after = watched.said[worker], watched.before[worker], watched.after[worker]
    for name in ("sent_bytes", "received_bytes"):
        low, high = (counted(lines, "sync", name) for lines in (before, after))
        assert 0 < low <= said[f"isthmus_{name}_total"] <= high
    for name, value in (("isthmus_step", "step"), ("isthmus_tokens_total", "tokens")):
        steps = [[event for event in lines if event["event"] == "step"][-1][value] for lines in (before, after)]
        assert steps[0] <= said[name] <= steps[1]
    assert said["isthmus_loss"] in [event["loss"] for event in after if event["event"] == "step"]
    assert said["isthmus_committed_syncs_total"] == said["isthmus_syncs_total"] >= 3
    assert said["isthmus_outer_version"] in (said["isthmus_syncs_total"], said["isthmus_syncs_total"] - 1)
    assert (said["isthmus_alive"], said["isthmus_participating"], said["isthmus_peers"]) == (1, 1, 2)
    assert 0 <= said["isthmus_hidden_share"] <= 1
    assert said["isthmus_faults_total"] == 0
    assert ("loss" in said) == (worker == 0)  # only worker 0 evaluates


@pytest.mark.processes
def test_every_figure_is_told_with_its_labels_and_what_it_means(watched):
    families = {family.name: family for family in text_string_to_metric_families(watched.text[1])}
    assert {name.removeprefix("isthmus_") for name in families} == {*GAUGES, *COUNTERS, "evaluation"}
    for family in families.values():
        assert family.documentation
        for sample in family.samples:
            assert (sample.labels["run"], sample.labels["worker"]) == ("bridge", "1")


@pytest.mark.processes
def test_health_in_a_few_words(watched):
    for health in watched.health:
        assert health["alive"] is True
        assert health["participating"] is True
        assert health["committed_syncs"] >= 3
        assert health["step"] >= 15
        assert 0 <= health["seconds_since_last_event"] < 60


@pytest.mark.processes
def test_ready_only_when_it_takes_part_and_the_port_is_the_one_that_was_given(tmp_path):
    ports, world = [free_port(), free_port()], {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    world["MASTER_PORT"] = str(free_port())
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(RUN | {"model": RUN["model"] | {"path": "tests.train.tiny:Bigram"}})
    )
    sets = ["--set", "model.arguments={hidden_size: 4}", "--set", f"train.run_dir={tmp_path}/run"]
    workers = []

    def start(rank: int) -> None:
        port = f"track.prometheus_port={ports[rank]}"
        workers.append(Program("train", tmp_path / "run.yaml", *sets, "--set", port, **world, RANK=str(rank)))

    def status(rank: int, path: str) -> int:
        with suppress(URLError):
            try:
                with urlopen(f"http://127.0.0.1:{ports[rank]}{path}", timeout=10) as answer:
                    return answer.status
            except HTTPError as error:
                return error.code
        return 0

    try:
        start(0)
        wait_until(lambda: status(0, "/healthz") == 200)
        assert status(0, "/readyz") == 503  # it waits for worker 1
        start(1)
        wait_until(lambda: status(0, "/readyz") == status(1, "/readyz") == 200)
        workers[0].send_signal(signal.SIGTERM)
        assert [finish(worker)[0] for worker in workers] == [75, 75]
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.processes
def test_the_dashboard_asks_for_figures_that_exist(watched):
    panels = json.loads(DASHBOARD.read_text())["panels"]
    exported = set(re.findall(r"^(isthmus_\w+)[{ ]", watched.text[0], re.MULTILINE))
    asked = set()
    for panel in panels:
        for target in panel["targets"]:
            names = re.findall(r"isthmus_\w+", target["expr"])
            assert names
            assert set(names) <= exported, panel["title"]
            asked |= set(names)
    assert exported == asked
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_panels_of_the_dashboard_do_not_overlap():
    taken = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        box = panel["gridPos"]
        cells = {(box["x"] + i, box["y"] + j) for i in range(box["w"]) for j in range(box["h"])}
        assert not cells & taken, panel["title"]
        assert box["x"] + box["w"] <= 24
        taken |= cells


@pytest.fixture
def endpoint() -> Iterator[tuple[int, Prometheus]]:
    port = free_ports()
    tracker = Prometheus(port, {"run": "a", "worker": "0"}, 10)
    yield port, tracker
    tracker.close()


def test_before_the_first_step_it_answers_already(endpoint):
    port, _ = endpoint
    said = values(port)
    assert (said["isthmus_alive"], said["isthmus_participating"], said["isthmus_planned_steps"]) == (1, 0, 10)
    assert "isthmus_loss" not in said


def test_averaged_gradients_are_no_outer_step(endpoint):
    port, tracker = endpoint
    tracker.begin(9, Totals(steps=9))
    for outer_step, norm in ((0, 0.5), (-1, 7.0)):
        figures = {"committed": True, "num_peers": 2, "norm": norm, "cosine": 0.1}
        tracker.take("sync", {"step": 9, "outer_step": outer_step, **figures})
    said = values(port)
    assert (said["isthmus_outer_version"], said["isthmus_pseudo_gradient_norm"]) == (1, 0.5)


def test_a_refused_sync_is_no_participation_and_keeps_the_version(endpoint):
    port, tracker = endpoint
    totals = Totals(steps=9, num_syncs=3, refused_syncs=1)
    tracker.begin(9, totals)
    for outer_step, committed in ((0, True), (1, True), (2, False)):
        values_of = {"step": 9, "outer_step": outer_step, "committed": committed, "num_peers": 2}
        tracker.take("sync", values_of | {"norm": 0.5, "cosine": 0.1})
    tracker.take("fault", {"step": 9, "reason": "lost"})
    said = values(port)
    assert (said["isthmus_participating"], said["isthmus_outer_version"], said["isthmus_faults_total"]) == (0, 2, 1)
    assert (said["isthmus_committed_syncs_total"], said["isthmus_inner_steps_total"]) == (2, 9)
    totals.steps += 1  # as the trainer counts on
    assert values(port)["isthmus_inner_steps_total"] == 10
    assert json.loads(ask(port, "/healthz")[0])["participating"] is False


def test_who_goes_on_is_ready_after_a_step_or_a_commit_of_its_own(endpoint):
    port, tracker = endpoint
    totals = Totals(steps=9, num_syncs=3, refused_syncs=1)
    assert not tracker.is_ready
    tracker.begin(9, totals)
    assert not tracker.is_ready
    totals.num_syncs, totals.refused_syncs = 4, 2
    with pytest.raises(HTTPError, match="503"):
        ask(port, "/readyz")
    totals.num_syncs = 5
    assert json.loads(ask(port, "/readyz")[0])["ready"] is True
    tracker.begin(9, totals)
    assert not tracker.is_ready
    totals.steps += 1
    assert tracker.is_ready


def test_prometheus_own_format_is_spoken_where_it_is_asked_for(endpoint):
    body, kind = ask(endpoint[0], "/metrics", "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert {family.name for family in openmetrics.text_string_to_metric_families(body)} >= {"isthmus_alive"}


def test_other_paths_are_not_found(endpoint):
    with pytest.raises(HTTPError, match="404"):
        ask(endpoint[0], "/../etc/passwd")


def test_a_taken_port_is_one_line_and_leaves_no_run_behind(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = toy_config(tmp_path, f"track.prometheus_port={port}")
        with pytest.raises(UserError) as caught:
            train(config)
    message = f"track.prometheus_port: cannot listen on {port} (Address already in use): choose another one"
    assert str(caught.value) == message
    assert train(config)["finished"]
    assert train(toy_config(tmp_path, f"track.prometheus_port={port}", "train.steps=14"), resume=True)["finished"]


def test_a_port_that_no_machine_has_is_one_line(tmp_path):
    with pytest.raises(UserError, match="track.prometheus_port: should be less than or equal to 65535"):
        toy_config(tmp_path, "track.prometheus_port=65536")
    with pytest.raises(UserError, match=r"track.prometheus_port: cannot listen on 65536 .*: choose another one"):
        Prometheus(65536, {}, 10)


def test_all_figures_are_described():
    figures = Prometheus(free_port(), {}, 10)
    figures.take("step", {"step": 1, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0})
    figures.take("sync", {"step": 1, "outer_step": 0, "committed": True, "num_peers": 1, "norm": 1.0, "cosine": 1.0})
    assert figures.gauges().keys() == GAUGES.keys()
    assert figures.counters().keys() == COUNTERS.keys()
    figures.close()
