"""From a name or an import path to a component, and back to its name."""

import difflib
import sys
from typing import Any

from isthmus.core.imports import check_allowed, import_path
from isthmus.core.types import UserError


def nearest(word: str, known: list[str]) -> str:
    """Return a hint for a misspelt word: its nearest known neighbour, or all known words."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


class Registry:
    """Names of one kind of component, each standing for an import path "package.module:Attribute".

    Nothing is imported before it is asked for, so a table may name parts whose libraries are optional.

    Args:
        kind: of component, for error messages.
        paths: by name.
        methods: which every component of this kind has.
        variants: paths by more names, of variants of the components; `names` leaves them out.
    """

    def __init__(
        self, kind: str, paths: dict[str, str], methods: tuple[str, ...] = (), variants: dict[str, str] | None = None
    ) -> None:
        self.kind = kind
        self.paths = paths | (variants or {})
        self.methods = methods
        self._names = list(paths)

    def names(self) -> list[str]:
        """Return all registered names but those of variants."""
        return list(self._names)

    def get(self, name: str) -> Any:
        """Return the component called `name`, which may be an import path "package.module:Attribute", if allowed."""
        path = self.paths.get(name, name)
        if ":" not in path:
            own = f"name a {self.kind} of your own as package.module:Name"
            raise UserError(f"unknown {self.kind} {name!r}: {nearest(name, list(self.paths))} ({own})")
        if path not in self.paths.values():
            check_allowed(path, self.kind)
        try:
            component = import_path(path)
        except (ImportError, AttributeError) as error:
            raise UserError(f"{self.kind} {name!r} cannot be imported: {error}") from error
        missing = [method for method in self.methods if not callable(getattr(component, method, None))]
        if missing:
            raise UserError(
                f"{name!r} cannot be used as {self.kind}: it has no method {' and no method '.join(missing)}"
            )
        return component

    def name_of(self, component: type) -> str:
        """Return the registered name of a class, or its import path."""
        for name, path in self.paths.items():
            module, attribute = path.split(":", 1)
            if getattr(sys.modules.get(module), attribute, None) is component:
                return name
        return f"{component.__module__}:{component.__qualname__}"
