"""isthmus: train one model on clusters joined by slow, unreliable links."""

from typing import TYPE_CHECKING, Any

from isthmus.version import __version__ as __version__

if TYPE_CHECKING:
    from isthmus.recipes import attach

__all__ = ["attach"]


def __getattr__(name: str) -> Any:
    """Import `attach` when it is first asked for, so that `import isthmus` alone does not wait for torch."""
    if name == "attach":
        from isthmus.recipes import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
