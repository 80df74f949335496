"""Images that say which they are, in files as the Hub keeps them."""

import io
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

NUM_ROWS = 120


def picture(number: int) -> bytes:
    """As red as its number says; it gets greener to the right and bluer to the bottom."""
    pixels = np.zeros((12, 16, 3), np.uint8)
    pixels[:, :, 0] = 2 * number
    pixels[:, :, 1] = np.arange(16) * 15
    pixels[:, :, 2] = np.arange(12)[:, None] * 20
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def table(numbers, changed: dict[int, dict], label=None) -> pa.Table:
    """A label is its picture's number."""
    rows = [{"image": {"bytes": picture(number), "path": None}, "label": number} for number in numbers]
    rows = [row | changed.get(number, {}) for number, row in zip(numbers, rows, strict=True)]
    features = datasets.Features({"image": datasets.Image(), "label": label or datasets.Value("int64")})
    return pa.Table.from_pylist(rows, features.arrow_schema)


def write(
    folder: Path, num_files: int, changed: dict[int, dict] | None = None, suffix: str = "parquet", **more
) -> Path:
    """The rows, shared out to files; returns their folder."""
    folder.mkdir()
    size = NUM_ROWS // num_files
    for k in range(num_files):
        rows, path = table(range(k * size, (k + 1) * size), changed or {}, **more), folder / f"{k}.{suffix}"
        if suffix == "parquet":
            pq.write_table(rows, path, row_group_size=8)
        else:
            with pa.ipc.new_stream(path, rows.schema) as file:
                file.write_table(rows, max_chunksize=4)
    return folder


def unreadable(numbers) -> dict[int, dict]:
    """Changes of these rows."""
    return {number: {"image": {"bytes": b"no image", "path": f"{number}.png"}} for number in numbers}
