"""The work of codecs and of the outer step in one pass over the memory: in C++ on the CPU, in Triton on a GPU.

The torch code beside the callers is the reference and gives the same bytes (tests/compress/test_cpu_kernels.py and
test_gpu_kernels.py). Without a compiler or Triton, with `ISTHMUS_NATIVE=0`, or for tensors that are not contiguous,
they simply use it.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from isthmus.core.kernels import cpu

_LOGGER = logging.getLogger(__name__)
_is_triton_broken = False


def run_kernel(
    name: str,
    tensors: Sequence[torch.Tensor],
    *numbers: int,
    table: torch.Tensor | None = None,
    factors: Sequence[float] = (),
) -> bool:
    """Run a kernel over the rows of `tensors`; False where it cannot be.

    Args:
        name: a function of cpu.cpp and a launcher of gpu.py, or of one of them.
        tensors: input and output, with equal numbers of rows, on one device.
        numbers: whatever else the function takes.
        table: a small tensor on the CPU that every thread reads whole.
        factors: numbers in float32.
    """
    if not is_wanted() or not all(tensor.is_contiguous() for tensor in tensors):
        return False
    devices = {tensor.device.type for tensor in tensors}
    run = cpu.run if devices == {"cpu"} else _run_on_gpu if devices == {"cuda"} else None
    return run is not None and run(name, tensors, numbers, table, factors)


def is_wanted() -> bool:
    """Whether kernels are to be used at all."""
    return os.environ.get("ISTHMUS_NATIVE", "1") != "0"


def _run_on_gpu(name: str, *arguments: Any) -> bool:
    global _is_triton_broken
    if _is_triton_broken:
        return False
    try:
        from isthmus.core.kernels import gpu  # takes a second

        return gpu.run(name, *arguments)
    except Exception as error:  # of Triton's compiler, or of a tool that it needs: there is another way
        _is_triton_broken = True
        why = str(error).strip().partition("\n")[0]
        _LOGGER.warning("codecs take several times as long on this GPU: Triton does not work here: %s", why)
        return False
