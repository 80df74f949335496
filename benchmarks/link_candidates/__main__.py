"""Which link two workers should have: candidates side by side, on loopback and between hosts with a round-trip time.

    python -m benchmarks.link_candidates --write

Each candidate is one small whole implementation in this folder of the same job: two peers send each other a message at
the same time and receive into memory that is there already, over S connections. It needs root (netlab), and `pyzmq`,
`grpcio` and `hivemind` for their candidates: what is not installed is left out, by name.
Nothing else may run beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from benchmarks.link_candidates.measure import (
    ABORT_CONNECTIONS,
    LARGE,
    PAUSE_SECONDS,
    between_hosts,
    median,
    on_loopback,
)
from benchmarks.link_candidates.pair import Candidate, hosts
from benchmarks.results import write

MBIT = 500
CANDIDATES = [
    Candidate("sockets without encryption", "sockets", "", ("encryption", "relay"), {"encrypted": False}),
    Candidate("ssl", "sockets", "", ("relay",)),
    Candidate("pyzmq, CURVE", "zmq_curve", "zmq", ("receive into memory", "relay")),
    Candidate("grpcio, mutual TLS", "grpc_tls", "grpc", ("receive into memory", "relay")),
    Candidate(
        "gloo, a context a part",
        "gloo_contexts",
        "torch",
        ("encryption", "abort", "fixed port", "dial out only", "relay"),
    ),
    Candidate("libp2p, a stream a part", "libp2p", "hivemind", ("several connections", "receive into memory")),
]
SEVERAL = Candidate("libp2p, a daemon a stream", "libp2p", "hivemind", (), {"several": True})
VARIANTS = [
    *(Candidate(f"ssl, chunks of {kib} KiB", "sockets", options={"chunk_bytes": kib << 10}) for kib in (64, 256, 1024)),
    Candidate("ssl, a thread a connection", "sockets", options={"num_threads": 0}),
    Candidate("ssl, AES-128-GCM", "sockets", ciphers="TLS_AES_128_GCM_SHA256"),
    Candidate("ssl, ChaCha20", "sockets", ciphers="TLS_CHACHA20_POLY1305_SHA256"),
]
OWN_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
CONGESTION = [
    Candidate(f"sockets without encryption, {name}", "sockets", options={"encrypted": False, "congestion": name})
    for name in ("cubic", "bbr")
    if name != OWN_CONGESTION
]
EVERY = [*CANDIDATES, SEVERAL, *VARIANTS, *CONGESTION]


def is_installed(candidate: Candidate) -> bool:
    """Whether what it needs is here."""
    return not candidate.needs or importlib.util.find_spec(candidate.needs) is not None


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run all that is chosen: by candidate, "loopback" and each round-trip time."""
    chosen = [candidate for candidate in EVERY if not arguments.only or candidate.name in arguments.only]
    installed = [candidate for candidate in chosen if is_installed(candidate)]
    for candidate in chosen:
        if candidate not in installed:
            print(f"{candidate.name} is left out: {candidate.needs} is not installed.", flush=True)
    found: dict[str, dict[str, Any]] = {candidate.name: {} for candidate in installed}

    def keep(candidate: Candidate, where: str, result: dict[str, Any]) -> None:
        found[candidate.name][where] = result
        print(candidate.name, where, result, flush=True)

    for candidate in installed:
        if candidate not in CONGESTION and not arguments.no_loopback:
            keep(candidate, "loopback", on_loopback(candidate, [1, 4], arguments.repeats + 3))
    for rtt in arguments.rtt_ms:
        with hosts(MBIT, rtt):
            for candidate in installed:
                connections = numbers_of_connections(candidate, rtt, arguments)
                if connections:
                    result = between_hosts(candidate, connections, arguments.repeats, whole=rtt > 0)
                    keep(candidate, str(rtt), result)
    return found


