"""From a name or an import path to a component, and back to its name."""

import difflib
from importlib import import_module
from typing import Any

from isthmus.core.types import UserError


def nearest(word: str, known: list[str]) -> str:
    """Return a hint for a misspelt word: its nearest known neighbour, or all known words."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


class Registry:
    """Names of one kind of component, each standing for an import path "package.module:Attribute".

    Nothing is imported before it is asked for, so a table may name parts whose libraries are optional.
    """

    def __init__(self, kind: str, paths: dict[str, str]) -> None:
        self.kind = kind
        self.paths = paths

    def names(self) -> list[str]:
        """Return all registered names."""
        return list(self.paths)

    def get(self, name: str) -> Any:
        """Return the component called `name`; `name` may itself be an import path "package.module:Attribute"."""
        path = self.paths.get(name, name)
        if ":" not in path:
            raise UserError(f"unknown {self.kind} {name!r}: {nearest(name, self.names())}")
        module, attribute = path.split(":", 1)
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserError(f"{self.kind} {name!r} cannot be imported: {error}") from error

    def name_of(self, component: type) -> str:
        """Return the registered name of a class, or its import path."""
        path = f"{component.__module__}:{component.__qualname__}"
        return next((name for name, known in self.paths.items() if known == path), path)
