"""Hosts on this machine: `netlab`, which needs root and iproute2."""

from __future__ import annotations

import subprocess
from pathlib import Path

NETLAB = str(Path(__file__).with_name("netlab"))


def netlab(*arguments: str) -> None:
    """Run it; see the file itself."""
    subprocess.run([NETLAB, *arguments], check=True, capture_output=True)
