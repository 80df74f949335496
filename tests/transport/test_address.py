import pytest

from isthmus.transport.address import join_address, own_address, split_address


@pytest.mark.parametrize("address", ["10.0.0.5:29510", "a-host:1", "[::1]:29510"])
def test_addresses(address):
    assert join_address(*split_address(address)) == address


def test_own_address():
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("no-such-host.invalid") == "127.0.0.1"
