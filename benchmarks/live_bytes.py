"""Live bytes of a worker with an outer loop: its communication thread too, and what is offloaded apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from isthmus.outer import Offload, OuterLoop
from isthmus.tools.live_bytes import LiveBytes, LiveBytesMode


def follow(loop: OuterLoop, watch: LiveBytesMode) -> None:
    """LiveBytesMode the communication thread, for good."""
    loop._thread.run(watch.__enter__)


@dataclass(frozen=True)
class CountedOffload(Offload):
    """An offload whose copies are known to `live`, so that one device can stand for two."""

    live: LiveBytes = field(default_factory=LiveBytes)

    def put(self, tree: Any) -> Any:
        """Offload, and count."""
        kept = super().put(tree)
        if self.device is not None:
            self.live.add((leaf for leaf in tree_leaves(kept) if isinstance(leaf, torch.Tensor)), offloaded=True)
        return kept
