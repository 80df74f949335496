"""What every fork of `tests.workers.CONTEXT` needs, imported once: the server that forks begins with this module."""

import gc
from importlib import import_module

gc.disable()  # it takes half of the time, and finds nothing
for name in (
    "isthmus.hugging_face",
    "isthmus.tools.doctor",
    "isthmus.train.trainer",
    "isthmus.transport.hivemind.membership",
    "isthmus.transport.torchft.membership",
    "peft",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.gpt_neo.modeling_gpt_neo",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.trainer",
):
    import_module(name)
gc.freeze()  # forks share the memory of what is there now: the collector would write into it
gc.enable()
