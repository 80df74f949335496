"""Text in tables and data sets by name: real files, written here, through the real `load_dataset`."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers import Tokenizer
from transformers import GPTNeoConfig

from isthmus.core import UserError
from isthmus.data.text import Text
from isthmus.models import MODELS
from isthmus.models.huggingface import HuggingFace as HuggingFaceModel
from isthmus.recipes import load_config
from isthmus.spec import build
from isthmus.train.assemble import open_data

LENGTH = 8  # tokens a sample


pytestmark = pytest.mark.usefixtures("offline")


def documents(first: int, last: int) -> list[str]:
    """Document i says nothing but its number, again and again, in a length of its own."""
    return [f"{i:07d}|" * (1 + i % 5) for i in range(first, last)]


def write_jsonl(path, texts, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text, **more}) + "\n" for text in texts))
    return path


def write_parquet(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"number": list(range(len(texts))), "text": texts}), path, row_group_size=16)
    return path


@pytest.fixture(params=["jsonl", "parquet"])
def data_folder(tmp_path, request):
    """300 documents in four files."""
    write = write_jsonl if request.param == "jsonl" else write_parquet
    for k in range(4):
        write(tmp_path / "corpus" / f"part-{k}.{request.param}", documents(75 * k, 75 * k + 75))
    return tmp_path / "corpus"


def text_of(tokens) -> bytes:
    return bytes(np.asarray(tokens).astype(np.uint8).tobytes())


def windows(batches) -> list[bytes]:
    return [text_of(row) for batch in batches for row in batch["tokens"]]


# on disk


def all_tokens(tokens) -> np.ndarray:
    return tokens[np.arange(len(tokens))]


def test_every_document_is_packed_once_on_one_side(data_folder):
    data_set = Text(str(data_folder)).open(LENGTH)
    train, held_out = (text_of(all_tokens(side)).split(b"\0")[:-1] for side in (data_set.train, data_set.held_out))
    assert len(held_out) == 15
    assert Counter(train + held_out) == Counter(text.encode() for text in documents(0, 300))
    numbers = [int(text[:7]) for text in train]
    assert numbers == sorted(numbers), "packed in the order of the rows"


def test_the_split_is_the_same_everywhere_and_named_ones_are_taken_whole(tmp_path):
    for split, first, last in (("train", 0, 50), ("validation", 50, 60)):
        write_jsonl(tmp_path / "both" / f"{split}.jsonl", documents(first, last))
    whole = Text(str(tmp_path / "both"), validation_split="validation").open(LENGTH)
    assert text_of(all_tokens(whole.train)) == b"".join(text.encode() + b"\0" for text in documents(0, 50))
    assert text_of(all_tokens(whole.held_out)) == b"".join(text.encode() + b"\0" for text in documents(50, 60))
    file = write_jsonl(tmp_path / "one.jsonl", documents(0, 50))
    copied = write_parquet(tmp_path / "elsewhere" / "other.parquet", documents(0, 50))
    sides = [text_of(all_tokens(Text(str(path)).open(LENGTH).held_out)) for path in (file, copied)]
    assert sides[0] == sides[1]


def test_a_folder_is_one_of_tables_where_most_of_its_files_are(data_folder):
    for name in ("README.md", "LICENSE", "card.txt"):
        (data_folder / name).write_text("not the data")
    assert text_of(all_tokens(Text(str(data_folder)).open(LENGTH).train)).startswith(b"00000")
    for name in ("a.txt", "b.txt"):
        (data_folder / name).write_text("now it is the data")
    assert b"now it is the data" in bytes(
        np.concatenate([Text(str(data_folder)).open(LENGTH).train, *[Text(str(data_folder)).open(LENGTH).held_out]])
    )


def test_a_part_of_a_split_can_be_chosen(tmp_path):
    file = write_jsonl(tmp_path / "one.jsonl", documents(0, 50))
    data_set = Text(str(file), split="train[:20]", validation_split="train[20:30]").open(LENGTH)
    assert text_of(all_tokens(data_set.train)).count(b"\0") == 20
    assert text_of(all_tokens(data_set.held_out)) == b"".join(text.encode() + b"\0" for text in documents(20, 30))


def test_text_is_tokenised_once(data_folder, tokenizer_folder, monkeypatch):
    spec = Text(str(data_folder), tokenizer=str(tokenizer_folder))
    first = spec.open(LENGTH)
    monkeypatch.setattr("isthmus.data.tokenizer.Pretrained.encode", lambda *_: pytest.fail("tokenised again"))
    again = spec.open(2 * LENGTH)
    assert np.array_equal(all_tokens(again.train), all_tokens(first.train))


def test_tokens_are_mapped_not_read(data_folder):
    data_set = Text(str(data_folder)).open(LENGTH)
    assert data_set.train.dtype == np.uint8
    assert all(not chunk.flags.owndata for chunk in data_set.train._chunks)


def test_a_tokenizer_of_transformers(tmp_path, tokenizer_folder):
    texts = ["the dog", "jumps over the fox", "æ"] * 20
    file = write_jsonl(tmp_path / "text.jsonl", texts)
    data_set = Text(str(file), tokenizer=str(tokenizer_folder)).open(4)
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    assert data_set.sizes == {"vocab_size": tokenizer.get_vocab_size()}
    assert data_set.train.dtype == np.uint16
    both = [*all_tokens(data_set.train).tolist(), *all_tokens(data_set.held_out).tolist()]
    expected = Counter(tuple(tokenizer.encode(text).ids) for text in texts)
    read, document = Counter(), []
    for token in both:
        if token == tokenizer.token_to_id("<end>"):
            read[tuple(document)] += 1
            document = []
        else:
            document.append(token)
    assert read == expected


def test_rows_without_text_are_named_and_passed_over_up_to_a_limit(tmp_path, caplog):
    texts = documents(0, 40)
    texts[7] = texts[21] = None
    file = write_jsonl(tmp_path / "text.jsonl", texts)
    data_set = Text(str(file), max_bad_samples=2).open(LENGTH)
    assert sum(text_of(all_tokens(side)).count(b"\0") for side in (data_set.train, data_set.held_out)) == 38
    assert "row 7" in caplog.text
    again = write_jsonl(tmp_path / "again.jsonl", texts)  # the cache does not know it
    refused("its text is NoneType, not text.*raise max_bad_samples", str(again), max_bad_samples=1)


def test_a_file_that_cannot_be_read_is_named_and_left_out(data_folder, caplog):
    bad = sorted(data_folder.iterdir())[2]
    bad.write_bytes(b'{"text": "cut of' if bad.suffix == ".jsonl" else b"PAR1 and then nothing")
    data_set = Text(str(data_folder)).open(LENGTH)
    assert sum(text_of(all_tokens(side)).count(b"\0") for side in (data_set.train, data_set.held_out)) == 225
    assert f"{bad}" in caplog.text
    refused(f"{bad.name}.*raise max_bad_samples", str(data_folder), max_bad_samples=0)


# bad input


def refused(match: str, name: str, **options) -> None:
    with pytest.raises(UserError, match=match) as error:
        Text(name, **options).open(LENGTH)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_input_is_one_line(tmp_path, streaming):
    file = str(write_jsonl(tmp_path / "text.jsonl", documents(0, 40), label=3))
    options = {"streaming": streaming}
    refused(
        "has no column 'txt', its columns are text, label: set data.text_column", file, text_column="txt", **options
    )
    binary = str(bytes_file(tmp_path))
    refused("files ending in '.bin' are of no known format", binary, text_column="text", **options)
    refused(r"cannot be loaded .* hold 'train\['", file, split="train[", **options)
    refused("is one split: leave validation_split out", file, validation_split="test", **options)
    refused("the Hub cannot be reached", "nobody/nothing", **options)
    refused("data.tokenizer: .* cannot be loaded", file, tokenizer="nobody/nothing", **options)
    (tmp_path / "void.jsonl").touch()
    refused("cannot be loaded|has no rows", str(tmp_path / "void.jsonl"), **options)
    with pytest.raises(UserError, match="validation_fraction is 1"):
        Text(file, validation_fraction=1)
    with pytest.raises(UserError, match="max_bad_samples is -1"):
        Text(file, max_bad_samples=-1)


def bytes_file(folder):
    path = folder / "text.bin"
    path.write_bytes(b"\0")
    return path


def test_a_column_of_numbers_is_no_text(tmp_path):
    file = str(write_jsonl(tmp_path / "text.jsonl", documents(0, 40), label=3))
    refused("holds int64, not text", file, text_column="label")
    with pytest.raises(UserError, match="its label is int, not text.*raise max_bad_samples"):
        Text(file, text_column="label", streaming=True).open(LENGTH).validation(2)


def test_too_little_text_is_refused(tmp_path):
    refused("has fewer than 2 rows", str(write_jsonl(tmp_path / "one.jsonl", ["a text"])))
    refused("needs 9, the training data has 2", str(write_jsonl(tmp_path / "two.jsonl", ["a", "b"])))
    data_set = Text(str(tmp_path / "two.jsonl"), streaming=True).open(LENGTH)
    with pytest.raises(UserError, match="needs 9, the validation data has 2"):
        data_set.validation(2)


class Hub(BaseHTTPRequestHandler):
    """Answers as the Hub does to whoever may not read."""

    def do_GET(self):
        gated = "gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = do_GET  # noqa: N815

    def log_message(self, *args):
        pass


OPEN_THEM = """
import sys
from isthmus.core import UserError
from isthmus.data.text import Text
for name in sys.argv[1:]:
    try:
        Text(name).open(8)
    except UserError as error:
        print(error)
