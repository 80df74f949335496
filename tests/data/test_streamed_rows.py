"""Streamed images: who reads what, where a position is, what becomes of rows that are damaged."""

import io
import json
import tarfile
from collections import Counter

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from isthmus.core import UserError
from isthmus.core.flatten import flatten, unflatten
from isthmus.data import open_batches
from isthmus.data.images import Images
from isthmus.data.shards import reassign_shards
from isthmus.data.streamed_rows import RowBatches, StreamedRows
from isthmus.data.streaming import PrefetchedBatches
from isthmus.models import MODELS
from isthmus.recipes import load_config
from isthmus.spec import build
from isthmus.train.assemble import open_data
from tests.data.image_tables import NUM_ROWS, picture, table, unreadable, write

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that there are many."""
    monkeypatch.setattr("isthmus.data.streamed_rows.BLOCK_ROWS", 8)


def held_out_of(num_files: int, every: int = 10) -> set[int]:
    size = NUM_ROWS // num_files
    return {k * size + row for k in range(num_files) for row in range(0, size, every)}


def kept(num_files: int) -> Counter:
    return Counter(set(range(NUM_ROWS)) - held_out_of(num_files))


def open_data_set(source, num_classes: int = NUM_ROWS, **options) -> StreamedRows:
    options = {"validation_fraction": 0.1, **options}
    return Images(str(source), streaming=True, **options).open(8, 3, num_classes)


def read_until_end(stream, epoch: int) -> list[dict[str, torch.Tensor]]:
    """The batches up to the end of an epoch; the stream takes one sample at a time."""
    batches = []
    while True:
        position, batch = stream.state_dict(), next(stream)
        if stream.state_dict()["epoch"] > epoch:
            stream.load_state_dict(position)
            return batches
        batches.append(batch)


def read_epoch(stream, epoch: int = 0) -> list[int]:
    """The labels, in their order."""
    return [batch["label"].item() for batch in read_until_end(stream, epoch)]


def read_images(stream, epoch: int = 0) -> dict[int, torch.Tensor]:
    """The images by their numbers."""
    return {batch["label"].item(): batch["image"][0] for batch in read_until_end(stream, epoch)}


@pytest.mark.parametrize(("num_workers", "num_files"), [(1, 4), (2, 4), (3, 4), (2, 1), (3, 1), (5, 4)])
def test_workers_read_disjoint_rows_and_together_all_once_an_epoch(tmp_path, num_workers, num_files):
    data_set = open_data_set(write(tmp_path / "corpus", num_files))
    streams = [RowBatches(data_set, 0, 1, worker, num_workers) for worker in range(num_workers)]
    for epoch in range(2):
        read = [read_epoch(stream, epoch) for stream in streams]
        assert sum(map(Counter, read), Counter()) == kept(num_files)
        assert all(len(labels) > 10 for labels in read)


def test_a_batch_has_the_form_of_one_on_disk(tmp_path):
    folder = write(tmp_path / "corpus", 2)
    batch = next(RowBatches(open_data_set(folder), 0, 5, 0, 1))
    on_disk = Images(str(folder)).open(8, 3, NUM_ROWS).train.read(np.arange(5), np.arange(5))
    assert {name: (each.shape, each.dtype) for name, each in batch.items()} == {
        name: (each.shape, each.dtype) for name, each in on_disk.items()
    }
    assert torch.equal(((batch["image"][:, 0].mean(dim=(1, 2)) + 1) * 127.5 / 2).round().long(), batch["label"])


def test_the_order_follows_from_seed_and_epoch(tmp_path):
    data_set = open_data_set(write(tmp_path / "corpus", 4))
    stream = RowBatches(data_set, 3, 1, 0, 1)
    orders = [read_epoch(stream, epoch) for epoch in range(2)]
    assert read_epoch(RowBatches(data_set, 3, 1, 0, 1)) == orders[0]
    assert orders[0] != read_epoch(RowBatches(data_set, 4, 1, 0, 1))
    shard = [[label for label in labels if label < 30] for labels in orders]
    assert shard[0] != shard[1]
    blocks = [labels[i : i + 8] for labels in orders for i in range(0, 24, 8)]
    assert all(block != sorted(block) and max(block) - min(block) < 10 for block in blocks)


def test_crops_follow_from_seed_epoch_and_row_alone(tmp_path):
    data_set = open_data_set(write(tmp_path / "corpus", 2))
    alone = RowBatches(data_set, 0, 1, 0, 1)
    first = read_images(alone)
    halves = [read_images(RowBatches(data_set, 0, 1, worker, 2)) for worker in range(2)]
    together = halves[0] | halves[1]
    assert all(torch.equal(first[label], together[label]) for label in kept(2))
    second = read_images(alone, 1)
    assert sum(torch.equal(first[label], second[label]) for label in second) < 5
    other = read_images(RowBatches(data_set, 1, 1, 0, 1))
    assert sum(torch.equal(first[label], other[label]) for label in other) < 5


def saved(stream) -> dict:
    """As a checkpoint keeps it: without a tensor."""
    skeleton, tensors = flatten(stream.state_dict())
    assert not tensors
    return unflatten(json.loads(json.dumps(skeleton)), [])


@pytest.mark.parametrize("changed", [{}, unreadable([5, 63, 64])])
def test_identity_37_a_restored_position_goes_on_bitwise(tmp_path, changed):
    write(tmp_path / "corpus", 3, changed)
    stream = open_batches(open_data_set(tmp_path / "corpus"), 0, 5, 1, 2)
    assert isinstance(stream, PrefetchedBatches)
    taken = set[int]()
    for _ in range(15):  # more than two epochs
        state = saved(stream)
        taken |= {len(piece["taken"]) for piece in state["pieces"]}
        resumed = open_batches(open_data_set(tmp_path / "corpus"), 0, 5, 1, 2)
        next(resumed)
        resumed.load_state_dict(state)
        for _ in range(2):
            expected, batch = next(stream), next(resumed)
            assert all(torch.equal(batch[name], expected[name]) for name in ("image", "label"))
        resumed.close()
    assert state["epoch"] >= 2
    assert taken - {0, 8}, "in the middle of blocks"
    assert max(taken) <= 8
    stream.close()


def test_a_position_is_small(tmp_path, monkeypatch):
    monkeypatch.setattr("isthmus.data.streamed_rows.BLOCK_ROWS", 256)
    stream = RowBatches(open_data_set(write(tmp_path / "corpus", 4)), 0, 25, 0, 1)
    next(stream)
    assert len(json.dumps(saved(stream))) < 2000


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 4)])
@pytest.mark.parametrize("num_files", [1, 6])
@pytest.mark.parametrize("ahead", [False, True])
def test_another_number_of_workers_reads_on_without_loss(tmp_path, before, after, num_files, ahead):
    data_set = open_data_set(write(tmp_path / "corpus", num_files))
    streams = [RowBatches(data_set, 0, 1, worker, before) for worker in range(before)]
    read = Counter[int]()
    for worker, stream in enumerate(streams):
        for _ in range(7 + worker + (110 // before if ahead and worker == 0 else 0)):  # one may be an epoch ahead
            read.update(next(stream)["label"].tolist())
    num_epochs = 1 + max(stream.state_dict()["epoch"] for stream in streams)
    states = reassign_shards([saved(stream) for stream in streams], after)
    assert any(piece["taken"] for state in states for piece in state["pieces"])
    for worker in range(after):
        stream = RowBatches(data_set, 0, 1, worker, after)
        stream.load_state_dict(states[worker])
        read.update(read_epoch(stream, num_epochs - 1))
    assert read == Counter(dict.fromkeys(kept(num_files), num_epochs))
    assert num_epochs == 1 + ahead


def test_validation_is_fixed_and_held_out(tmp_path):
    batches = open_data_set(write(tmp_path / "corpus", 4)).validation(batch_size=2, num_samples=5)
    assert [batch["label"].tolist() for batch in batches] == [[0, 10], [20, 30], [40]]
    again = open_data_set(tmp_path / "corpus").validation(batch_size=7, num_samples=5)
    assert torch.equal(again[0]["image"], torch.cat([batch["image"] for batch in batches]))
    on_disk = Images(str(tmp_path / "corpus")).open(8, 3, NUM_ROWS).train
    (place,) = np.flatnonzero(on_disk.read(np.arange(len(on_disk)), None)["label"] == 10)
    assert torch.equal(again[0]["image"][1], on_disk.read(np.array([place]), None)["image"][0])


def test_a_named_validation_split_holds_nothing_out(tmp_path, caplog):
    folder = write(tmp_path / "corpus", 1)
    (folder / "0.parquet").rename(folder / "train.parquet")
    pq.write_table(table(range(3, 9), {4: {"image": None}}), folder / "validation.parquet")
    data_set = open_data_set(folder, validation_split="validation")
    assert sorted(read_epoch(RowBatches(data_set, 0, 1, 0, 1))) == list(range(NUM_ROWS))
    (batch,) = data_set.validation(batch_size=4, num_samples=4)
    assert batch["label"].tolist() == [3, 5, 6, 7]
    assert "'row 1 of shard 0" in caplog.text


def test_a_damaged_row_is_named_and_passed_over_up_to_a_limit(tmp_path, caplog):
    cut = {"bytes": picture(33)[:60], "path": None}
    changed = unreadable([7]) | {33: {"image": cut}, 34: {"image": None}, 35: {"label": -1}}
    folder = write(tmp_path / "corpus", 2, changed)
    stream = RowBatches(open_data_set(folder, max_bad_samples=4), 0, 1, 0, 1)
    for epoch in range(2):  # in the second they are known, and no longer counted
        assert Counter(read_epoch(stream, epoch)) == kept(2) - Counter(list(changed))
    told = caplog.text
    for row, why in {7: "it is no image", 33: "", 34: "it holds no file", 35: "its label is -1"}.items():
        assert f"'row {row} of shard 0 of {folder}' cannot be read ({why}" in told
    assert "4 of at most 4" in told
    with pytest.raises(UserError, match="the bad sample number 4: mend the data, or raise max_bad_samples"):
        next(RowBatches(open_data_set(folder, max_bad_samples=3), 0, NUM_ROWS, 0, 1))


def test_rows_that_are_all_bad_do_not_go_round_for_ever(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    pq.write_table(table(range(4), unreadable(range(4))), folder / "0.parquet")
    with pytest.raises(UserError, match="found no sample in"):
        next(RowBatches(open_data_set(folder), 0, 1, 0, 1))
    with pytest.raises(UserError, match="there are no validation samples"):
        open_data_set(folder).validation(2)


def test_classes_are_known_before_or_checked_as_they_come(tmp_path):
    named = write(tmp_path / "named", 1, label=datasets.ClassLabel(num_classes=NUM_ROWS))
    assert open_data_set(named).sizes == {"num_classes": NUM_ROWS}
    plain = write(tmp_path / "plain", 1)
    assert open_data_set(plain).sizes == {}
    stream = RowBatches(open_data_set(plain, num_classes=77), 0, NUM_ROWS, 0, 1)
    match = "'row 77 of shard 0 of .*' has label 77, and model.num_classes is 77: raise it to 78 at least"
    with pytest.raises(UserError, match=match):
        next(stream)


def test_a_run_opens_it_with_what_its_model_says(tmp_path):
    spec = {"type": "images", "source": str(write(tmp_path / "corpus", 2)), "streaming": True}
    model = {"type": "resnet", "image_size": 16, "num_channels": 1, "num_classes": NUM_ROWS}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": model, "data": spec}))
    run = load_config(tmp_path / "run.yaml")
    stream = open_batches(open_data(run, build(MODELS, run.model)), 0, 4, 0, 1)
    assert next(stream)["image"].shape == (4, 1, 16, 16)
    assert stream.tokens_per_batch == 4
    stream.close()


def test_images_in_tar_files(tmp_path):
    with tarfile.open(tmp_path / "pictures.tar", "w") as tar:
        for number in range(20):
            for suffix, content in (("png", picture(number)), ("cls", str(number).encode())):
                entry = tarfile.TarInfo(f"{number:03}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    data_set = open_data_set(tmp_path / "pictures.tar", image_column="png", label_column="cls")
    stream = RowBatches(data_set, 0, 1, 0, 1)
    next(stream)
    resumed = RowBatches(data_set, 0, 1, 0, 1)
    resumed.load_state_dict(saved(stream))
    order = read_epoch(stream)
    assert read_epoch(resumed) == order
    assert len(set(order)) == 17


def test_bad_input_is_one_line(tmp_path):
    folder = write(tmp_path / "corpus", 1)
    for match, options in {
        "has no column 'picture', its columns are image, label: set data.image_column": {"image_column": "picture"},
        "has no column 'class'.*set data.label_column": {"label_column": "class"},
        "column 'label' of .* does not hold images: set data.image_column": {"image_column": "label"},
        "column 'image' of .* does not hold a number from 0 on in every row": {"label_column": "image"},
    }.items():
        with pytest.raises(UserError, match=match):
            open_data_set(folder, **options)
    (tmp_path / "table.csv").write_text("image,label\nx.png,0\n")
    with pytest.raises(UserError, match="has no files in its rows: streams are of Parquet, Arrow or tar files"):
        open_data_set(tmp_path / "table.csv")
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "photos" / name / f"{number}.png").write_bytes(picture(number))
    with pytest.raises(UserError, match="has no files in its rows.*or set data.streaming to false"):
        open_data_set(tmp_path / "photos")
    write(tmp_path / "named", 1, {5: {"image": {"bytes": None, "path": "five.png"}}})
    with pytest.raises(UserError, match="row 5 of .* only names a file, 'five.png'.*or set data.streaming to false"):
        next(RowBatches(open_data_set(tmp_path / "named"), 0, NUM_ROWS, 0, 1))
