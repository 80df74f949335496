"""Recordings whose length says which they are, in Parquet files with FLAC in them, as the Hub keeps them."""

import io
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
import torch

from isthmus.data.speech_samples import VOCABULARY

RATE, SIZE, ROWS = 16_000, 4000, 40
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def tone(number: int) -> np.ndarray:
    """A sound that no other number has, and of another length."""
    return (0.3 * np.sin(2 * np.pi * (200 + 10 * number) * np.arange(3000 + number) / RATE)).astype(np.float32)


def flac(sound: np.ndarray, rate: int = RATE) -> dict[str, bytes | None]:
    file = io.BytesIO()
    soundfile.write(file, sound, rate, format="FLAC")
    return {"bytes": file.getvalue(), "path": None}


def said(number: int) -> str:
    return f"{WORDS[number // 10]} {WORDS[number % 10]}"


def write(folder: Path, changed: dict[int, dict] | None = None, name: str = "speech") -> str:
    """Writes rows, which a test may have changed; returns the path."""
    rows = [{"audio": flac(tone(number)), "text": said(number)} for number in range(ROWS)]
    for number, change in (changed or {}).items():
        rows[number] |= change
    features = datasets.Features({"audio": datasets.Audio(), "text": datasets.Value("string")})
    path = folder / f"{name}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, features.arrow_schema), path)
    return str(path)


def numbers(batch) -> list[int]:
    """Which recordings a batch holds."""
    return (batch["length"] - 3000).tolist()


def text_of(row: torch.Tensor) -> str:
    return "".join(VOCABULARY[number] for number in row.tolist() if number >= 0).replace("|", " ").lower()