"""


def said_of(endpoint: str, folder, *names: str) -> list[str]:
    """What a process says that asks a hub for data."""
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", OPEN_THEM, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.splitlines()


@pytest.mark.processes
def test_a_hub_that_refuses(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    missing, gated = said_of(endpoint, tmp_path, "nobody/nothing", "somebody/gated")
    assert "'nobody/nothing' cannot be loaded" in missing
    assert "doesn't exist on the Hub" in missing
    assert "'somebody/gated' is a gated dataset" in gated
    assert "log in with 'hf auth login', or set HF_TOKEN" in gated
    server.shutdown()
    server.server_close()


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(tmp_path, tokenizer_folder):
    file = str(write_jsonl(tmp_path / "text.jsonl", documents(0, 40)))
    spec = {"type": "text", "source": file, "tokenizer": str(tokenizer_folder)}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"model": {"type": "gpt_neo", "sequence_length": 8}, "data": spec}))
    run = load_config(config)
    with pytest.raises(UserError, match=r"model.vocab_size is 256, the data has \d+: raise it"):
        open_data(run, build(MODELS, run.model))


def test_the_vocabulary_of_a_model_of_transformers_is_known(tmp_path):
    GPTNeoConfig(
        vocab_size=99, hidden_size=8, num_layers=2, attention_types=[[["global", "local"], 1]]
    ).save_pretrained(tmp_path)
    assert HuggingFaceModel(str(tmp_path)).vocab_size == 99
