"""Counts that say how easy the code is to join, of one revision beside another: `python -m benchmarks.house --at REV`.

Everything is counted from the source with `ast`; nothing is imported or run. The rules are the functions below.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("outer", "data", "train", "tools", "transport", "")
MAX_FUNCTION_LINES, MAX_FILE_LINES = 60, 300
# words that only this house used, as parts of identifiers
PRIVATE_WORDS = """
alone card cards claim claims deal dealt detached effort heard hold holding inside knock land landing linger lonely
meeting meetings pace picture pictures place places recording recordings rewind rider riders rounds said settle settled
sides stand stands stranger strangers unravel weave
"""
# a docstring that begins so points at something outside of it
POINTING_WORDS = """
also and as but each else for her here his it its itself nobody nothing of once see so that their them themselves there
these they those what where which who whom whose
"""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of the file."""
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        """The number of lines of the file."""
        return len(self.text.splitlines())


@dataclass(frozen=True)
class House:
    """The package and its type-checking settings at one revision."""

    modules: list[Module]
    strict_packages: list[str]

    @classmethod
    def read(cls, root: Path) -> House:
        """Read `src/isthmus` and `pyproject.toml` under `root`."""
        source = root / "src"
        modules = []
        for path in sorted(source.glob("isthmus/**/*.py")):
            name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
            modules.append(Module(name, path.relative_to(source), path.read_text()))
        mypy = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["mypy"]
        return cls(modules, mypy["packages"] if mypy.get("strict") else [])

    @classmethod
    def at(cls, revision: str) -> House:
        """Read a revision of the repository."""
        command = ["git", "-C", str(ROOT), "archive", revision, "src", "pyproject.toml"]
        archive = subprocess.run(command, capture_output=True, check=True).stdout
        with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
            return cls.read(Path(folder))


def files_in(house: House, folder: str) -> list[Module]:
    """Return the modules of one folder, or of the whole package for ""."""
    return [module for module in house.modules if module.path.is_relative_to(Path("isthmus") / folder)]


def imports(module: Module, names: set[str], type_only: bool, inside_functions: bool) -> set[str]:
    """Return the package's modules that this one imports.

    Args:
        module: the module.
        names: all modules of the package.
        type_only: whether imports under `if TYPE_CHECKING` count.
        inside_functions: whether imports in the bodies of functions count.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not type_only:
            return
        if isinstance(node, Function) and not inside_functions:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(inner & names or {node.module})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(module.tree)
    return found & names - {module.name}


def circles(house: House, type_only: bool = False, inside_functions: bool = False) -> list[list[str]]:
    """Return the groups of modules that import one another, directly or through others."""
    names = {module.name for module in house.modules}
    graph = {module.name: imports(module, names, type_only, inside_functions) for module in house.modules}

    def reached(start: str) -> set[str]:
        seen, left = set[str](), [start]
        while left:
            new = graph[left.pop()] - seen
            seen |= new
            left += new
        return seen

    reach = {name: reached(name) for name in graph}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return sorted(sorted(group) for group in groups if group)


def definitions(house: House) -> Iterator[tuple[str, str]]:
    """Yield (name, module) of every public class and function at the top of a module; commands only call theirs."""
    for module in house.modules:
        for node in module.tree.body if module.name != "isthmus.cli" else []:
            if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
                yield node.name, module.name


def ambiguous_names(house: House) -> list[str]:
    """Return the public classes and functions whose name another module defines, too."""
    homes = defaultdict(set)
    for name, module in definitions(house):
        homes[name].add(module)
    return sorted(f"{name}: {', '.join(sorted(modules))}" for name, modules in homes.items() if len(modules) > 1)


def identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of every name that a module gives: classes, functions, parameters, fields and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | Function):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno


def words(identifier: str) -> list[str]:
    """Split an identifier into its words, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)]


def private_names(house: House) -> list[str]:
    """Return the identifiers, files included, that hold one of the words that only this house used."""
    found = {name for module in house.modules for name, _ in identifiers(module.tree)}
    found |= {module.path.stem for module in house.modules}
    return sorted(name for name in found if not set(PRIVATE_WORDS.split()).isdisjoint(words(name)))


