"""Every name and path that stands as code in the documentation exists in the repository."""

import ast
import builtins
import importlib
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.test_docs import ROOT, pages, prose

HISTORY = ("docs/decisions", "docs/log.md", "CHANGELOG.md", "benchmarks/results")  # says what was
PAGES = [page for page in pages() if not str(page.relative_to(ROOT)).startswith(HISTORY)]
BASES = (ROOT, ROOT / "src/isthmus", ROOT / "docs", ROOT / "src", ROOT / "tests", ROOT / "benchmarks/results")
FOLDERS = ("src", "benchmarks", "examples", "tests")
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
NAME = re.compile(r"(?<![\w@{-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
PATH = re.compile(r"^[\w./*<>-]+\.(?:py|md|yaml|json|jsonl|png|txt|cpp|safetensors|toml|sh)$|^(?:[\w.*-]+/)+[\w.*-]*$")
FOREIGN = {  # not of this repository, and not importable here
    "AutoTokenizer": "transformers",
    "my_package": "the reader's own",
    "terminationGracePeriodSeconds": "a key of Kubernetes",
    "KillWait": "a key of Slurm",
    "HF_HOME": "read by Hugging Face's libraries",
    "theta_m": "a paper's symbol",
    "src/isthmus/compress/sign.py": "the reader's own",
    "tests/compress/test_sign.py": "the reader's own",
    "*.trans.txt": "LibriSpeech's",
    "name.txt": "the user's",
}


class Names(ast.NodeVisitor):
    """Collects what a file defines or is called by: identifiers, keywords, and strings that are one word."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.members: dict[str, set[str]] = {}  # of every class
        self.bases: dict[str, set[str]] = {}
        self.words: set[str] = set()  # strings: registered names, keys, formats

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        inner = Names()
        for child in node.body:
            inner.visit(child)
        self.members.setdefault(node.name, set()).update(inner.known)
        self.bases.setdefault(node.name, set()).update(ast.unparse(base).split("[")[0] for base in node.bases)
        self.known |= inner.known | {node.name}
        self.words |= inner.words
        self.members |= inner.members
        self.bases |= inner.bases

    def generic_visit(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name) | ast.Name(id=name):
                self.known.add(name)
            case ast.Attribute(attr=name) | ast.alias(name=name):
                self.known.update(name.split("."))
            case ast.keyword(arg=str(name)):
                self.known.add(name)
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w./:{}-]+", text):
                self.words.add(text)
            case ast.JoinedStr():
                self.words.add(re.sub(r"\{[^}]*\}", "*", ast.unparse(node)[2:-1]))
        super().generic_visit(node)


@cache
def names() -> Names:
    found = Names()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            file = Names()
            file.visit(ast.parse(path.read_text()))
            found.known |= file.known.union(path.relative_to(ROOT).with_suffix("").parts)
            found.words |= file.words if folder != "tests" else set()
            found.members |= file.members
            found.bases |= file.bases
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found.words |= {"isthmus", *project["optional-dependencies"]}
    for requirements in [project["dependencies"], *project["optional-dependencies"].values()]:
        found.words.update(re.split(r"[<>=]", requirement)[0] for requirement in requirements)
    found.words |= set(re.findall(r"^(\w+)(?===)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    for path in [*(ROOT / "deploy").rglob("*.json"), *(ROOT / "examples").glob("*.yaml")]:
        found.words |= set(re.findall(r"\w+", path.read_text()))
    return found


def class_has(name: str, member: str) -> bool:
    """Whether a class of the repository, or one that it is made from, defines a member."""
    if name not in names().members:
        return member in names().known  # a base from elsewhere: all that can be asked
    bases = names().bases.get(name, set())
    return member in names().members[name] or any(class_has(base.split(".")[-1], member) for base in bases)


def exists(name: str) -> bool:
    """Whether a dotted name is one of the repository's, of Python's, or of a library that is installed."""
    if name.startswith("ISTHMUS_") and "__" in name:  # a key of a run as an environment variable
        return all(exists(part.lower()) for part in name.removeprefix("ISTHMUS_").split("__"))
    first, *rest = name.removesuffix("_total").split(".")  # prometheus_client adds that to counters
    if first == "isthmus" or first in ("torch", "transformers", "datasets", "benchmarks", "tests"):
        return importable(name) or not rest
    if not rest:
        found = names()
        return first in found.known | FOREIGN.keys() or is_made(first) or hasattr(builtins, first) or importable(first)
    if first in names().members:
        return class_has(first, rest[0])
    return all(map(exists, (first, *rest)))


@cache
def importable(name: str) -> bool:
    for end in range(len(name.split(".")), 0, -1):
        module, rest = ".".join(name.split(".")[:end]), name.split(".")[end:]
        try:
            found = importlib.import_module(module)
            for part in rest:
                found = getattr(found, part)
            return True
        except ImportError:
            continue
        except AttributeError:
            return False
    return False


def path_exists(path: str) -> bool:
    """Whether a path is in the repository, or is what the code writes or reads."""
    if any((base / path).exists() or any(base.glob(path.strip("/"))) for base in BASES if path.strip("/")):
        return True
    last = path.rstrip("/").split("/")[-1]
    anywhere = last == path and any(any((ROOT / folder).rglob(path)) for folder in FOLDERS)
    return anywhere or path in FOREIGN or path in names().words or is_made(last)


def is_made(word: str) -> bool:
    """Whether the code has this word as a string, or puts it together from parts of which it says most."""
    if word in names().words:
        return True
    made = (text for text in names().words if "*" in text and len(re.sub(r"\W", "", text)) >= 4)
    return any(re.fullmatch(re.sub(r"(\\\*)+", ".+", re.escape(text)), word) for text in made)


def unknown(span: str) -> list[str]:
    """Return what a span of code names that is nowhere."""
    file, _, name = span.partition(": ")
    if PATH.match(file) and name and "{" not in name:
        return [span] if not path_exists(file) else [part for part in NAME.findall(name) if not exists(part)]
    if PATH.match(span):
        return [] if path_exists(span) else [span]
    if re.match(r"^(isthmus|make|python|torchrun|pip|wandb|curl|hf|pytest|git) |://|--", span):
        return []  # a command: see test_docs_samples
    checked = []
    text = re.sub(r"\"[^\"]*\"|'[^']*'|https?:\S+", "", span)
    for match in NAME.finditer(text):
        word, called = match[0], text[match.end() : match.end() + 1] == "("
        if called or match[0] == span or re.search(r"[_.]|[a-z][A-Z]", word.strip("_")):
            checked.append(word)
    return [word for word in checked if not exists(word)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_in_code_exists(page):
    missing = {
        f"{number}: `{span}` names {word}"
        for number, line in enumerate(prose(page.read_text()).splitlines(), 1)
        for span in SPAN.findall(line)
        for word in unknown(span)
    }
    assert not missing


def test_a_name_that_is_gone_is_found():
    assert unknown("OuterLoop._outer_stepp") == ["OuterLoop._outer_stepp"]
    assert unknown("recipes/gone.py: outer_sgd")
    assert unknown("recipes/base.py: outer_sgdd")
    assert unknown("docs/around.md")
    assert unknown("LowRank(rank, factorz=Quantise(4))") == ["Quantise"]
    assert not unknown("recipes/base.py: outer_sgd")


def test_pages_that_the_code_names_exist():
    for folder in ("src", "tests", "benchmarks", "examples", "deploy"):
        for path in (each for each in (ROOT / folder).rglob("*") if each.suffix in (".py", ".md", ".yaml", ".yml")):
            for page in re.findall(r"\b(docs/[\w/-]+\.md)", path.read_text()):
                assert (ROOT / page).exists() or "results" in str(path) or path == Path(__file__), f"{path}: {page}"
