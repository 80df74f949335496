"""What is done after every inner step: nothing, our recipes, torchft's DiLoCo, hivemind's averaging."""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import Store, TCPStore

from isthmus.config import RunConfig
from isthmus.train.assemble import build_method

_WAIT = timedelta(minutes=10)
_STORE_PORT = 29700


class Nothing:
    """No communication.

    Args:
        config: of the run.
        model: this worker's.
        store: reaches all workers.
        rank: this worker's number.
    """

    def __init__(self, config: RunConfig, model: nn.Module, store: Store, rank: int) -> None:
        self.config, self.module, self.store, self.rank = config, model, store, rank
        self.params = list(model.parameters())
        self.open()

    def open(self) -> None:
        """Meet the others."""

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """The inner optimizer, before the first step."""

    def step(self) -> None:
        """After every inner step."""

    def evaluated(self) -> AbstractContextManager[None]:
        """Within, the model holds what is to be evaluated; asked for after every H steps."""
        return nullcontext()

    def close(self) -> None:
        """Leave the others."""

    @property
    def local_steps(self) -> int:
        """H."""
        assert self.config.outer.schedule is not None
        return self.config.outer.schedule.local_steps

    def outer_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The recipe's outer optimizer, for contenders from elsewhere too."""
        spec = {key: value for key, value in self.config.outer.optimizer.items() if key != "type"}
        return torch.optim.SGD(params, **spec)


class Ours(Nothing):
    """The recipe of the configuration; `ddp` is torch's own DistributedDataParallel."""

    def open(self) -> None:
        """Meet the others."""
        self.method = build_method(self.config, self.module)
        self.module = self.method.wrap(self.module)

    def step(self) -> None:
        """See `Nothing`."""
        self.method.step()

    def evaluated(self) -> AbstractContextManager[None]:
        """See `Nothing`."""
        return self.method.anchored()

    def close(self) -> None:
        """Leave the others."""
        self.method.finish()
        self.method.close()


class Torchft(Nothing):
    """DiLoCo of the torchft wheel, float32, over its own lighthouse and gloo; it waits for every sync at once."""

    num_fragments, delay = 1, 0

    def open(self) -> None:
        """Meet the others."""
        from torchft import Manager, ProcessGroupGloo
        from torchft._torchft import LighthouseServer

        if self.rank == 0:
            self._lighthouse = LighthouseServer(bind="0.0.0.0:29510", min_replicas=self.config.train.workers)
            self.store.set("lighthouse", f"http://{socket.gethostname()}:29510")
        self._own_store = TCPStore(os.environ["NETLAB_IP"], _STORE_PORT, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=_WAIT),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=self.config.train.workers,
            use_async_quorum=False,
            timeout=_WAIT,
            quorum_timeout=_WAIT,
            rank=0,
            world_size=1,
            store_addr=os.environ["NETLAB_IP"],
            store_port=_STORE_PORT,
            lighthouse_addr=self.store.get("lighthouse").decode(),
            replica_id=f"worker-{self.rank}",
            hostname=socket.gethostname(),
            init_sync=False,
        )

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """See `Nothing`."""
        from torchft.local_sgd import DiLoCo

        parts = _cut(self.module, self.num_fragments)
        outer = [self.outer_optimizer(list(part.parameters())) for part in parts]
        self._hooks = ExitStack()
        self._hooks.enter_context(
            DiLoCo(self.manager, parts, optimizer, outer, self.local_steps, fragment_sync_delay=self.delay)
        )

    def close(self) -> None:
        """Leave the others."""
        self._hooks.close()
        self.manager.shutdown()


class TorchftStreaming(Torchft):
    """The same with two fragments whose syncs may take most of the time until the next one."""

    num_fragments = 2

    @property
    def delay(self) -> int:  # type: ignore[override]
        """The tau of Streaming DiLoCo."""
        return self.local_steps // self.num_fragments - 10


class Hivemind(Nothing):
    """DecentralizedAverager of the hivemind wheel, float16, waited for, in the place of DiLoCo's all-reduce."""

    def open(self) -> None:
        """Meet the others."""
        from hivemind import DHT, DecentralizedAverager
        from hivemind.compression import Float16Compression

        own = f"/ip4/{os.environ['NETLAB_IP']}/tcp/29520"
        known = [] if self.rank == 0 else [self.store.get("first peer").decode()]
        self._dht = DHT(initial_peers=known, host_maddrs=[own], start=True)
        if self.rank == 0:
            self.store.set("first peer", str(self._dht.get_visible_maddrs()[0]))
        workers = self.config.train.workers
        self._averager = DecentralizedAverager(
            [torch.zeros_like(param) for param in self.params],
            self._dht,
            start=True,
            prefix="wan",
            target_group_size=workers,
            min_group_size=workers,
            compression=Float16Compression(),
            allreduce_timeout=_WAIT.total_seconds(),
        )
        self.anchor = [nn.Parameter(param.detach().clone()) for param in self.params]
        self._outer = self.outer_optimizer(self.anchor)
        self._steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """See `Nothing`."""
        self._steps += 1
        if self._steps % self.local_steps:
            return
        with self._averager.get_tensors() as tensors:
            for tensor, anchor, param in zip(tensors, self.anchor, self.params, strict=True):
                tensor.copy_(anchor - param)
        group = self._averager.step(timeout=_WAIT.total_seconds())
        if group is None or len(group) != self.config.train.workers:
            raise SystemExit(f"hivemind averaged over {group}")
        with self._averager.get_tensors() as tensors:
            for tensor, anchor in zip(tensors, self.anchor, strict=True):
                anchor.grad = tensor.clone()
        self._outer.step()
        for anchor, param in zip(self.anchor, self.params, strict=True):
            param.copy_(anchor)

    def close(self) -> None:
        """Leave the others."""
        self._averager.shutdown()
        self._dht.shutdown()


CONTENDERS: dict[str, type[Nothing]] = {
    "nothing": Nothing,
    "ours": Ours,
    "torchft": Torchft,
    "torchft-streaming": TorchftStreaming,
    "hivemind": Hivemind,
}


def _cut(model: nn.Module, num_parts: int) -> list[nn.Module]:
    """A model's smallest modules with parameters, in order, in parts of about equal size."""
    leaves = [module for module in model.modules() if list(module.parameters(recurse=False))]
    sizes = [sum(param.numel() for param in module.parameters()) for module in leaves]
    parts: list[list[nn.Module]] = [[] for _ in range(num_parts)]
    before = 0
    for leaf, size in zip(leaves, sizes, strict=True):
        parts[min(before * num_parts // sum(sizes), num_parts - 1)].append(leaf)
        before += size
    return [nn.ModuleList(part) for part in parts]