def is_sentence(docstring: str) -> bool:
    """Whether a docstring's first paragraph can be read alone: three words, a full stop, no pointing first word."""
    first = docstring.strip().split("\n\n")[0].split()
    opening = re.sub(r"\W", "", first[0].lower()) if first else ""
    return len(first) >= 3 and first[-1][-1] in ".?!:" and opening not in POINTING_WORDS.split()


def poor_docstrings(house: House) -> list[str]:
    """Return the docstrings whose first paragraph is no sentence by `is_sentence`."""
    found = []
    for module in house.modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Module | ast.ClassDef | Function):
                docstring = ast.get_docstring(node)
                if docstring and not is_sentence(docstring):
                    found.append(f"{module.path}:{getattr(node, 'lineno', 1)}: {docstring.splitlines()[0]}")
    return found


def long_functions(house: House) -> list[str]:
    """Return the functions that are too long to be seen at once."""
    return [
        f"{module.path}:{node.lineno}: {node.name}"
        for module in house.modules
        for node in ast.walk(module.tree)
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def members(house: House, name: str) -> list[str]:
    """Return the public members of a class of `transport/base.py`; none where it is not there."""
    for module in house.modules:
        for node in module.tree.body if module.name == "isthmus.transport.base" else []:
            if isinstance(node, ast.ClassDef) and node.name == name:
                named = [item.name for item in node.body if isinstance(item, Function)]
                named += [
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                ]
                return sorted(item for item in named if not item.startswith("_"))
    return []


def unchecked_files(house: House) -> list[str]:
    """Return the files that mypy does not check strictly."""
    strict = tuple(house.strict_packages)
    return [
        str(module.path)
        for module in house.modules
        if not any(module.name == package or module.name.startswith(f"{package}.") for package in strict)
    ]


Measure = Callable[[House], list[str]]
MEASURES: dict[str, Measure] = {
    "import circles, at run time": lambda house: list(map(" <-> ".join, circles(house))),
    "... with imports for types alone": lambda house: list(map(" <-> ".join, circles(house, type_only=True))),
    "... and imports inside functions": lambda house: list(map(" <-> ".join, circles(house, True, True))),
    "members of Transport": lambda house: members(house, "Transport"),
    "members of its elastic part": lambda house: members(house, "ElasticPart"),
    "public names with two homes": ambiguous_names,
    "identifiers in the house's own language": private_names,
    "docstrings that cannot be read alone": poor_docstrings,
    "files not checked by mypy --strict": unchecked_files,
    f"functions over {MAX_FUNCTION_LINES} lines": long_functions,
    f"files over {MAX_FILE_LINES} lines": lambda house: [
        f"{module.path}: {module.num_lines}" for module in house.modules if module.num_lines > MAX_FILE_LINES
    ],
}


def figures(house: House) -> dict[str, str]:
    """Return every count of a revision by its name."""
    sizes = {}
    for folder in FOLDERS:
        modules = files_in(house, folder)
        sizes[f"src/isthmus/{folder}"] = f"{len(modules)} files, {sum(module.num_lines for module in modules):,} lines"
    return {name: str(len(measure(house))) for name, measure in MEASURES.items()} | sizes


def main() -> None:
    """Print the counts of the working tree, and of another revision beside them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("--at", metavar="REV", help="a git revision to compare the working tree with")
    parser.add_argument("--list", metavar="WORDS", help="print what is counted by the measure with these words")
    parser.add_argument("--write", action="store_true", help="write the table, dated, to benchmarks/results")
    options = parser.parse_args()
    now = House.read(ROOT)
    if options.list:
        chosen = [measure for name, measure in MEASURES.items() if options.list in name]
        print("\n".join(line for measure in chosen for line in measure(now)))
        return
    columns = {options.at: figures(House.at(options.at))} if options.at else {}
    columns["working tree"] = figures(now)
    rows = [[name, *(column[name] for column in columns.values())] for name in columns["working tree"]]
    for row in [["", *columns], *rows]:
        print(f"{row[0]:<42}" + "".join(f"{cell:>28}" for cell in row[1:]))
    if options.write:
        from benchmarks.results import write

        write("house", "The code, counted", ["", *columns], rows, ["the rules: benchmarks/house.py"], columns)


if __name__ == "__main__":
    main()
