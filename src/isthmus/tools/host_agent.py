"""The far end of `isthmus launch --hosts`: it starts workers on its machine, as standard input tells it.

Requests come as lines of JSON, the first of them says of which run; what has become of the workers goes back over
standard output. Whoever launched the run is gone when standard input closes, or says nothing for half a minute: then
this process ends, and with it its workers, whose own standard input it holds.
"""

from __future__ import annotations

import json
import os
import queue
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.version import __version__

if TYPE_CHECKING:
    from isthmus.tools.fork_server import Child, ForkServer
    from isthmus.tools.mirror import Mirror

SILENCE_SECONDS = 30.0  # less than the launcher takes to regard a host as lost: or a worker would be there twice
_POLL_SECONDS = 0.2


class _Agent:
    """The workers of one machine, and what is to be told of them."""

    def __init__(self, server: ForkServer, environment: dict[str, str], mirror: Mirror | None, answers: int) -> None:
        self._server, self._environment, self._mirror, self._answers = server, environment, mirror, answers
        self._children: dict[int, Child] = {}
        self._told: set[int] = set()  # whose end was told

    def follow(self, requests: queue.Queue[dict[str, Any]]) -> None:
        """Do what is requested, and tell what has become of it, until this process ends."""
        while True:
            try:
                self._do(requests.get(timeout=_POLL_SECONDS))
            except queue.Empty:
                self._report()

    def tell(self, answer: dict[str, Any]) -> None:
        line = json.dumps(answer).encode() + b"\n"
        while line:
            line = line[os.write(self._answers, line) :]

    def _do(self, request: dict[str, Any]) -> None:
        match request:
            case {"start": int(number), "arguments": arguments, "env": env, "log": log, "name": name}:
                self._children[number] = self._server.start(arguments, self._environment | env, Path(log), name)
            case {"tell": int(number), "message": str(message)}:
                self._children[number].tell(message.encode())
            case {"kill": int(number)}:
                self._children[number].kill()
            case {"import": names}:
                self._server.import_modules(names)

    def _report(self) -> None:
        """Tell what has ended, after all that it has written."""
        ended = {number: child.poll() for number, child in self._children.items() if number not in self._told}
        for part in self._mirror.new_parts() if self._mirror else ():
            self.tell(part)
        for number, code in ended.items():
            if code is not None:
                self._children[number].close()
                self._told.add(number)
                self.tell({"ended": number, "code": code})


def _listen(requests: queue.Queue[dict[str, Any]]) -> None:
    """Hand on the requests; end this process when nobody is there any more."""
    rest = b""
    while select.select([0], [], [], SILENCE_SECONDS)[0] and (data := os.read(0, 1 << 16)):
        *lines, rest = (rest + data).split(b"\n")
        for line in filter(None, lines):  # an empty one only says that the launcher lives
            requests.put(json.loads(line))
    os._exit(1)


@contextmanager
def _rendezvous(run: dict[str, Any], port: int) -> Iterator[dict[str, Any]]:
    """Run what the workers of all hosts meet at, where this is the host that has it."""
    if run["address"] is None:
        yield {}
        return
    import yaml

    from isthmus.config import parse
    from isthmus.train.assemble import transport_class

    config = parse(yaml.safe_load(run["config"]))
    run_dir = Path(config.train.run_dir)
    with transport_class(config).serve(config.outer.transport, run_dir, run["address"], port) as served:
        yield served


def _open(run: dict[str, Any], stack: ExitStack, answers: int) -> _Agent:
    """Prepare this machine for its workers, and say that it is ready."""
    from isthmus.tools.fork_server import ForkServer

    os.environ.update(run["environment"])
    server = stack.enter_context(ForkServer())  # it imports while this process does

    from isthmus.tools.mirror import Mirror
    from isthmus.tools.workers import world_environment
    from isthmus.train.run_folder import make_run_dir
    from isthmus.transport.address import free_port

    run_dir, port = Path(run["run_dir"]), run["port"] or free_port()
    make_run_dir(run_dir / "logs")
    is_shared = (run_dir / run["token"]).exists()  # the launcher's own folder
    if not is_shared:
        (run_dir / "logs" / "config.yaml").write_text(run["config"])
    served = stack.enter_context(_rendezvous(run, port))
    environment = world_environment(run["num_ranks"])
    agent = _Agent(server, environment, None if is_shared else Mirror(run_dir, run["workers"]), answers)
    agent.tell({"ready": {"port": port, "served": served}})
    return agent


def main() -> None:
    """Be the agent of a host until the launcher is gone."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what anybody prints
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), name="isthmus-launcher", daemon=True).start()
    run = requests.get()
    if run["version"] != __version__:
        os.write(
            answers,
            json.dumps(
                {"refused": f"it has isthmus {__version__}, and this machine {run['version']}: install the same"}
            ).encode()
            + b"\n",
        )
        return
    with ExitStack() as stack:
        try:
            agent = _open(run, stack, answers)
        except Exception as error:
            from isthmus.tools.exit_codes import message_and_code

            message, _ = message_and_code(error)
            os.write(answers, json.dumps({"refused": message}).encode() + b"\n")
            return
        agent.follow(requests)


if __name__ == "__main__":
    sys.path.append("")  # the working folder, as the command line has it
    main()
