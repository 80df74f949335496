import functools

import pytest
from transport_contract import CHECKS, run_checks

from isthmus.transport import TRANSPORTS
from isthmus.transport.local import LocalWorld, run_workers

pytestmark = pytest.mark.processes

# elastic worlds join real engines: what they move is tested with those, in test_torchft and test_hivemind
STATIC = [name for name in TRANSPORTS.names() if not TRANSPORTS.get(name).limits.elastic]


@pytest.fixture(scope="module")
def outcomes(zygote):
    """(transport, number of workers) -> what each worker's checks came to; run once each."""

    def local(size):
        return run_workers(LocalWorld(size), lambda rank, transport: run_checks(transport, rank, size))

    def torch_dist(size):
        ended = zygote.run("contract", size)
        assert all(worker.code == 0 for worker in ended), ended
        return [worker.result for worker in ended]

    runners = {"local": local, "torch_dist": torch_dist}  # a new transport says here how its workers start
    return functools.cache(lambda transport, size: runners[transport](size))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("transport", STATIC)
def test_contract(outcomes, transport, size, check):
    failures = [f"worker {rank}: {each[check]}" for rank, each in enumerate(outcomes(transport, size)) if each[check]]
    assert not failures, "\n".join(failures)
