"""What is missing is said before anything is read: folders, files, libraries, text in another encoding than UTF-8."""

import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.core import UserError
from isthmus.data import check_source, source
from isthmus.data.images import Images
from isthmus.data.speech import Speech
from isthmus.data.text import Text

SPECS = [Text, Images, Speech]
GERMAN = "Grüße aus Köln\n" * 30


def refused(match: str, spec) -> None:
    for ask in (spec.check_source, lambda: spec.open(*[4] * {Text: 1, Images: 2, Speech: 2}[type(spec)])):
        with pytest.raises(UserError, match=match) as error:
            ask()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere/photos/of/cats"])
def test_a_folder_that_is_not_there(spec, name):
    refused(f"data: '{name}' (does not exist|is no folder); give", spec(name))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("streaming", [False, True])
def test_tables_that_are_not_there(spec, streaming, tmp_path):
    for name in ("nowhere.parquet", f"{tmp_path}/*.jsonl", f"{tmp_path}/nowhere.json.gz"):
        refused("does not exist; give a folder, files, or a name on the Hub", spec(name, streaming=streaming))


@pytest.mark.parametrize("spec", SPECS)
def test_an_empty_folder(spec, tmp_path):
    (tmp_path / ".hidden").write_text("a text")
    refused("holds no text|no images in sub-folders|no FLAC or WAV files", spec(str(tmp_path)))


def test_an_empty_folder_of_tables(tmp_path):
    refused("the folder .* is empty", Text(str(tmp_path), text_column="text"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("text.jsonl", {}),
        ("text.csv", {"streaming": True}),
        ("text.txt", {"text_column": "text"}),
        ("text.txt", {"tokenizer": "nobody/nothing"}),
        ("text.txt", {"streaming": True}),
        ("text.md", {}),
    ],
)
def test_text_that_is_not_utf_8(tmp_path, encoding, name, options):
    path = tmp_path / name
    path.write_bytes(GERMAN.encode(encoding))
    if name == "text.md" and encoding == "latin-1":  # bytes may be anything
        assert len(Text(str(path)).open(4).train) > 300
        return
    refused(f"{name}' is not UTF-8.*: convert it to UTF-8 \\(iconv -f UTF-16 -t UTF-8", Text(str(path), **options))


def test_a_letter_that_is_cut_in_two_is_none(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_bytes(b"x" + "ü".encode() * 4096)
    Text(str(path)).check_source()
    path.write_bytes(b"x" * 4095 + b"\xfc" + b"x" * 4096)  # nor is one further on looked for
    Text(str(path)).check_source()


@pytest.mark.parametrize(
    ("module", "spec", "what"),
    [
        ("datasets", Text("c4"), "datasets.*isthmus.datasets"),
        ("datasets", Text(__file__, streaming=True), "datasets.*isthmus.datasets"),
        ("PIL", Images(), "Pillow.*isthmus.vision"),
        ("PIL", Images("imagenet-1k", streaming=True), "Pillow.*isthmus.vision"),
        ("sklearn", Images(), "scikit-learn.*isthmus.vision"),
        ("soundfile", Speech(str(Path(__file__).parent)), "soundfile.*isthmus.speech"),
        ("soundfile", Speech("librispeech"), "soundfile.*isthmus.speech"),
    ],
)
def test_a_library_that_is_not_installed(module, spec, what, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    refused(f"{what}.", spec)


@pytest.mark.parametrize("spec", [Images(streaming=True), Speech(streaming=True)])
def test_what_is_built_in_is_not_streamed(spec):
    refused("set data.streaming to false", spec)


@pytest.mark.processes
def test_what_is_there_is_accepted_without_a_library_that_takes_seconds(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    code = f"""
import sys
from isthmus.data import Text, check_source
from isthmus.data.images import Images
from isthmus.data.speech import Speech
for spec in (Text(), Text({str(tmp_path / "rows.jsonl")!r}), Text("c4", streaming=True), Images(), Speech("formants")):
    check_source(spec)
print({{"datasets", "transformers", "sklearn", "soundfile", "PIL", "pyarrow"}} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


def test_data_of_ones_own_need_no_check():
    class Own:
        def open(self):
            raise AssertionError

    check_source(Own())


def test_compiled_files_are_no_data(tmp_path):
    (tmp_path / "__pycache__").mkdir()
    for name in ("code.py", "__pycache__/code.cpython-311.pyc"):
        (tmp_path / name).write_text("x")
    assert list(source.list_files(tmp_path)) == [tmp_path / "code.py"]
