"""Real processes for the tests: torch is imported once, then every worker is a fork that ends as Python ends.

As a module: `Zygote().run(scenario, num_workers, **arguments)` runs `transport_scenarios.<scenario>(rank, ...)`, or
those of another module. As a script: the process that forks.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
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
    def __init__(self, scenarios: str = "transport_scenarios") -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, scenarios], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self,
        scenario: str,
        num_workers: int,
        within_seconds: float = 60,
        env: dict[str, str] | None = None,
        **arguments,
    ) -> list[Ended]:
        request = {"scenario": scenario, "size": num_workers, "within": within_seconds, "env": env, "args": arguments}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return [Ended(**ended) for ended in json.loads(self.process.stdout.readline())]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(10)


def _serve() -> None:
    import torch

    importlib.import_module(sys.argv[1])  # once, for all forks
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or every fork would copy all of torch's objects when it ends
    replies = os.dup(1)
    os.dup2(2, 1)  # what workers print must not mix with the replies
    for line in sys.stdin:
        ended = _run(json.loads(line))
        if ended is None:
            return  # a worker: on to Python's own end
        os.write(replies, (json.dumps(ended) + "\n").encode())


def _run(request: dict) -> list[dict] | None:
    env = {"WORLD_SIZE": str(request["size"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started, workers = time.monotonic(), {}
    for rank in range(request["size"]):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            for key, value in {**env, "RANK": str(rank), **(request["env"] or {})}.items():
                os.environ.update({key: value}) if value else os.environ.pop(key, None)
            _work(request, rank, write)
            return None
        os.close(write)
        workers[pid] = read
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


def _work(request: dict, rank: int, write: int) -> None:
    scenarios = importlib.import_module(sys.argv[1])
    outcome: dict[str, Any] = {"result": None, "error": ""}
    try:
        outcome["result"] = result = getattr(scenarios, request["scenario"])(rank, **request["args"])
        if isinstance(result, dict) and "exit_code" in result:
            sys.exit(result["exit_code"])
    except SystemExit:
        raise
    except BaseException:
        outcome["error"] = traceback.format_exc()
        raise
    finally:
        with os.fdopen(write, "w") as pipe:
            json.dump(outcome, pipe)


def _collect(pid: int, read: int, code: int | None) -> dict:
    if code is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with os.fdopen(read) as pipe:
        outcome = json.loads(pipe.read() or '{"result": null, "error": ""}')
    return {**outcome, "code": code}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _serve()
