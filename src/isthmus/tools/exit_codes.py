"""The message that the program ends with after an error, and its exit code."""

from __future__ import annotations

import errno


def message_and_code(error: Exception) -> tuple[str, int]:
    """Return message and exit code of an error that was foreseen; raise any other again, traceback and all."""
    if hasattr(error, "format_message"):  # the command line was wrong (typer brings its own click, or uses click's)
        return f"{error.format_message().rstrip('.')}; see isthmus --help", 2

    from isthmus.core import UserError  # this, and what follows, imports torch
    from isthmus.tools.launch import Interrupted
    from isthmus.tools.workers import WorkerFailed
    from isthmus.train.checkpoint import NotSaved
    from isthmus.transport import TransportError

    match error:
        case UserError():
            return str(error), 2
        case TransportError() | WorkerFailed() | NotSaved():
            return str(error), 1
        case Interrupted():
            return str(error), error.exit_code
        case _ if _is_out_of_memory(error):
            return "there is not enough memory: lower inner.batch_size, or set inner.micro_batch_size", 1
        case ModuleNotFoundError(name="hivemind"):
            return "hivemind is not installed: pip install 'isthmus[p2p]'", 2
        case PermissionError() | NotADirectoryError() | FileExistsError():
            return f"{error.filename}: {error.strerror}", 2
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return f"{error.filename or 'a file cannot be written'}: {error.strerror}; make room on that disk", 1
    raise error


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether numpy or torch could not have the memory that they asked for; torch's CPU error has no class."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
