"""Hosts of a small internet on this machine, as network namespaces: open ones, and ones that nobody outside can reach.

Needs root, `ip` (iproute2) and nf_tables in the kernel, which pyroute2 speaks to: the program `nft` is not needed.
"""

import ctypes
import os
import struct
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

_CLONE_NEWNET = 0x40000000
_ACCEPT, _DROP = 1, 0


class Hosts:
    """Hosts on one network, each of a kind: "open"; "filtered", where connections from outside are dropped; "nat".

    A host of the kind "nat" has a private address, the same as every other one, and a router of its own.
    """

    def __init__(self, kinds: list[str]) -> None:
        self.kinds, self._prefix = kinds, f"isthmus-{os.getpid()}"
        self.addresses = [
            "192.168.1.2" if kind == "nat" else f"10.99.0.{10 + number}" for number, kind in enumerate(kinds)
        ]
        self._pools = [
            ThreadPoolExecutor(8, f"host{number}", lambda n=number: enter(self.name(n))) for number in range(len(kinds))
        ]
        self._names: list[str] = []
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def name(self, number: int | str) -> str:
        """Return the name of a host's namespace."""
        return f"{self._prefix}-{number}"

    def on(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the future of a call on a host: of a thread there, whose threads are there, too."""
        return self._pools[number].submit(function, *arguments)

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def _build(self) -> None:
        self._add("internet", "link add bridge0 type bridge", "link set bridge0 up")
        for number, kind in enumerate(self.kinds):
            self._add(number)
            outside = f"addr add 10.99.0.{10 + number}/24 dev eth0"
            if kind != "nat":
                self._join(number, "eth0", "internet", f"veth{number}", "master bridge0")
                self._ip(number, outside)
            else:
                router = f"router{number}"
                self._add(router)
                self._join(router, "eth0", "internet", f"veth{number}", "master bridge0")
                self._join(number, "eth0", router, "inside", "up")
                self._ip(router, outside, "addr add 192.168.1.1/24 dev inside")
                self._ip(number, "addr add 192.168.1.2/24 dev eth0", "route add default via 192.168.1.1")
                run_there(self.name(router), _translate)
            if kind == "filtered":
                run_there(self.name(number), _drop_new)

    def _add(self, number: int | str, *commands: str) -> None:
        subprocess.run(["ip", "netns", "add", self.name(number)], check=True)
        self._names.append(self.name(number))
        self._ip(number, "link set lo up", *commands)

    def _join(self, one: int | str, device: str, other: int | str, far: str, state: str) -> None:
        self._ip(one, f"link add {device} type veth peer name {far} netns {self.name(other)}", f"link set {device} up")
        self._ip(other, f"link set {far} {state}", f"link set {far} up")

    def _ip(self, number: int | str, *commands: str) -> None:
        for command in commands:
            subprocess.run(["ip", "-n", self.name(number), *command.split()], check=True)


def enter(name: str) -> None:
    """Move the calling thread, and the threads that it will start, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    os.close(descriptor)


def run_there(name: str, function: Callable[[], None]) -> None:
    """Call a function in a namespace."""
    with ThreadPoolExecutor(1, "namespace", lambda: enter(name)) as pool:
        pool.submit(function).result()


def skip_where_there_are_none() -> None:
    """Skip the test where this machine cannot have such hosts."""
    pytest.importorskip("pyroute2", reason="pyroute2 is not installed: pip install 'isthmus[dev]'")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    try:
        Hosts(["filtered", "nat"]).close()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"this machine has no network namespaces with nf_tables: {error}")


def _drop_new() -> None:
    """Drop what comes from outside and belongs to no connection that this host has opened."""
    from pyroute2.nftables.expressions import genex, verdict
    from pyroute2.nftables.main import NFTables

    zero = _value(bytes(4))
    is_new = [
        genex("ct", {"key": 0, "dreg": 1}),
        genex("bitwise", {"sreg": 1, "dreg": 1, "len": 4, "mask": _value(struct.pack("=I", 8)), "xor": zero}),
        genex("cmp", {"sreg": 1, "op": 1, "data": zero}),
    ]
    from_outside = [
        genex("meta", {"key": 6, "dreg": 1}),
        genex("cmp", {"sreg": 1, "op": 1, "data": _value(b"lo".ljust(16, b"\0"))}),
    ]
    with NFTables(nfgen_family=1) as nft:
        nft.table("add", name="filter")
        nft.chain("add", table="filter", name="in", hook="input", type="filter", policy=_ACCEPT)
        nft.rule("add", table="filter", chain="in", expressions=(from_outside, is_new, verdict(_DROP)))


def _translate() -> None:
    """Forward what comes from inside under this router's own address."""
    from pyroute2.nftables.expressions import genex, masq
    from pyroute2.nftables.main import NFTables

    with open("/proc/sys/net/ipv4/ip_forward", "w") as switch:
        switch.write("1")
    outwards = [
        genex("meta", {"key": 7, "dreg": 1}),
        genex("cmp", {"sreg": 1, "op": 0, "data": _value(b"eth0".ljust(16, b"\0"))}),
    ]
    with NFTables(nfgen_family=1) as nft:
        nft.table("add", name="nat")
        nft.chain("add", table="nat", name="out", hook="postrouting", type="nat", priority=100, policy=_ACCEPT)
        nft.rule("add", table="nat", chain="out", expressions=(outwards, masq()))


def _value(data: bytes) -> dict[str, Any]:
    return {"attrs": [("NFTA_DATA_VALUE", data)]}
