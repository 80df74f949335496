"""Finds a model whose gradients cross between workers at every step, behind the outer loop's back."""

import gc
import weakref
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from isthmus.core import UserError
from isthmus.core.fragment import is_dtensor
from isthmus.outer import OuterLoop

_ADVICE = (
    "the model is wrapped in DistributedDataParallel, whose gradients cross to the other workers at every step: leave "
    "it unwrapped; with accelerate, prepare it by accelerator.prepare_model(model, evaluation_mode=True)"
)


def refuse_shared_gradients(model: nn.Module, ranks_per_worker: int) -> None:
    """Raise a `UserError` where the model's gradients or parameters reach beyond this worker's ranks."""
    wrappers = [model] if isinstance(model, DistributedDataParallel) else _wrappers_of(model)
    if any(wrapper.process_group.size() > ranks_per_worker for wrapper in wrappers):
        raise UserError(_ADVICE)
    for param in model.parameters():
        if is_dtensor(param) and param.device_mesh.size() > ranks_per_worker:
            raise UserError(
                f"the model is sharded over {param.device_mesh.size()} ranks: give attach as many ranks_per_worker, "
                "or shard it over a mesh of this worker's own ranks"
            )


def refuse_wrapping_later(model: nn.Module, outer_loop: OuterLoop, ranks_per_worker: int) -> None:
    """From here on raise a `UserError` where somebody wraps the model, for as long as its outer loop trains."""
    model_reference, loop_reference = weakref.ref(model), weakref.ref(outer_loop)

    def check(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if not isinstance(module, DistributedDataParallel) or submodule is None or submodule is not model_reference():
            return
        loop = loop_reference()
        if loop is not None and loop.state.phase != "finished" and module.process_group.size() > ranks_per_worker:
            raise UserError(_ADVICE)

    hook = register_module_module_registration_hook(check)
    weakref.finalize(outer_loop, hook.remove)


def _wrappers_of(model: nn.Module) -> list[Any]:
    """Return the wrappers that hold this model; a model does not know by whom it is held.

    Only the model's holders, and theirs, are looked at. `gc.get_objects` would also hold tuples that other threads are
    just building, and these threads would fail with a `SystemError` (python/cpython issue 107137).
    """
    found, level = list[Any](), list[Any]([model])
    while level:
        found += level
        known = set(map(id, found))
        held_by = [holder for holder in gc.get_referrers(*level) if issubclass(type(holder), dict | nn.Module)]
        level = [holder for holder in held_by if id(holder) not in known]
    wrappers = [holder for holder in found if issubclass(type(holder), DistributedDataParallel)]
    return [wrapper for wrapper in wrappers if any(module is model for module in wrapper.modules())]
