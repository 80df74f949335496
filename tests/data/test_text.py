"""Text on disk: what is read, how it is split, what is refused."""

import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from isthmus.core import UserError
from isthmus.data import Text


@pytest.fixture
def folder(tmp_path):
    """Forty files; file i holds twenty bytes of value i."""
    for i in range(40):
        path = tmp_path / "text" / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([i + 1]) * 20)
    return tmp_path / "text"


def sides(source: Path, fraction: float = 0.2) -> tuple[set[int], set[int]]:
    """File numbers on the training and on the validation side."""
    data_set = Text(str(source), fraction).open(sequence_length=4)
    return set(data_set.train.tolist()) - {0}, set(data_set.held_out.tolist()) - {0}


def test_a_folder_is_split_by_file(folder):
    train, held_out = sides(folder)
    assert train.isdisjoint(held_out)
    assert train | held_out == set(range(1, 41))
    assert 2 <= len(held_out) <= 16


def test_new_files_leave_the_others_where_they_are(folder):
    train, held_out = sides(folder)
    for i in range(40, 80):
        (folder / f"{i}.txt").write_bytes(bytes([i + 1]) * 20)
    more_train, more_held_out = sides(folder)
    assert train <= more_train
    assert held_out <= more_held_out


def test_the_split_does_not_depend_on_where_the_folder_lies(folder, tmp_path):
    before = sides(folder)
    assert sides(folder.rename(tmp_path / "moved")) == before


def test_hidden_files_are_not_text(folder):
    (folder / ".git").mkdir()
    (folder / ".git" / "pack").write_bytes(b"\xff" * 100)
    (folder / ".notes").write_bytes(b"\xfe" * 100)
    train, held_out = sides(folder)
    assert train | held_out == set(range(1, 41))


@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
def test_both_sides_have_a_file(folder, fraction):
    train, held_out = sides(folder, fraction)
    assert min(len(train), len(held_out)) == 1
    assert len(train) + len(held_out) == 40


def test_files_are_joined_in_order_with_a_zero_between(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / name).write_text(name * 9)
    data_set = Text(str(tmp_path)).open(sequence_length=4)
    joined = sorted([bytes(data_set.train), bytes(data_set.held_out)], key=len)
    assert all(part.endswith(b"\0") for part in joined)
    assert sorted(b"".join(joined).split(b"\0")) == [b"", b"aaaaaaaaa", b"bbbbbbbbb", b"ccccccccc"]
    *files, _ = joined[1].split(b"\0")
    assert files == sorted(files)


def test_a_tokenizer_reads_plain_text_too(tmp_path, tokenizer_folder):
    for name in ("b", "a"):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / name).write_text("the dog sleeps " * 9)
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    ids = [*tokenizer.encode("the dog sleeps " * 9).ids, tokenizer.token_to_id("<end>")]
    data_set = Text(str(tmp_path / "text"), tokenizer=str(tokenizer_folder)).open(sequence_length=4)
    assert data_set.train.tolist() == data_set.held_out.tolist() == ids
    assert data_set.sizes == {"vocab_size": tokenizer.get_vocab_size()}
    one = Text(str(tmp_path / "text" / "a"), 0.3, tokenizer=str(tokenizer_folder)).open(sequence_length=4)
    assert [*one.train, *one.held_out] == ids
    assert len(one.train) == round(0.7 * len(ids))


@pytest.mark.usefixtures("offline")
def test_plain_text_is_streamed_line_by_line(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("".join(f"{name[0]}{line:06d}\n" for line in range(30)))
    data_set = Text(str(tmp_path), 0.1, streaming=True).open(sequence_length=8)
    (batch,) = data_set.validation(9)
    lines = batch["tokens"][:, :8].numpy().astype(np.uint8).tobytes().split(b"\0")[:-1]
    assert lines == [b"a000000", b"a000010", b"a000020", b"b000000", b"b000010"]
    batches = data_set.batches(0, 50, 0, 1)
    lines = next(batches)["tokens"][:, :8].numpy().astype(np.uint8).tobytes().split(b"\0")[:-1]
    batches.close()
    assert len(set(lines)) == 50
    assert not {b"a000010", b"b000000"} & set(lines)


@pytest.mark.parametrize("inside_folder", [False, True])
def test_a_single_file_is_split_by_position(tmp_path, inside_folder):
    data = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)  # bytes need not be text
    path = tmp_path / "text.bin"
    path.write_bytes(data.tobytes())
    (tmp_path / "empty").touch()
    data_set = Text(str(tmp_path if inside_folder else path), 0.1).open(sequence_length=16)
    assert bytes(data_set.train) == bytes(data[:900])
    assert bytes(data_set.held_out) == bytes(data[900:])


def test_stdlib_is_read_fast_and_without_its_tests():
    start = time.monotonic()
    data_set = Text().open(sequence_length=128)
    assert time.monotonic() - start < 2
    assert len(data_set.train) > 5_000_000
    assert len(data_set.train) > 4 * len(data_set.held_out) > 400_000
    both = bytes(data_set.train) + bytes(data_set.held_out)
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert (stdlib / "argparse.py").read_bytes() in both
    assert (stdlib / "json" / "decoder.py").read_bytes() in both
    assert b"import torch" not in both
    again = Text().open(sequence_length=128)
    assert np.array_equal(data_set.train, again.train)


def refused(source: Path | str, match: str, sequence_length: int = 4, **options: float) -> None:
    with pytest.raises(UserError, match=match) as error:
        Text(str(source), **options).open(sequence_length)
    assert "\n" not in str(error.value)


def test_bad_sources_are_refused(tmp_path, folder):
    refused(tmp_path / "nowhere", "does not exist")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no text")
    (tmp_path / "empty" / "file").touch()
    refused(tmp_path / "empty", "holds no text")
    refused(tmp_path / "empty" / "file", "holds no text")
    refused(folder, r"a sequence of 1000 tokens needs 1001, the training data has \d+", sequence_length=1000)
    refused(folder, "validation_fraction is 1", validation_fraction=1.0)


def test_a_file_that_cannot_be_read_is_named(folder):
    """A link that leads in a circle: it is not there for anyone, root included."""
    (folder / "loop").symlink_to(folder / "loop")
    refused(folder / "loop", "loop")
    train, held_out = sides(folder)
    assert train | held_out == set(range(1, 41))
