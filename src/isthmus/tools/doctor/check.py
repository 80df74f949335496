"""What the doctor says of one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]
Card = dict[str, Any]  # what a worker tells the others: plain JSON values


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    status: Status
    found: str
    advice: str = ""  # what to change; empty where all is well, or where `found` says it
