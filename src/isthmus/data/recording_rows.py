"""Recordings in rows that are read as they come."""

from __future__ import annotations

import sys
from contextlib import suppress
from io import BytesIO
from typing import Any

from isthmus.data.formants import Sound
from isthmus.data.recordings import as_transcript, check_rate, look_into, read_part
from isthmus.data.speech import batch_of, seconds
from isthmus.data.streamed_rows import file_in
from isthmus.inner.step import Batch

Held = tuple[bytes, int, str]  # a file, how many samples it has, what is said


class RecordingRows:
    """Rows of a recording and, where it is asked for, what is said in it; see `streamed_rows.Reader`.

    Args:
        audio_column: holds the files of recordings.
        text_column: holds what is said; None leaves it out.
        sample_rate: in Hz.
        num_samples: that every recording is cut or padded to.
    """

    def __init__(self, audio_column: str, text_column: str | None, sample_rate: int, num_samples: int) -> None:
        self._audio_column, self._text_column = audio_column, text_column
        self._sample_rate, self._num_samples = sample_rate, num_samples
        self._longer = set[str]()  # where they are
        self.tokens_per_sample = seconds(num_samples, sample_rate)
        self.form = (audio_column, text_column, num_samples)

    def hold(self, columns: dict[str, Any], place: str) -> Held | None:
        """The recording's file, its length and its transcript; None where that would not fit."""
        content = file_in(columns[self._audio_column], place)
        num_samples, rate = look_into(BytesIO(content))
        check_rate(place, rate, self._sample_rate)
        if self._text_column is None:
            return content, num_samples, ""
        if num_samples > self._num_samples:
            self._count_longer(place)
            return None
        text = as_transcript(columns[self._text_column])
        if not text:
            raise TypeError("it has no transcript")
        return content, num_samples, text

    def decode(self, held: Held, seed: int | None) -> tuple[Sound, str]:
        """What is heard ([at most num_samples] float32), and what is said."""
        content, num_samples, text = held
        return read_part(BytesIO(content), num_samples, self._num_samples, seed), text

    def batch(self, samples: list[tuple[Sound, str]]) -> Batch:
        """In the form of `speech`, texts padded to the longest of the batch."""
        longest = None if self._text_column is None else max(len(text) for _, text in samples)
        return batch_of(samples, self._num_samples, longest)

    def _count_longer(self, place: str) -> None:
        known = len(self._longer)
        self._longer.add(place)
        count = len(self._longer)
        if count == known or count.bit_count() != 1:  # the first, second, fourth, ... are said
            return
        line = f"data: {place!r} is longer than {self._num_samples} samples and passed over, as its transcript would "
        with suppress(OSError):  # the log's disk is full
            print(f"{line}not fit: {count} so far", file=sys.stderr, flush=True)
