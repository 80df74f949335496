"""Who takes part in a sync, and how bytes move."""

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
)

__all__ = ["TRANSPORTS", "Drift", "PeerLost", "Transport", "TransportError", "TransportLimits"]
