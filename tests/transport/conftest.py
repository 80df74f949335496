import pytest
from transport_zygote import Zygote


@pytest.fixture(scope="package")
def zygote():
    """Starts real processes; see `transport_zygote`."""
    zygote = Zygote()
    yield zygote
    zygote.close()
