"""Which share of a link large messages get: two hosts with a round-trip time, our link beside plain TCP.

Both hosts send a message at the same time; then one does alone. Plain TCP is what the emulated link gives at most: as
many connections for each direction, in the clear, equal parts of the message on each, BBR where the system allows it.

    python -m benchmarks.link_share --links 100x300 1000x20 500x100 --write

Nothing else may run beside it; netlab needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from benchmarks.network import NETLAB, netlab
from benchmarks.results import write
from isthmus.link import Group, Identity, Link, Member
from isthmus.link.lane import num_bulk_lanes

ADDRESSES, PORT = ("10.77.0.10", "10.77.0.11"), 29560
SECRET = "for two hosts of one machine, for a minute"
WARM_UP, ROUNDS, PAUSE_SECONDS = 2, 5, 0.5
NONE = memoryview(b"")
Exchange = Callable[[memoryview, memoryview], None]


def open_group(rank: int) -> Group:
    """Connect over isthmus' link."""
    identity = Identity.from_secret(SECRET)
    link = Link(identity, lambda: [identity.fingerprint], ADDRESSES[rank], PORT, patience_seconds=30)
    members = [Member(r, f"host {r}", (address, PORT), identity.fingerprint) for r, address in enumerate(ADDRESSES)]
    return link.open("share", members, rank, 60)


def over_link(rank: int, rtt_ms: float) -> Exchange:
    """Return an exchange with the other host over isthmus' link."""
    group = open_group(rank)

    def exchange(outgoing: memoryview, incoming: memoryview) -> None:
        to_each, from_each = [NONE, NONE], [NONE, NONE]
        to_each[1 - rank], from_each[1 - rank] = outgoing, incoming
        group.exchange(to_each, from_each, 120)

    return exchange


def over_tcp(rank: int, rtt_ms: float) -> Exchange:
    """Return an exchange over plain TCP, the even connections for what the first host sends."""
    count = 2 * num_bulk_lanes(rtt_ms / 1000)
    if rank == 0:
        with socket.create_server((ADDRESSES[0], PORT)) as server:
            connections = [server.accept()[0] for _ in range(count)]
        for number, connection in enumerate(connections):
            connection.sendall(bytes([number]))
    else:
        connections = sorted([_dial() for _ in range(count)], key=lambda connection: connection.recv(1)[0])
    for connection in connections:
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")

    def exchange(outgoing: memoryview, incoming: memoryview) -> None:
        sending, receiving = connections[rank::2], connections[1 - rank :: 2]
        threads = [
            threading.Thread(target=work, args=(connection, part))
            for work, all_, message in ((_send, sending, outgoing), (_receive, receiving, incoming))
            for connection, part in zip(all_, _parts(message, len(all_)), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return exchange


def _dial() -> socket.socket:
    for _ in range(100):
        with suppress(OSError):
            return socket.create_connection((ADDRESSES[0], PORT), 10)
        time.sleep(0.1)
    raise SystemExit("the first host does not listen")


def _parts(message: memoryview, count: int) -> list[memoryview]:
    size = -(-len(message) // count)
    return [message[number * size : (number + 1) * size] for number in range(count)]


def _send(connection: socket.socket, part: memoryview) -> None:
    connection.settimeout(None)
    connection.sendall(part)


def _receive(connection: socket.socket, part: memoryview) -> None:
    connection.settimeout(None)
    while part:
        part = part[connection.recv_into(part) :]


def work(rank: int, how: str, rtt_ms: float, num_bytes: int) -> None:
    """Be one host: print the seconds of every exchange, both ways at once and one way."""
    exchange = {"isthmus": over_link, "plain TCP": over_tcp}[how](rank, rtt_ms)
    payload, into, tick = memoryview(bytes(num_bytes)), memoryview(bytearray(num_bytes)), memoryview(bytearray(1))
    for ways in ("both", "one"):
        sends, receives = ways == "both" or rank == 0, ways == "both" or rank == 1
        for number in range(WARM_UP + ROUNDS):
            time.sleep(PAUSE_SECONDS)
            exchange(tick[:1], memoryview(bytearray(1)))
            begin = time.monotonic()
            exchange(payload if sends else NONE, into if receives else NONE)
            seconds = time.monotonic() - begin
            if number >= WARM_UP and receives:
                print(json.dumps([ways, seconds]), flush=True)
    exchange(tick[:1], memoryview(bytearray(1)))
    time.sleep(PAUSE_SECONDS)  # a process that ends takes its connections away from the other one


def measure(how: str, link: str, megabytes: float) -> dict[str, list[float]]:
    """Return the seconds of all exchanges as the receiver saw them, by ways."""
    rate, rtt = link.split("x")
    netlab("up", "2", rate, rtt)
    try:
        command = [sys.executable, "-m", "benchmarks.link_share", "--links", link, "--how", how, "--mb", str(megabytes)]
        hosts = [
            subprocess.Popen([NETLAB, "exec", str(rank), *command, "--rank", str(rank)], stdout=subprocess.PIPE)
            for rank in (0, 1)
        ]
        outputs = [host.communicate(timeout=300)[0] for host in hosts]
        if any(host.returncode for host in hosts):
            raise SystemExit(f"{how} over {link} failed")
    finally:
        netlab("down")
    found: dict[str, list[float]] = {"both": [], "one": []}
    for line in outputs[1].splitlines():
        ways, seconds = json.loads(line)
        found[ways].append(seconds)
    return found


def main() -> None:
    """Measure all links, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=["100x300", "1000x20", "500x100"], metavar="MBITxMS")
    parser.add_argument("--mb", type=float, default=30.0, help="of a message")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--how", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        work(arguments.rank, arguments.how, float(arguments.links[0].split("x")[1]), int(1e6 * arguments.mb))
        return
    rows, data = [], {}
    for link in arguments.links:
        rate, rtt = map(float, link.split("x"))
        alone = 8 * arguments.mb / rate + rtt / 2000
        for how in ("isthmus", "plain TCP"):
            found = data[f"{link} {how}"] = measure(how, link, arguments.mb)
            medians = [statistics.median(found[ways]) for ways in ("both", "one")]
            shares = [f"{100 * 8 * arguments.mb / rate / seconds:.0f}" for seconds in medians]
            rows.append([f"{rate:g} Mbit/s, {rtt:g} ms", how, f"{alone:.2f}", *map("{:.2f}".format, medians), *shares])
            print(*rows[-1], flush=True)
    if arguments.write:
        columns = ["link", "over", "link alone, s", "both ways at once, s", "one way, s", "both ways, % of the link",
                   "one way, %"]  # fmt: skip
        notes = [
            f"{arguments.mb:g} MB a message; as the receiver sees it, from the moment at which both begin to its end",
            f"medians of {ROUNDS} behind {WARM_UP}; {PAUSE_SECONDS} s of idleness before each",
            "link alone: all bytes at the link's rate, and one way across; % of the link: bytes over its rate alone",
            "the emulated network's switch shares two cores with both hosts",
        ]
        print(write("link-share", "Large messages' share of a link", columns, rows, notes, data))


if __name__ == "__main__":
    main()
