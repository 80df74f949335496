"""Transports: they find the workers of a sync, connect them, move their bytes and hold their votes."""

from isthmus.core.registry import Registry
from isthmus.transport.base import Drift, PeerLost, Transport, TransportError, TransportLimits

TRANSPORTS = Registry(
    "transport",
    {
        "hivemind": "isthmus.transport.hivemind.transport:HivemindTransport",
        "local": "isthmus.transport.local:Local",
        "torch_dist": "isthmus.transport.torch_dist:TorchDist",
        "torchft": "isthmus.transport.torchft.transport:TorchFTTransport",
    },
    methods=("join", "quorum", "commit", "leave"),
)

__all__ = ["TRANSPORTS", "Drift", "PeerLost", "Transport", "TransportError", "TransportLimits"]
