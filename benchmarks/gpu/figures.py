"""What a part of the benchmark finds: figures, some of which have a goal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A figure that was measured, beside what it should be on an H100 or better."""

    what: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    details: Any = None  # for the JSON file

    @property
    def goal(self) -> str:
        """What the figure should be, in words; empty where nothing is asked of it."""
        if self.at_most is not None:
            return f"<= {self.at_most:g}{self.unit}"
        return "" if self.at_least is None else f">= {self.at_least:g}{self.unit}"

    def verdict(self, on_gpu: bool) -> str:
        """Say whether the goal is met, which only a GPU can show."""
        if not self.goal:
            return ""
        if not on_gpu:
            return "waits for a GPU"
        is_met = self.value <= self.at_most if self.at_most is not None else self.value >= (self.at_least or 0.0)
        return "met" if is_met else "missed"

    def row(self, part: str, on_gpu: bool) -> list[str]:
        """Return the figure's line of the table."""
        return [part, self.what, f"{self.value:,.4g}{self.unit}", self.goal, self.verdict(on_gpu)]
