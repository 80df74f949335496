"""Streamed text: who reads what, where a position is, what becomes of sources that fail."""

import io
import itertools
import json
import re
from collections import Counter

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from isthmus.core import UserError
from isthmus.core.flatten import flatten, unflatten
from isthmus.data import LeasedBatches, open_batches
from isthmus.data.shards import reassign_shards
from isthmus.data.streamed_text import StreamedText, TextBatches
from isthmus.data.streaming import PrefetchedBatches
from isthmus.data.text import Text

LENGTH = 8  # tokens a sample
NUM_ROWS = 240
END = 0  # the token at the end of a text


@pytest.fixture(autouse=True)
def small_and_offline(tmp_path, monkeypatch):
    """Blocks of a few windows, so that there are many; nothing is asked of the Hub."""
    monkeypatch.setattr("isthmus.data.streamed_text._BLOCK_WINDOWS", 5)
    monkeypatch.setattr("isthmus.data.streamed_text._TEXTS", 4)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A token for every word; no word stands twice in the data, so a token says where it comes from."""
    words = {"<end>": END} | {f"w{i}": i for i in range(1, 1 + 5 * NUM_ROWS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return str(folder)


def words(row: int) -> range:
    """The tokens of a row."""
    return range(1 + 5 * row, 2 + 5 * row + row % 5)


def text(row: int) -> str:
    return " ".join(f"w{token}" for token in words(row))


def tokens_of(rows) -> Counter:
    return Counter(token for row in rows for token in [*words(row), END])


def write(folder, num_files: int, suffix: str = "jsonl"):
    """The rows, shared out to files."""
    folder.mkdir(exist_ok=True)
    size = NUM_ROWS // num_files
    for k in range(num_files):
        texts = [text(row) for row in range(k * size, (k + 1) * size)]
        path = folder / f"{k}.{suffix}"
        if suffix == "parquet":
            pq.write_table(pa.table({"text": texts}), path, row_group_size=8)
        elif suffix == "arrow":
            table = pa.table({"text": texts})
            with pa.ipc.new_stream(path, table.schema) as file:
                file.write_table(table, max_chunksize=8)
        else:
            path.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    return folder


def held_out_of(num_files: int, every: int = 10) -> set[int]:
    size = NUM_ROWS // num_files
    return {k * size + row for k in range(num_files) for row in range(0, size, every)}


def open_data_set(source, tokenizer, **options) -> StreamedText:
    options = {"validation_fraction": 0.1, **options}
    return Text(str(source), tokenizer=tokenizer, streaming=True, **options).open(LENGTH)


def read_epoch(stream) -> Counter:
    """The tokens of the rest of the epoch, what is left over for the next one included."""
    blocks = [stream.state_dict()["windows"]]
    while stream._epoch < 0 or stream._pieces:
        blocks.append(stream._next_block())
    tokens = torch.cat(blocks)[:, :-1].flatten().tolist()  # the last is the first of the next window
    return Counter([*tokens, *stream.state_dict()["rest"].tolist()])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(("num_workers", "num_files"), [(1, 4), (2, 4), (3, 4), (2, 1), (3, 1), (5, 4)])
def test_workers_read_disjoint_rows_and_together_all_once(tmp_path, tokenizer, suffix, num_workers, num_files):
    data_set = open_data_set(write(tmp_path / "corpus", num_files, suffix), tokenizer)
    read = [read_epoch(TextBatches(data_set, 0, 1, worker, num_workers)) for worker in range(num_workers)]
    assert sum(read, Counter()) == tokens_of(set(range(NUM_ROWS)) - held_out_of(num_files))
    assert all(sum(each.values()) > 50 for each in read)


def test_each_worker_opens_only_its_own_shards(tmp_path, tokenizer):
    write(tmp_path / "corpus", 6)
    data_set = open_data_set(f"counted://{tmp_path}/corpus/*.jsonl", tokenizer)
    Counted.opened.clear()
    opened = []
    for worker in range(2):
        read_epoch(TextBatches(data_set, 0, 1, worker, 2))
        opened.append(set(Counted.opened))
        Counted.opened.clear()
    assert [len(files) for files in opened] == [3, 3]
    assert not opened[0] & opened[1]


def order(stream) -> list:
    """The windows of an epoch."""
    blocks = [stream._next_block()]
    while stream._pieces:
        blocks.append(stream._next_block())
    return torch.cat(blocks).tolist()


def test_every_epoch_has_an_order_of_its_own_and_the_same_one_every_time(tmp_path, tokenizer):
    data_set = open_data_set(write(tmp_path / "corpus", 4), tokenizer)
    stream = TextBatches(data_set, 3, 1, 0, 1)
    orders = [order(stream), order(stream)]
    assert orders[0] != orders[1]
    assert order(TextBatches(data_set, 3, 1, 0, 1)) == orders[0]
    assert order(TextBatches(data_set, 4, 1, 0, 1)) != orders[0]
    starts = [window[0] for window in orders[0][:5]]
    assert starts != sorted(starts), "windows of a block are shuffled"


def saved(stream) -> dict:
    """As a checkpoint keeps it."""
    skeleton, tensors = flatten(stream.state_dict())
    return unflatten(json.loads(json.dumps(skeleton)), [tensor.clone() for tensor in tensors])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_identity_37_a_restored_position_goes_on_bitwise(tmp_path, tokenizer, suffix):
    data_set = open_data_set(write(tmp_path / "corpus", 3, suffix), tokenizer)
    stream = open_batches(data_set, 0, 6, 1, 2)
    assert isinstance(stream, PrefetchedBatches)
    for _ in range(12):  # more than two epochs
        state = saved(stream)
        resumed = open_batches(open_data_set(tmp_path / "corpus", tokenizer), 0, 6, 1, 2)
        next(resumed)
        resumed.load_state_dict(state)
        for _ in range(2):
            expected = next(stream)["tokens"]
            assert torch.equal(next(resumed)["tokens"], expected)
        resumed.close()
    assert state["epoch"] >= 2
    stream.close()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 4)])
@pytest.mark.parametrize("num_files", [1, 6])
@pytest.mark.parametrize("ahead", [False, True])
def test_another_number_of_workers_reads_on_without_loss(tmp_path, tokenizer, before, after, num_files, ahead):
    data_set = open_data_set(write(tmp_path / "corpus", num_files), tokenizer)
    streams = [TextBatches(data_set, 0, 1, worker, before) for worker in range(before)]
    read = Counter[int]()
    for worker, stream in enumerate(streams):
        for _ in range(7 + worker + (130 // before if ahead and worker == 0 else 0)):  # one may be an epoch ahead
            read.update(next(stream)["tokens"][0, :-1].tolist())
    num_epochs = 1 + max(stream.state_dict()["epoch"] for stream in streams)
    states = reassign_shards([saved(stream) for stream in streams], after)
    for worker in range(after):
        stream = TextBatches(data_set, 0, 1, worker, after)
        stream.load_state_dict(states[worker])
        read += read_epoch(stream)
    once = tokens_of(set(range(NUM_ROWS)) - held_out_of(num_files))
    assert read == Counter({token: num_epochs * count for token, count in once.items()})
    assert num_epochs == 1 + ahead


def test_validation_is_fixed_and_held_out(tmp_path, tokenizer):
    data_set = open_data_set(write(tmp_path / "corpus", 4), tokenizer)
    batches = data_set.validation(batch_size=2, num_samples=5)
    assert [len(batch["tokens"]) for batch in batches] == [2, 2, 1]
    assert set(torch.cat([batch["tokens"] for batch in batches]).flatten().tolist()) <= set(tokens_of(held_out_of(4)))
    again = open_data_set(tmp_path / "corpus", tokenizer).validation(batch_size=7, num_samples=5)
    assert torch.equal(again[0]["tokens"], torch.cat([batch["tokens"] for batch in batches]))


def test_a_named_validation_split_holds_nothing_out(tmp_path, tokenizer):
    folder = write(tmp_path / "corpus", 1)
    (folder / "0.jsonl").rename(folder / "train.jsonl")
    (folder / "validation.jsonl").write_text("".join(json.dumps({"text": text(row)}) + "\n" for row in (1, 3, 4)))
    data_set = open_data_set(folder, tokenizer, validation_split="validation")
    assert read_epoch(TextBatches(data_set, 0, 1, 0, 1)) == tokens_of(range(NUM_ROWS))
    (batch,) = data_set.validation(4)
    assert batch["tokens"].flatten().tolist()[:8] == [*words(1), END, *words(3), END]


class Counted(LocalFileSystem):
    """Files here under another address; says which were opened."""

    protocol = "counted"
    opened: list[str] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        here = path.removeprefix(f"{cls.protocol}://")
        return super()._strip_protocol(here if here == path else f"/{here.lstrip('/')}")

    def _open(self, path, mode="rb", **options):
        self.opened.append(path)
        return super()._open(path, mode, **options)


class Flaky(Counted):
    """Some reads fail: those with these numbers."""

    protocol = "flaky"
    reads, failing = 0, set[int]()

    def _open(self, path, mode="rb", **options):
        return FlakyFile(path)


class FlakyFile(io.FileIO):
    def read(self, size=-1):
        Flaky.reads += 1
        if Flaky.reads in Flaky.failing:
            raise ConnectionResetError("the connection broke")
        return super().read(size)


fsspec.register_implementation("counted", Counted, clobber=True)
fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture
def flaky(tmp_path, tokenizer, monkeypatch):
    """A data_set of Arrow files, and how many reads an epoch takes."""
    monkeypatch.setattr("isthmus.data.shards.PAUSES", (0.01, 0.01, 0.01))
    Flaky.failing = set()
    write(tmp_path / "corpus", 2, "arrow")
    data_set = open_data_set(f"flaky://{tmp_path}/corpus/*.arrow", tokenizer)
    Flaky.reads = 0
    read_epoch(TextBatches(data_set, 0, 1, 0, 1))
    num_reads, Flaky.reads = Flaky.reads, 0
    yield data_set, num_reads
    Flaky.failing = set()


def test_a_source_that_fails_now_and_then_is_asked_again(flaky, caplog):
    data_set, num_reads = flaky
    assert num_reads > 50
    Flaky.failing = {num_reads // 4, num_reads // 2, num_reads}  # each time in the middle of a shard
    assert read_epoch(TextBatches(data_set, 0, 1, 0, 1)) == tokens_of(set(range(NUM_ROWS)) - held_out_of(2))
    assert caplog.text.count("the connection broke): it is asked again in 0.01 s") == 3


def test_a_shard_that_stays_unreadable_is_named_and_passed_over(flaky, caplog):
    data_set, num_reads = flaky
    Flaky.failing = set(range(num_reads * 3 // 4, 10 * num_reads))  # from the middle of the second shard on
    read = read_epoch(TextBatches(data_set, 0, 1, 0, 1))
    whole = tokens_of(set(range(NUM_ROWS)) - held_out_of(2))
    assert read < whole
    assert sum(read.values()) > sum(whole.values()) / 2
    said = caplog.text
    assert re.search(r"shard \d of .* from row [1-9]\d on' cannot be read", said)
    assert "1 of at most 10" in said


def test_too_many_bad_samples_end_the_run_with_one_line(tmp_path, tokenizer, caplog):
    folder = write(tmp_path / "corpus", 2)
    with (folder / "1.jsonl").open("a") as file:
        file.writelines('{"text": null}\n' for _ in range(4))
    data_set = open_data_set(folder, tokenizer, max_bad_samples=4)
    assert read_epoch(TextBatches(data_set, 0, 1, 0, 1)) == tokens_of(set(range(NUM_ROWS)) - held_out_of(2))
    assert "shard 1" in caplog.text
    stream = open_batches(open_data_set(folder, tokenizer, max_bad_samples=3), 0, 8, 0, 1)
    batches = itertools.islice(stream, 30)
    with pytest.raises(UserError, match="its text is NoneType, not text.*raise max_bad_samples"):
        list(batches)


def test_a_damaged_file_is_read_as_far_as_it_goes(tmp_path, tokenizer, caplog):
    folder = write(tmp_path / "corpus", 2)
    (folder / "1.jsonl").write_text("this is no JSON\n")
    data_set = open_data_set(folder, tokenizer)
    kept = set(range(NUM_ROWS // 2)) - held_out_of(2)
    assert read_epoch(TextBatches(data_set, 0, 1, 0, 1)) == tokens_of(kept)
    assert "shard 1" in caplog.text


def test_shards_without_text_do_not_go_round_for_ever(tmp_path, tokenizer):
    folder = write(tmp_path / "corpus", 1)
    (folder / "0.jsonl").write_text(json.dumps({"text": text(0)}) + "\n")  # row 0 is held out
    with pytest.raises(UserError, match="found no text"):
        next(TextBatches(open_data_set(folder, tokenizer), 0, 1, 0, 1))


def test_workers_that_come_and_go_cannot_stream(tmp_path, tokenizer):
    data_set = open_data_set(write(tmp_path / "corpus", 1), tokenizer)
    with pytest.raises(UserError, match="set data.streaming to false, or outer.transport.type to torch_dist"):
        LeasedBatches(data_set.sample_order(0), "a", 1)


def test_a_position_in_other_data_is_refused(tmp_path, tokenizer):
    state = TextBatches(open_data_set(write(tmp_path / "corpus", 2), tokenizer), 0, 1, 0, 1).state_dict()
    with pytest.raises(UserError, match="restore the data"):
        TextBatches(open_data_set(tmp_path / "corpus", tokenizer), 1, 1, 0, 1).load_state_dict(state)
    with pytest.raises(UserError, match="restore the data"):
        TextBatches(open_data_set(tmp_path / "corpus", "bytes"), 0, 1, 0, 1).load_state_dict(state)
    with pytest.raises(UserError, match="restore the data"):
        TextBatches(open_data_set(tmp_path / "corpus", tokenizer, validation_fraction=0.2), 0, 1, 0, 1).load_state_dict(
            state
        )
    with pytest.raises(UserError, match="batch_size is 0"):
        TextBatches(open_data_set(tmp_path / "corpus", "bytes"), 0, 0, 0, 1)


def test_a_batch_larger_than_the_data_is_refused_after_one_epoch(tmp_path, tokenizer):
    data_set = open_data_set(write(tmp_path / "corpus", 2), tokenizer)
    next(TextBatches(data_set, 0, 50, 0, 1))
    with pytest.raises(UserError, match="fewer than 100000000 samples: lower inner.batch_size"):
        next(TextBatches(data_set, 0, 10**8, 0, 1))
