"""Files of speech in a folder, with what was said beside them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from isthmus.data.errors import TO_UTF_8, ErrorBudget
from isthmus.data.source import list_files
from isthmus.data.speech_samples import SpeechShape, as_transcript, read_header

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeechFile:
    """A recording: where it is, and what is known of it."""

    location: str  # a file, or the row of a table
    name: str  # of a file relative to the folder
    speaker: str  # where LibriSpeech's layout tells; else the name again
    num_samples: int
    text: str


def find_speech(root: Path, suffixes: Collection[str], shape: SpeechShape, budget: ErrorBudget) -> list[SpeechFile]:
    """Return all files of speech below a folder, sorted, with what was said where it is asked for.

    The texts stand beside them: in LibriSpeech's `*.trans.txt` (a line each: name, text), or in `name.txt`.

    Raises:
        UserError: one has another sample rate, or too many cannot be used.
    """
    paths = sorted(path for path in list_files(root) if path.suffix.lower() in suffixes)
    lines_in = {folder: _read_lines(folder) for folder in {path.parent for path in paths}}
    files = []
    for path in paths:
        lines, name = lines_in[path.parent], path.relative_to(root).as_posix()
        speaker = path.stem.split("-", 1)[0] if path.stem in lines else name
        try:
            num_samples, rate = read_header(path)
            shape.check_rate(str(path), rate)
            text = _transcript(path, lines) if shape.transcripts else ""
        except OSError as error:
            budget.add(str(path), error)
            continue
        files.append(SpeechFile(str(path), name, speaker, num_samples, text))
    return files


def that_fit(files: list[SpeechFile], shape: SpeechShape) -> list[SpeechFile]:
    """Return the files whose whole transcript is heard; log how many others there are."""
    fitting = [file for file in files if shape.fits(file.num_samples)]
    if len(fitting) < len(files):
        _log.warning(
            "data: %d of %d recordings are longer than %d samples and left out, as their transcripts would not fit",
            len(files) - len(fitting),
            len(files),
            shape.num_samples,
        )
    return fitting


def _read_lines(folder: Path) -> dict[str, str]:
    """{name: text} of LibriSpeech's files in a folder."""
    lines = [line for path in sorted(folder.glob("*.trans.txt")) for line in _read(path).splitlines()]
    return {name: text for name, _, text in (line.partition(" ") for line in lines)}


def _transcript(path: Path, lines: dict[str, str]) -> str:
    beside = path.with_suffix(".txt")
    if path.stem not in lines and not beside.exists():
        raise OSError("it has no transcript")
    text = as_transcript(lines[path.stem] if path.stem in lines else _read(beside))
    if not text:
        raise OSError("its transcript is empty")
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise OSError(0, f"it is not UTF-8: {TO_UTF_8}", str(path)) from error
