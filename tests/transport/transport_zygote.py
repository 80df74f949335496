"""Real processes for the tests: torch is imported once, then every worker is a fork.

As a module: `Zygote().of("transport_scenarios").run(scenario, num_workers, **arguments)` runs
`transport_scenarios.<scenario>(rank, ...)` in each worker. As a script: the process that forks.
"""

import atexit
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.transport.address import free_port


@dataclass
class Ended:
    """What became of one worker."""

    result: Any  # what the scenario returned
    error: str  # traceback, empty when it returned
    code: int | None  # exit code, -9 when killed, None when it had to be stopped by the zygote
    ended_at: float | None  # on time.monotonic(), which all processes of a machine share


class Zygote:
    """The process that forks; one for all tests, started when the first of them needs it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def of(self, scenarios: str) -> "Scenarios":
        return Scenarios(self, scenarios)

    def ask(self, **request) -> Any:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(10)


@dataclass
class Scenarios:
    """The functions of one module, each to be run by all workers of a small world."""

    zygote: Zygote
    module: str

    def run(
        self,
        scenario: str,
        num_workers: int,
        within_seconds: float = 60,
        env: dict[str, str] | None = None,
        whole_end: bool = False,
        **arguments,
    ) -> list[Ended]:
        """Run a scenario in all workers.

        Args:
            scenario: name of the function.
            num_workers: how many.
            within_seconds: who has not ended then is killed.
            env: further environment variables; an empty one is removed.
            whole_end: end as Python ends, where that is what the test is about; else only what `atexit` knows is done,
                since to take torch apart costs a quarter of a second.
            arguments: of the function, after the rank.
        """
        request = {"scenario": scenario, "size": num_workers, "within": within_seconds, "env": env, "args": arguments}
        request["whole_end"] = whole_end
        return [Ended(**ended) for ended in self.zygote.ask(module=self.module, **request)]

    def start(self, scenario: str, **arguments) -> int:
        """Start one worker that nobody waits for, and that the test kills; returns its process id."""
        request = {"scenario": scenario, "size": 1, "within": None, "env": None, "args": arguments}
        request["whole_end"] = False
        return self.zygote.ask(module=self.module, **request)


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    replies = os.dup(1)
    os.dup2(2, 1)  # what workers print must not mix with the replies
    started = []  # that nobody waits for
    for line in sys.stdin:
        request = json.loads(line)
        if request["module"] not in sys.modules:
            gc.disable()  # it takes a tenth of the time, and finds nothing
            importlib.import_module(request["module"])  # once, for all forks
            gc.freeze()  # or every fork would copy all of torch's objects when it ends
            gc.enable()
        reply = _run(request)
        started += [reply] if isinstance(reply, int) else []
        os.write(replies, (json.dumps(reply) + "\n").encode())
    for pid in started:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _run(request: dict) -> list[dict] | int:
    env = {"WORLD_SIZE": str(request["size"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started, workers = time.monotonic(), {}
    for rank in range(request["size"]):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            for key, value in {**env, "RANK": str(rank), **(request["env"] or {})}.items():
                os.environ.update({key: value}) if value else os.environ.pop(key, None)
            code = _work(request, rank, write)
            if not request["whole_end"]:
                atexit._run_exitfuncs()
                sys.stderr.flush()
                os._exit(code)
            sys.exit(code)
        os.close(write)
        workers[pid] = read
    if request["within"] is None:
        return next(iter(workers))
    codes, ends = {}, {}
    while time.monotonic() < started + request["within"]:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid], ends[pid] = os.waitstatus_to_exitcode(status), time.monotonic()
        if all(_stopped(pid) for pid in workers.keys() - ends.keys()):
            break
        time.sleep(0 if pid else 0.01)
    return [{**_collect(pid, read, codes.get(pid)), "ended_at": ends.get(pid)} for pid, read in workers.items()]


def _stopped(pid: int) -> bool:
    """SIGSTOP came and SIGCONT did not."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def _work(request: dict, rank: int, write: int) -> int:
    """Run the scenario, and return the exit code."""
    scenarios = sys.modules[request["module"]]
    outcome: dict[str, Any] = {"result": None, "error": ""}
    try:
        outcome["result"] = result = getattr(scenarios, request["scenario"])(rank, **request["args"])
        code = result.get("exit_code", 0) if isinstance(result, dict) else 0
    except BaseException:
        outcome["error"], code = traceback.format_exc(), 1
        traceback.print_exc()
    with os.fdopen(write, "w") as pipe:
        json.dump(outcome, pipe)
    return code


def _collect(pid: int, read: int, code: int | None) -> dict:
    if code is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with os.fdopen(read) as pipe:
        outcome = json.loads(pipe.read() or '{"result": null, "error": ""}')
    return {**outcome, "code": code}


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    _serve()
