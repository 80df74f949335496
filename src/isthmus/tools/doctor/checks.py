"""One thing that the doctor has looked at, and what it says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    status: Status
    found: str
    advice: str = ""  # what to change; empty where all is well, or where `found` says it
