"""Damage for the fuzz tests."""

import json
from random import Random

EVIL = [None, True, -1, 0, 1 << 70, 1e999, "", "$", "x" * 100, [], {}, {"$": "tensor", "number": 0}, [[]] * 50]
EVIL_TEXT = [b"[" * 100_000, b'{"a":' * 2000, b"9" * 5000, b"NaN", b"\xff", b"\x00", b'"', b"1e400", b"\\ud800", b"}"]


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Flip, cut, double or replace something."""
    start, end = sorted(random.randrange(len(data) + 1) for _ in range(2))
    match random.randrange(5):
        case 0:
            return data[:start] + data[end:]
        case 1:
            return data[:end] + data[start:]
        case 2:
            return data[:start] + random.choice(EVIL_TEXT) + data[start + random.randrange(9) :]
        case 3:
            return data[:start] + random.randbytes(random.randrange(1, 9)) + data[start:]
    start = min(start, len(data) - 1)
    return data[:start] + bytes([data[start] ^ (1 << random.randrange(8))]) + data[start + 1 :]


def mutate_json(text: bytes, random: Random) -> bytes:
    """Replace, remove or copy a value somewhere in a JSON text; it stays JSON."""
    root = json.loads(text)
    places = []
    todo = [root]
    while todo:
        value = todo.pop()
        places += [(value, key) for key in (value if isinstance(value, dict) else range(len(value)))]
        todo += [
            item for item in (value.values() if isinstance(value, dict) else value) if isinstance(item, dict | list)
        ]
    holder, key = random.choice(places)
    match random.randrange(4):
        case 0:
            del holder[key]
        case 1:
            other, there = random.choice(places)
            holder[key] = json.loads(json.dumps(other[there]))
        case 2 if type(holder[key]) is int:
            holder[key] += random.choice([-1, 1, 1 << 40])
        case _:
            holder[key] = random.choice(EVIL)
    return json.dumps(root).encode()
