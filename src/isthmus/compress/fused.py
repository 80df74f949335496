"""The codecs' torch code in one pass over a GPU's memory: compiled by torch, checked once, never needed.

The same functions run eagerly wherever torch cannot compile for the GPU, with `ISTHMUS_NATIVE=0`, and where the
compiled form does not give the same bits, which is looked at before it is first used.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from isthmus.compress import native

Kernel = Callable[..., torch.Tensor]  # of rows, small tensors and plain numbers

# rounding as in eager torch: no fused multiply-add, IEEE division, denormals kept
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
_SAMPLE_ROWS = 512


def run_compiled(kernel: Kernel, rows: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return `kernel(rows, *others)`, compiled where that is possible.

    A kernel is a function of a module, without side effects, of rows [num_rows, width], small tensors beside them and
    plain numbers.
    """
    if rows.is_cuda and len(rows) > 1 and native.wanted():  # one row would be compiled for itself
        width, numbers = rows.shape[1], tuple(other for other in others if not isinstance(other, torch.Tensor))
        kernel = _faithful(kernel, compiled(kernel), (rows.device, rows.dtype, width, numbers), others)
    return kernel(rows, *others)


@functools.cache
def compiled(kernel: Kernel) -> Kernel:
    """The kernel, to be compiled at its first call for any number of rows."""
    inner: Kernel = torch.compile(kernel, options=_OPTIONS)

    def call(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        torch._dynamo.maybe_mark_dynamic(rows, 0)
        return inner(rows, *others)

    return call


_chosen: dict[Any, Kernel] = {}


def _faithful(kernel: Kernel, fast: Kernel, key: tuple[Any, ...], others: tuple[Any, ...]) -> Kernel:
    """The fast form of a kernel if it works here and gives the same bits, else the kernel."""
    if (kernel, key) not in _chosen:
        device, dtype, width, _ = key
        _chosen[kernel, key] = fast if agree(kernel, fast, sample(width, dtype).to(device), *others) else kernel
    return _chosen[kernel, key]


def agree(kernel: Kernel, fast: Kernel, rows: torch.Tensor, *others: Any) -> bool:
    """Whether both give the same bits; False where the compiler does not work."""
    expected = kernel(rows, *others)
    try:
        result = fast(rows, *others)
    except Exception:  # of the compiler, or of a tool that it needs: whatever it is, there is another way
        return False
    return bool(((result == expected) | (result.isnan() & expected.isnan())).all())


def sample(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes as values [512, width]; where those are floats, as many again of all sizes and kinds."""
    generator = torch.Generator().manual_seed(0)
    shape = _SAMPLE_ROWS, width * dtype.itemsize
    patterns = torch.randint(256, shape, generator=generator, dtype=torch.uint8).view(dtype)
    if dtype == torch.uint8:
        return patterns
    sizes = 10.0 ** torch.randint(-38, 38, (_SAMPLE_ROWS, 1), generator=generator)
    floats = torch.randn(_SAMPLE_ROWS, width, generator=generator) * sizes
    floats[:4, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    return torch.cat([patterns, floats])
