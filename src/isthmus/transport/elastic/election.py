"""Who may take part in a sync, and with which weight: pure functions of the cards that workers show one another."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Literal

from isthmus.transport.base import ReplicatedState
from isthmus.transport.elastic.membership import Card

Weighting = Literal["uniform", "samples", "samples_per_step"]


def leaders(cards: dict[str, Card]) -> list[str]:
    """Names of the workers whose state is the run's, in order; all others have to catch up with them.

    The largest version leads: those who hold it saw every commit. Where equal versions have different histories
    (chains), the majority does; a tie goes to the history that holds the first name.
    """
    newest = max(card["version"] for card in cards.values())
    chains = {name: card["chain"] for name, card in sorted(cards.items()) if card["version"] == newest}
    chain = Counter(chains.values()).most_common(1)[0][0]  # the first seen in a tie
    position = max(cards[name]["outer_step"] for name in chains if chains[name] == chain)
    return [name for name in chains if chains[name] == chain and cards[name]["outer_step"] == position]


def weigh(cards: dict[str, Card], names: list[str], weighting: Weighting) -> list[float]:
    """Each worker's share in the mean, summing to 1: nothing for one that has just caught up, unless all have.

    To first order a pseudo-gradient grows with its worker's steps, so equal shares already weigh by steps, which is
    the default; "samples" weighs twice by steps (larger batches count more, but so do faster workers);
    "samples_per_step" weighs by batch size alone (FedNova's normalisation, arXiv 2007.07481, up to its scale).
    """
    all_healed = all(cards[name]["healed"] for name in names)

    def amount(card: Card) -> float:
        if card["healed"] and not all_healed:
            return 0.0
        if weighting == "uniform":
            return 1.0
        return float(card[weighting])

    amounts = [amount(cards[name]) for name in names]
    total = sum(amounts)
    return [each / total for each in amounts] if total > 0 else [1 / len(names) for _ in names]


def with_replicated_state(fingerprint: bytes, replicated_state: ReplicatedState | None) -> bytes:
    """The anchors' hash as one of what rides with the commits too; empty where nothing is to be compared."""
    if replicated_state is None or not fingerprint:
        return fingerprint
    replicated = json.dumps(replicated_state.state_dict(), sort_keys=True).encode()
    return hashlib.blake2b(fingerprint + replicated, digest_size=len(fingerprint)).digest()


def link(chain: str, outer_step: int, meeting: str, names: list[str]) -> str:
    """The chain after one more commit: 16 hexadecimal digits."""
    text = "\n".join([chain, str(outer_step), meeting, *names])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
