"""Who takes part in a sync, and how bytes move."""

from isthmus.core.registry import Registry
from isthmus.transport.base import Drift, PeerLost, Transport, TransportError, TransportLimits

TRANSPORTS = Registry(
    "transport",
    {
        "local": "isthmus.transport.local:Local",
        "torch_dist": "isthmus.transport.torch_dist:TorchDist",
    },
)

__all__ = ["TRANSPORTS", "Drift", "PeerLost", "Transport", "TransportError", "TransportLimits"]
