"""Code that a configuration names by its import path: it is imported where the user allowed it, and nowhere else.

A configuration may come from somebody else, and whoever writes one could name anything that is installed. What Python
code names is its author's own, and needs no permission (`own_code`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from isthmus.core.types import UserError

ALLOW = "ISTHMUS_ALLOW"  # environment variable: modules, or packages with all that is in them, with commas between
_is_own_code: ContextVar[bool] = ContextVar("is_own_code", default=False)


def allow_imports(modules: Iterable[str]) -> None:
    """Allow modules, and packages with all that is in them, in this process and in those that it starts."""
    os.environ[ALLOW] = ",".join([*allowed_imports(), *modules])


def allowed_imports() -> list[str]:
    """Return the modules and packages that the user allowed."""
    return [module.strip() for module in os.environ.get(ALLOW, "").split(",") if module.strip()]


@contextmanager
def own_code() -> Iterator[None]:
    """Let whatever is named within the context be imported: the caller names it, and no configuration."""
    token = _is_own_code.set(True)
    try:
        yield
    finally:
        _is_own_code.reset(token)


def check_allowed(path: str, what: str) -> None:
    """Refuse an import path ("package.module:Name") that the user has not allowed; `what` is named in the error."""
    module = path.partition(":")[0]
    if not _is_own_code.get() and not any(f"{module}.".startswith(f"{each}.") for each in allowed_imports()):
        raise UserError(
            f"{what} {path!r} is code that is not isthmus's: if you trust it, allow it with --allow {module}, "
            f"or with {ALLOW}={module} in the environment"
        )


def import_path(path: str) -> Any:
    """Return what stands at an import path; whoever calls has checked that it may be imported."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
