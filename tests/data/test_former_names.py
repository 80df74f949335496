"""Data under their former names: what they are called now, and that they are the same, sample for sample."""

import hashlib
import io
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from PIL import Image

from isthmus.config import dump, flat
from isthmus.core import UserError
from isthmus.data import DATA, current_spec, without_defaults
from isthmus.recipes import load_config
from isthmus.spec import build

pytestmark = pytest.mark.usefixtures("offline")


def png(number: int) -> dict:
    file = io.BytesIO()
    Image.fromarray(np.full((12, 16, 3), 2 * number, np.uint8)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def flac(number: int) -> dict:
    file = io.BytesIO()
    sound = 0.3 * np.sin(2 * np.pi * (200 + 10 * number) * np.arange(3000 + number) / 16000)
    soundfile.write(file, sound.astype(np.float32), 16000, format="FLAC")
    return {"bytes": file.getvalue(), "path": None}


def write_table(path: Path, rows: list[dict], **features) -> None:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, datasets.Features(features).arrow_schema), path)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The working folder; a stream knows its data by the path they are given by."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for k in range(2):
        texts = [f"{i:07d}|" * (1 + i % 5) for i in range(60 * k, 60 * k + 60)]
        Path(f"texts/{k}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        images = [{"image": png(n), "label": n} for n in range(30 * k, 30 * k + 30)]
        write_table(Path(f"pictures/{k}.parquet"), images, image=datasets.Image(), label=datasets.Value("int64"))
    Path("lines.txt").write_text("".join(f"line {i} of some text\n" for i in range(200)))
    sounds = [{"audio": flac(n), "text": "one two"} for n in range(40)]
    write_table(Path("speech.parquet"), sounds, audio=datasets.Audio(), text=datasets.Value("string"))


def digest(batches) -> str:
    """Of what is exact on every machine: tokens, labels, lengths, texts."""
    known = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch.keys() - {"audio", "image"}):
            known.update(batch[name].numpy().tobytes())
    return known.hexdigest()[:16]


FORMER = {  # type, name, what the model says: fingerprint, training and validation samples as version 0.1.0 read them
    ("huggingface", "texts", (8,)): (
        "06269c4ff35c031f",
        "551926a6efd334cf",
        "55297310fc6c903c",
        "a597ddaccf0a45e8",
        "d947605015a9cc6e",
        "f77edbf00f3b892f",
    ),
    ("huggingface", "lines.txt", (8,)): (
        "d513c51b13dae84a",
        "aa7fd10cf97e1cb8",
        "5f6cdf977ef272c7",
        "fb500b97fd9c0207",
        "2cf3292490fa130e",
        "21aa8178faf7f90f",
    ),
    ("huggingface_images", "pictures", (8, 3, 64)): (
        "f67caf3abfd6ae4b",
        "8596b5bcf793cdb4",
        "03b615c5fc1fddcd",
        "3e540e9b01422fab",
        "108f35d09f9af81f",
        "9a84b227d2a11310",
    ),
    ("huggingface_speech", "speech.parquet", (16000, 4000)): (
        "18f5e67eb64ccd47",
        "0c575bd0c4436309",
        "533d2f094df301ee",
        "28303fd217866b90",
        "f3d9a0f46942ab8e",
        "e1c48e71552bd166",
    ),
}


def open_former(kind: str, name: str, model: tuple, **options):
    return build(DATA, current_spec({"type": kind, "name": name, **options})).open(*model)


@pytest.mark.parametrize(("former", "known"), FORMER.items())
def test_the_samples_of_former_runs_are_where_they_were(files, former, known):
    data_set = open_former(*former)
    order = data_set.sample_order(3)
    found = [order.fingerprint, digest([order.read(np.arange(20))]), digest(data_set.validation(4, 20))]
    streamed = open_former(*former, streaming=True)
    batches = streamed.batches(0, 4, 1, 2)
    read = [next(batches) for _ in range(5)]
    found += [batches.state_dict()["fingerprint"], digest(read), digest(streamed.validation(4, 20))]
    batches.close()
    assert tuple(found) == known


def settings(*options: str) -> dict:
    return flat(dump(load_config(None, [f"data={{{', '.join(options)}}}"])))


@pytest.mark.parametrize(
    ("former", "now"),
    [
        (
            ["type: huggingface", "name: c4", "streaming: true"],
            ["type: text", "source: c4", "streaming: true", "text_column: text"],
        ),
        (
            ["type: huggingface_images", "name: a/b"],
            ["type: images", "source: a/b", "validation_fraction: 0.05", "flip: true"],
        ),
        (["type: huggingface_speech", "name: librispeech"], ["type: speech", "source: librispeech"]),
    ],
)
def test_former_names_are_today_s(former, now):
    assert settings(*former) == settings(*now)


def test_what_it_is_called_now_is_said_once(caplog):
    from isthmus.data import _log_new_name

    _log_new_name.cache_clear()
    for name in ("a", "b"):
        current_spec({"type": "huggingface_images", "name": name})
    (line,) = caplog.messages
    assert "data.type huggingface_images is now called images" in line
    assert "{type: images, source: ..., validation_fraction: 0.05, flip: true}" in line


def test_the_name_is_still_asked_for():
    with pytest.raises(UserError, match="data.source: should be a valid string, got None"):
        settings("type: huggingface")


def test_a_checkpoint_of_former_data_fits():
    """As they stand in manifests of version 0.1.0: fewer options, other names."""
    former = {
        "data.type": "huggingface",
        "data.name": "texts",
        "data.config": None,
        "data.split": "train",
        "data.validation_split": None,
        "data.validation_fraction": 0.05,
        "data.text_column": "text",
        "data.tokenizer": "bytes",
        "data.streaming": True,
    }
    now = settings("type: huggingface", "name: texts", "streaming: true")
    now = {key: value for key, value in now.items() if key.startswith("data.")}
    now.pop("data.max_bad_samples")  # each worker's own
    assert without_defaults(former) == without_defaults(now)
    assert without_defaults(former | {"data.name": "others"}) != without_defaults(now)
    plain = {"data.type": "text", "data.source": "stdlib", "data.validation_fraction": 0.05, "model.type": "gpt_neo"}
    today = settings("type: text")
    assert without_defaults(plain)["data.type"] == "text"
    assert without_defaults(plain).items() <= (without_defaults(today) | {"model.type": "gpt_neo"}).items()
    assert without_defaults(plain | {"data.validation_fraction": 0.1}) != without_defaults(plain)


def test_data_of_ones_own_are_compared_as_they_are():
    own = {"data.type": "my.package:Data", "data.rows": 3}
    assert without_defaults(own) == own
