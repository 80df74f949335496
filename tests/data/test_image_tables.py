"""Labelled images of the `datasets` library, from real files."""

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from isthmus.core import UserError
from isthmus.data import OrderedBatches
from isthmus.data.images import Images

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture
def pictures(tmp_path):
    """Sixty grey images in Parquet, as the Hub keeps them; image i is of brightness 4 i and of class i % 3."""
    images = [Image.fromarray(np.full((10 + i % 4, 12, 3), 4 * i, np.uint8)) for i in range(60)]
    labels = [i % 3 for i in range(60)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c", "d"])})
    path = tmp_path / "pictures.parquet"
    datasets.Dataset.from_dict({"image": images, "label": labels}, features).to_parquet(path)
    return path


def numbers(batch) -> list[int]:
    """Which images a batch holds."""
    return ((batch["image"].mean(dim=(1, 2, 3)) + 1) * 127.5 / 4).round().int().tolist()


def test_workers_read_disjoint_images_with_their_labels_and_together_all(pictures):
    data_set = Images(str(pictures), validation_fraction=0.1).open(image_size=8, num_channels=3, num_classes=4)
    assert data_set.sizes == {"num_classes": 4}
    streams = [OrderedBatches(data_set.sample_order(seed=1), 3, worker, 2) for worker in range(2)]
    batches = [next(stream) for stream in streams for _ in range(9)]
    assert batches[0]["image"].shape == (3, 3, 8, 8)
    held_out = [number for batch in data_set.validation(4) for number in numbers(batch)]
    read = [number for batch in batches for number in numbers(batch)]
    assert len(held_out) == 6
    assert sorted(read + held_out) == list(range(60))
    assert all(torch.equal(batch["label"], torch.tensor(numbers(batch)) % 3) for batch in batches)


def test_a_damaged_image_is_named_and_passed_over(pictures, caplog):
    table = pq.read_table(pictures)
    rows = table.to_pylist()
    rows[7]["image"]["bytes"] = b"no image"
    damaged = pictures.with_name("damaged.parquet")
    pq.write_table(table.from_pylist(rows, schema=table.schema), damaged)
    data_set = Images(str(damaged), validation_fraction=0.1).open(image_size=8, num_channels=1, num_classes=4)
    next(OrderedBatches(data_set.sample_order(), 54))
    data_set.validation(6)
    assert "row 7 of train" in caplog.text


def test_bad_input_is_one_line(pictures):
    for match, options in {
        "has no column 'picture', its columns are image, label: set data.image_column": {"image_column": "picture"},
        "has no column 'class'.*set data.label_column": {"label_column": "class"},
        "does not hold a number from 0 on in every row": {"label_column": "image"},
    }.items():
        with pytest.raises(UserError, match=match):
            Images(str(pictures), **options).open(8, 3, 4)
