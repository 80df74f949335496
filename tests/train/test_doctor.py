"""`isthmus doctor` with real workers: what is amiss is named by all of them alike."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from isthmus.cli import app
from isthmus.recipes import load_config
from isthmus.tools.doctor import doctor
from isthmus.tools.doctor.compare import compare_clocks, judge_links, readable_bits
from isthmus.tools.doctor.examine import rounds
from isthmus.tools.doctor.link import Link
from isthmus.transport.address import free_port
from isthmus.transport.torchft.lighthouse import lighthouse

ROOT = Path(__file__).parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["isthmus.tools.doctor", "isthmus.transport.torch_dist", "isthmus.recipes"])
RUN: dict[str, Any] = {
    "model": {
        "type": "module",
        "path": "tests.train.tiny:Bigram",
        "arguments": {"hidden_size": 4},
        "sequence_length": 8,
    },
    "data": {"type": "text", "source": str(ROOT / "src/isthmus/core")},
    "inner": {"batch_size": 2},
    "outer": {
        "recipe": "diloco",
        "schedule": {"local_steps": 5, "warm_start_steps": 0},
        "transport": {"type": "torch_dist", "sync_budget_seconds": 20},
    },
    "train": {"eval_batches": 1, "workers": 2},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | {"train": RUN["train"] | {"run_dir": str(tmp_path / "run")}}))
    return path


def examine(
    config: Path, overrides: list[list[str]], seconds_ahead: tuple[float, ...] = (0, 0, 0), common: tuple[str, ...] = ()
) -> list[tuple[int, str]]:
    """Exit code and output of each worker; the number of workers is that of the overrides."""
    environment = {"WORLD_SIZE": str(len(overrides)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    results = CONTEXT.SimpleQueue()
    processes = [
        CONTEXT.Process(
            target=work, args=(results, config, environment | {"RANK": str(rank)}, [*common, *own], seconds_ahead[rank])
        )
        for rank, own in enumerate(overrides)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    assert not late
    found = {rank: (code, text) for rank, code, text in (results.get() for _ in processes)}
    return [found[rank] for rank in range(len(processes))]


def work(results: Any, config: Path, environment: dict[str, str], overrides: list[str], seconds_ahead: float) -> None:
    os.environ.update(environment)
    console = Console(file=io.StringIO(), width=1000, highlight=False)
    code = doctor(load_config(config, overrides), console, lambda: time.time() + seconds_ahead)
    results.put((int(environment["RANK"]), code, console.file.getvalue()))


def line(text: str, check: str) -> str:
    """The row of one check."""
    (found,) = [row for row in text.splitlines() if row.strip().startswith(check)]
    return found


@pytest.mark.processes
def test_all_is_well(config: Path) -> None:
    (code, text), other = examine(config, [[], []])
    assert (code, other[0]) == (0, 0)
    assert text.rstrip().endswith("all is well")
    for check in ("run folder", "disk", "data", "host name", "rendezvous", "configuration", "clocks", "sync", "pace"):
        assert " ok " in line(text, check)
    assert "bit/s" in line(text, "worker-0")


@pytest.mark.processes
def test_every_pair_of_three_is_measured(config: Path) -> None:
    results = examine(config, [[], [], []], common=("train.workers=3",))
    assert [code for code, _ in results] == [0, 0, 0]
    rows = [row.split()[:2] for row in results[0][1].splitlines() if row.strip().startswith("worker-")]
    assert rows == [["worker-0", "worker-1"], ["worker-0", "worker-2"], ["worker-1", "worker-2"]]


@pytest.mark.processes
def test_different_configurations_and_a_clock_five_minutes_ahead(config: Path) -> None:
    results = examine(config, [[], ["inner.batch_size=3"]], seconds_ahead=(0, 300))
    assert [code for code, _ in results] == [2, 2]
    for _, text in results:
        assert "workers differ in inner.batch_size: worker-0 has 2, worker-1 has 3" in line(text, "configuration")
        assert " fail " in line(text, "configuration")
        assert "worker-1 is 300.0 s ahead of worker-0" in line(text, "clocks")
        assert " fail " in line(text, "clocks")


@pytest.mark.processes
def test_a_run_folder_that_cannot_be_written_is_reported_to_all(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    results = examine(config, [[], [f"train.run_dir={tmp_path / 'file' / 'run'}"]])
    assert [code for code, _ in results] == [2, 2]
    for _, text in results:
        bad = [row for row in text.splitlines() if row.strip().startswith("run folder") and " fail " in row]
        assert len(bad) == 1
        assert f"worker-1 fail {tmp_path / 'file' / 'run'}: Not a directory" in " ".join(bad[0].split())


@pytest.mark.processes
def test_over_torchft(config: Path) -> None:
    with lighthouse("127.0.0.1:0", grace_seconds=5) as port:
        common = ("outer.transport.type=torchft", f"outer.transport.lighthouse=127.0.0.1:{port}")
        source = f"data.source={ROOT / 'src/isthmus/compress'}"
        results = examine(config, [[], [source]], seconds_ahead=(0, -5), common=common)
    assert [code for code, _ in results] == [2, 2]
    for _, text in results:
        assert "worker-1 is 5.0 s behind worker-0" in line(text, "clocks") or (
            "worker-0 is 5.0 s ahead of worker-1" in line(text, "clocks")
        )
        assert " warn " in line(text, "clocks")
        assert " fail " in line(text, "samples")


@pytest.mark.processes
def test_a_lighthouse_that_is_not_there(config: Path) -> None:
    port = free_port()
    common = (
        "outer.transport.type=torchft",
        f"outer.transport.lighthouse=127.0.0.1:{port}",
        "outer.transport.sync_budget_seconds=1",
    )
    ((code, text),) = examine(config, [[]], common=common)
    assert code == 1
    assert f"no lighthouse answers at 127.0.0.1, port {port} (Connection refused)" in line(text, "rendezvous")


@pytest.mark.processes
def test_a_worker_that_does_not_come(config: Path) -> None:
    with lighthouse("127.0.0.1:0", grace_seconds=0.2) as port:
        common = (
            "outer.transport.type=torchft",
            f"outer.transport.lighthouse=127.0.0.1:{port}",
            "outer.transport.sync_budget_seconds=0.5",
        )
        ((code, text),) = examine(config, [[]], common=common)
    assert code == 1
    assert "the workers did not meet within 5 s" in line(text, "meeting")
    assert "1 of train.workers = 2 workers are here (worker-0)" in text


def test_a_port_in_use_and_a_name_without_address(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        advice = {"127.0.0.1": "set MASTER_PORT to a free one", "no-such-host.invalid": "correct MASTER_ADDR"}
        for address, message in advice.items():
            monkeypatch.setenv("MASTER_ADDR", address)
            console = Console(file=io.StringIO(), width=1000)
            assert doctor(load_config(config), console) == 1
            assert message in line(console.file.getvalue(), "rendezvous")


def test_one_worker_alone(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    result = CliRunner().invoke(app, ["doctor", str(config), "--set", "train.workers=1"])
    assert result.exit_code == 0
    assert "all is well" in result.output


@pytest.mark.processes
def test_workers_on_this_machine(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["doctor", str(config), "--workers", "2"])
    assert (result.exit_code, capfd.readouterr().out.rstrip()[-11:]) == (0, "all is well")


@pytest.mark.parametrize("count", range(1, 8))
def test_rounds_hold_every_pair_once_and_nobody_twice_in_one(count: int) -> None:
    names = [f"worker-{k}" for k in range(count)]
    plan = rounds(names)
    assert sorted(pair for pairs in plan for pair in pairs) == list(combinations(names, 2))
    assert all(len({name for pair in pairs for name in pair}) == 2 * len(pairs) for pairs in plan)


def link(here: str, there: str, ahead: float = 0.0, rate: float = 1e6, round_trip: float = 0.1) -> Link:
    return Link(here, there, round_trip, 10 * rate, rate, ahead)


def test_of_three_clocks_the_odd_one_is_named() -> None:
    check = compare_clocks([link("a", "b", 100.0), link("a", "c", 100.5), link("b", "c", 0.5)], ["a", "b", "c"])
    assert (check.status, check.found) == ("fail", "a is 100.0 s behind b")


@pytest.mark.parametrize(("count", "status"), [(9_600_000, "ok"), (39_600_000, "warn"), (79_600_000, "fail")])
def test_what_the_slowest_link_means(config: Path, count: int, status: str) -> None:
    run = load_config(config, ["outer.transport.sync_budget_seconds=60"])
    sync, pace = judge_links([link("a", "b"), link("a", "c", rate=1e9)], {"all": count}, run)
    assert sync.status == status
    assert f"over the slowest link, 8 Mbit/s (a, b): {count / 1e6 + 0.4:.2g} s of the 60 s" in sync.found
    if status == "ok":  # 10 s every 5 steps are 10 % of the time where 5 steps take 90 s
        assert pace.found.endswith("every 5 inner steps: under 10% of the time where one takes 18 s")


def test_an_overlapped_sync_hides_behind_steps(config: Path) -> None:
    overlapped = load_config(config, ["outer.schedule.overlap_steps=4"])
    _, pace = judge_links([link("a", "b")], {"all": 1_600_000}, overlapped)
    assert pace.found == "a sync hides behind 4 inner steps where one takes 0.5 s or more"


@pytest.mark.parametrize(("rate", "text"), [(12.5, "100 bit/s"), (12.5e6, "100 Mbit/s"), (1.25e9, "10 Gbit/s")])
def test_bandwidths_are_readable(rate: float, text: str) -> None:
    assert readable_bits(rate) == text
