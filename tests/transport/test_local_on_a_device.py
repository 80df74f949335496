"""Workers of one process whose messages lie on a GPU, where there is one, each behind a stream of its own."""

import pytest
import torch

from isthmus.outer.communication_thread import CommunicationThread
from isthmus.transport.local import Local, LocalWorld, run_workers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORKERS, ROUNDS = 4, 8
VALUES, WIDTH = (1 << 21, 1024) if torch.cuda.is_available() else (1 << 12, 32)


def exchange_in_rounds(rank: int, transport: Local) -> list[bool]:
    """Whether every round brought what the peers sent, whose streams are busy with other work before that."""
    thread, right = CommunicationThread(DEVICE), list[bool]()
    busy = torch.ones(WIDTH, WIDTH, device=DEVICE)

    def exchange(number: int) -> bool:
        other = busy
        for _ in range(20 * rank):
            other = other @ busy / WIDTH
        own = other.flatten()[:1] * torch.full((VALUES,), rank + 4.0 * number, device=DEVICE)
        peers = transport.quorum(number)
        (mean,) = peers.all_reduce_mean([own])
        everybody = [theirs for (theirs,) in peers.all_gather([own])]
        parts = [part for (part,) in peers.all_to_all([[each] for each in own.chunk(WORKERS)])]
        wanted = [peer + 4.0 * number for peer in range(WORKERS)]
        del own  # its memory may be taken while peers still read
        torch.full((VALUES,), -1.0, device=DEVICE)
        found = [mean, *everybody, *parts]
        return all(bool((a == b).all()) for a, b in zip(found, [sum(wanted) / WORKERS, *wanted, *wanted], strict=True))

    for number in range(ROUNDS):
        right.append(thread.run(lambda number=number: exchange(number)))
    thread.close()
    return right


@pytest.mark.gpu
def test_everybody_gets_what_the_peers_sent() -> None:
    assert run_workers(LocalWorld(WORKERS), exchange_in_rounds) == [[True] * ROUNDS] * WORKERS
