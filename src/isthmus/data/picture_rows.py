"""Labelled images in rows that are read as they come."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from isthmus.core.types import UserError
from isthmus.data.pictures import Pixels, View, batch_of, draws_of, open_image
from isthmus.data.streamed_rows import file_in
from isthmus.inner.step import Batch


class PictureRows:
    """Rows of an image and its label; see `streamed_rows.Reader`.

    Args:
        image_column: holds the files of images.
        label_column: holds the numbers of their classes.
        view: brings images to their shape.
        num_classes: that the model knows.
    """

    tokens_per_sample = 1

    def __init__(self, image_column: str, label_column: str, view: View, num_classes: int) -> None:
        self._image_column, self._label_column = image_column, label_column
        self._view, self._num_classes = view, num_classes
        self.form = (image_column, label_column)

    def hold(self, columns: dict[str, Any], place: str) -> tuple[bytes, int]:
        """The image's file, and its label."""
        label = columns[self._label_column]
        if not isinstance(label, int) or label < 0:
            raise TypeError(f"its {self._label_column} is {label!r:.40}, not a number from 0 on")
        if label >= self._num_classes:
            raise UserError(
                f"data: {place!r} has label {label}, and model.num_classes is {self._num_classes}: "
                f"raise it to {label + 1} at least"
            )
        return file_in(columns[self._image_column], place), label

    def decode(self, held: tuple[bytes, int], seed: int | None) -> tuple[Pixels, int]:
        """Pixels and label; cropped and mirrored at random by the seed, where there is one."""
        from PIL import UnidentifiedImageError

        content, label = held
        try:
            image = open_image(BytesIO(content))
        except UnidentifiedImageError as error:
            raise OSError("it is no image") from error  # Pillow names the buffer
        return self._view.of(image, draws_of(seed)), label

    def batch(self, samples: list[tuple[Pixels, int]]) -> Batch:
        """In the form of `images`."""
        return batch_of(samples)