def numbers_of_connections(candidate: Candidate, rtt: int, arguments: argparse.Namespace) -> list[int]:
    """Return which S are worth measuring: all for candidates where connections matter, few elsewhere."""
    few = [num for num in arguments.connections if num <= 4]
    if candidate in CANDIDATES:
        return arguments.connections if rtt else few
    if candidate in CONGESTION:
        return few if rtt else []
    return few if candidate == SEVERAL and rtt == max(arguments.rtt_ms) else []


def share(seconds: float) -> str:
    """Of the link, in percent."""
    return f"{100 * 8e-6 * LARGE / MBIT / seconds:.0f}"


def by_connections(result: dict[str, Any] | None, cell: Any) -> str:
    """Cells of all numbers of connections in one."""
    cells = [cell(figures) for num, figures in (result or {}).items() if num.isdigit()]
    return " / ".join(cells) or "-"


def milliseconds(seconds: float | None) -> str:
    """In the table."""
    return "never" if seconds is None else f"{1e3 * seconds:.0f}"


def row(candidate: Candidate, found: dict[str, Any], rtts: list[int]) -> list[Any]:
    """One line of the table."""
    far = [rtt for rtt in rtts if rtt]
    last = found.get(str(rtts[-1]), {}).get("abort") if rtts else None
    abort = last and [milliseconds(last[what]) for what in ("returned", "closed", "other_knows")]
    return [
        candidate.name,
        by_connections(found.get("loopback"), lambda figures: f"{figures['mb_per_core_second']:.0f}"),
        *(by_connections(found.get(str(rtt)), lambda figures: share(median(figures["large"]))) for rtt in rtts),
        *(by_connections(found.get(str(rtt)), lambda figures: share(figures["after_pause"])) for rtt in far),
        *(by_connections(found.get(str(rtt)), lambda figures: milliseconds(median(figures["small"]))) for rtt in far),
        " / ".join(abort) if abort else "-",
        candidate.num_lines() if candidate in CANDIDATES else "",
        ", ".join(candidate.lacks) if candidate in CANDIDATES else "",
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of candidates; all when not given")
    parser.add_argument("--rtt-ms", nargs="*", type=int, default=[0, 20, 100])
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-loopback", action="store_true")
    parser.add_argument("--write", action="store_true", help="a dated file in benchmarks/results")
    arguments = parser.parse_args()
    found = measure(arguments)
    rtts = arguments.rtt_ms
    far = [rtt for rtt in rtts if rtt]
    columns = [
        "candidate",
        "MB/s a core, S = 1 / 4",
        *(f"% of the link, {rtt} ms" for rtt in rtts),
        *(f"after a pause, {rtt} ms" for rtt in far),
        *(f"0.3 MB, {rtt} ms, in ms" for rtt in far),
        "abort: returned / closed / other knows, ms",
        "lines",
        "lacks",
    ]
    rows = [row(candidate, found[candidate.name], rtts) for candidate in EVERY if candidate.name in found]
    algorithms = {figures["congestion"] for by in found.values() for figures in by.values() if "congestion" in figures}
    notes = [
        f"two hosts, a core each, {MBIT} Mbit/s; messages of {LARGE / 1e6:.0f} MB each way at once, S = "
        f"{' / '.join(map(str, arguments.connections))}, or fewer where fewer are shown; warm, medians of "
        f"{arguments.repeats}; 0 ms: veth cables",
        f"after a pause: one exchange after {PAUSE_SECONDS:.0f} s without any",
        "MB/s a core: on loopback, what a peer sends, and as much that it receives meanwhile, over its processor "
        "seconds, daemons included",
        f"abort: S = {ABORT_CONNECTIONS}, at the longest round-trip time, a second after the exchange began; never: "
        "not within 10 s",
        f"congestion control of the hosts: {', '.join(sorted(algorithms)) or '-'}",
        "lines: of the candidate's file that are not blank; headers, keys and what collects chunks are shared",
    ]
    if arguments.write:
        print(
            write("link-candidates", "Candidates for the link between workers", columns, rows, notes, found).read_text()
        )
    else:
        print("\n".join(" | ".join(map(str, line)) for line in [columns, *rows]))


if __name__ == "__main__":
    main()
