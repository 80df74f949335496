"""Other machines for the workers of `isthmus launch --hosts a,b`, reached by the system's ssh.

Each has an agent (`host_agent.py`), which the launcher speaks with over ssh's standard input and output: secrets stand
on no command line. What workers need to find one another is on the first host, whatever the launching machine is: the
other hosts have to reach the first one anyway, and nobody has to reach a laptop behind a NAT.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.recipes.load import ENVIRONMENT_PREFIX
from isthmus.tools.host import Host, SshAddress
from isthmus.tools.workers import Placement, as_yaml
from isthmus.train.assemble import SERVED_OPTIONS, is_elastic
from isthmus.train.run_folder import join_summary
from isthmus.transport.address import is_loopback, resolve
from isthmus.transport.trust import SECRET
from isthmus.version import __version__

# of this machine's environment, what the workers on other machines are given
_FORWARDED = (ENVIRONMENT_PREFIX, "OMP_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "HF_", "WANDB_", "TRITON_")
_OWN = ("ISTHMUS_WORKER", "ISTHMUS_WORKER_OFFSET")


class Hosts:
    """The machines that a command line names, first of all the one that the others reach.

    Args:
        names: "a,user@b:2222".
        python: the interpreter there that has isthmus.
        address: how the other hosts reach the first one; None: by the name that ssh has for it.

    Raises:
        UserError: a name is none.
    """

    def __init__(self, names: str, python: str, address: str | None = None) -> None:
        self._addresses = [SshAddress.parse(name.strip()) for name in names.split(",")]
        self._python, self._address = python, address
        self.options = f" --hosts {names}"
        self.options += f" --python {shlex.quote(python)}" if python != sys.executable else ""
        self.options += f" --address {address}" if address else ""

    @contextmanager
    def place(self, config: RunConfig, tell: Callable[[str], None]) -> Iterator[Placement]:
        """Connect to all hosts, and share out the workers among them in order; `tell` is given lines about hosts.

        Raises:
            UserError: a host cannot be reached, or cannot run workers.
        """
        num_workers, run_dir = config.train.workers, Path(config.train.run_dir)
        shares, first = self._shares(num_workers), self._first_address()
        if config.outer.transport.get("identity") is None and SECRET not in os.environ:
            os.environ[SECRET] = secrets.token_hex(16)  # for this launch, of the workers and of what they meet at
        token = f".launched-{secrets.token_hex(8)}"  # whoever sees it shares the folder
        run = {
            "version": __version__,
            "environment": _forwarded(),
            "run_dir": str(run_dir),
            "config": as_yaml(config),
            "token": token,
        }
        with ExitStack() as stack:
            (run_dir / token).touch()
            stack.callback((run_dir / token).unlink, missing_ok=True)
            stack.callback(join_summary, run_dir, num_workers)
            hosts = []
            for number, (address, share) in enumerate(zip(self._addresses, shares, strict=True)):
                own = {"workers": list(share), "num_ranks": len(share) * config.mesh.num_ranks, "port": 0}
                own["address"] = first if number == 0 and is_elastic(config) else None
                hosts.append(stack.enter_context(Host(address, self._python, run | own, tell)))
            ready = [host.wait_until_ready() for host in hosts]
            world = _forwarded() | {
                "WORLD_SIZE": str(num_workers * config.mesh.num_ranks),
                "MASTER_ADDR": first,
                "MASTER_PORT": os.environ.get("MASTER_PORT") or str(ready[0]["port"]),
                SERVED_OPTIONS: json.dumps(ready[0]["served"]),
            }
            servers = [host for host, share in zip(hosts, shares, strict=True) for _ in share]
            yield Placement(servers, world, self.options)

    def _shares(self, num_workers: int) -> list[range]:
        """Return the workers of each host."""
        each, more = divmod(num_workers, len(self._addresses))
        if each == 0:
            few = f"{num_workers} worker{'s' if num_workers > 1 else ''}"
            raise UserError(f"{len(self._addresses)} hosts for {few}: name fewer hosts, or set --workers")
        ends = [number * each + min(number, more) for number in range(len(self._addresses) + 1)]
        return [range(start, end) for start, end in pairwise(ends)]

    def _first_address(self) -> str:
        """Return the address at which all hosts reach the first one."""
        name = self._address or self._addresses[0].hostname()
        first = resolve(name, "correct it, or say by --address how the others reach the first host")
        if is_loopback(first):
            others = [address.hostname() for address in self._addresses[1:]]
            if not all(is_loopback(resolve(other)) for other in others):
                raise UserError(f"other hosts do not reach {name} at {first}: say by --address how they do")
        return first


def _forwarded() -> dict[str, str]:
    layers = [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX) and "__" in name]
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_FORWARDED) and name not in (*layers, *_OWN)
    }
