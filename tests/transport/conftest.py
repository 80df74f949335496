import pytest
from transport_zygote import Zygote


@pytest.fixture(scope="session")
def the_zygote():
    """Starts real processes for all tests; see `transport_zygote`."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def zygote(the_zygote):
    """Runs `transport_scenarios`; modules with scenarios of their own have a fixture of this name."""
    return the_zygote.of("transport_scenarios")
