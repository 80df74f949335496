"""The check of every record in the DHT: the key that its subkey names has signed it."""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Any

from hivemind.dht.validation import DHTRecord, RecordValidatorBase  # type: ignore[import-untyped]
from hivemind.utils import MSGPackSerializer  # type: ignore[import-untyped]
from typing_extensions import override

from isthmus.link import Identity
from isthmus.link.identity import is_signed_by

_PURPOSE = b"isthmus: a record in the DHT\n"
_SIGNATURE_BYTES = 64
_MAX_BYTES = 1 << 10  # of a value, and of a subkey


class SignatureValidator(RecordValidatorBase):  # type: ignore[misc]
    """What every node of a swarm stores and believes: records signed by the key, and of the peer, in their subkey.

    No node needs to know whom to trust for it: a stranger has records of its own, and cannot write another one's.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    @override
    def validate(self, record: DHTRecord) -> bool:
        return _is_valid(record)

    @override
    def sign_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value) + self._identity.sign(_message(record, record.value))

    @override
    def strip_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value[:-_SIGNATURE_BYTES])


@lru_cache(1 << 12)
def _is_valid(record: DHTRecord) -> bool:
    value, signature = record.value[:-_SIGNATURE_BYTES], record.value[-_SIGNATURE_BYTES:]
    if len(record.value) > _MAX_BYTES or len(record.subkey) > _MAX_BYTES:
        return False
    try:
        fingerprint, _ = MSGPackSerializer.loads(record.subkey).split()
        message = _message(record, value)
        readable = isinstance(MSGPackSerializer.loads(value), (str, bool))  # the DHT loads it, and would be stuck
    except Exception:  # whatever a stranger may have sent
        return False
    return readable and math.isfinite(record.expiration_time) and is_signed_by(fingerprint, signature, message)


def _message(record: Any, value: bytes) -> bytes:
    return b"".join([_PURPOSE, record.key, record.subkey, struct.pack(">d", record.expiration_time), value])
