"""What every fork of `tests.workers.CONTEXT` needs, imported once: the server that forks begins with this module."""

import gc
import os
from contextlib import suppress
from importlib import import_module

for variable, value in {"OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR"}.items():
    os.environ.setdefault(variable, value)  # as `isthmus.cli` does; torch reads it once, where it is imported
gc.disable()  # it takes half of the time, and finds nothing
for name in (
    "isthmus.cli",
    "isthmus.compress.feedback",
    "isthmus.core.kernels.cpu",
    "isthmus.compress.quantize",
    "isthmus.compress.topk",
    "isthmus.hugging_face",
    "isthmus.models.biggan_networks",
    "isthmus.models.frechet",
    "isthmus.models.gpt_neo",
    "isthmus.models.gpt_neox",
    "isthmus.models.local_heads",
    "isthmus.tools.doctor",
    "isthmus.tools.export",
    "isthmus.tools.launch",
    "isthmus.tools.plot",
    "isthmus.train.worker",
    "isthmus.transport.elastic.transport",
    "isthmus.transport.hivemind.membership",
    "isthmus.transport.torchft.membership",
    "peft",
    "pytest",
    "torch._dynamo",
    "torch.distributed.pipelining",
    "transformers.models.gpt_neo.modeling_gpt_neo",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.trainer",
):
    with suppress(ImportError):  # what is not installed is missed where it is needed
        import_module(name)
with suppress(Exception):
    import_module("isthmus.transport.torchft.lighthouse").import_torchft()
gc.freeze()  # forks share the memory of what is there now: the collector would write into it
gc.enable()
