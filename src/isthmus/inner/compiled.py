"""Compiling a model in place, and one line where that does not work."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from isthmus.core.types import UserError, first_line

_LOGGER = logging.getLogger(__name__)


def compile_in_place(model: nn.Module) -> None:
    """Have a model compiled by torch in its first steps; names and state stay as they are."""
    _LOGGER.info("the first steps compile the model, which takes a while")
    inside = model.module if isinstance(model, DistributedDataParallel) else model
    inside.compile()


@contextmanager
def readable_compiler_errors() -> Iterator[None]:
    """Turn an error of torch's compiler into one line."""
    try:
        yield
    except RuntimeError as error:
        compiler = sys.modules.get("torch._dynamo.exc")  # whatever compiles has imported it
        if compiler is None or not isinstance(error, compiler.TorchDynamoException):
            raise
        reason = first_line(error)
        raise UserError(f"inner.compile: torch cannot compile the model here ({reason}): set it to false") from error
