"""What a person is told who names a lighthouse that is none, or starts one where none can listen."""

import pytest
from tests.transport.links import open_link

from isthmus.core import UserError
from isthmus.transport.address import free_port
from isthmus.transport.torchft.lighthouse import lighthouse
from isthmus.transport.torchft.membership import TorchFTMembership


@pytest.fixture
def address():
    with lighthouse("127.0.0.1:0", dead_seconds=3) as port:
        yield f"127.0.0.1:{port}"


def test_no_lighthouse():
    port = free_port()
    with pytest.raises(UserError, match=f"no lighthouse answered at 127.0.0.1:{port} for 0.5 s: is `isthmus lightho"):
        TorchFTMembership(f"127.0.0.1:{port}", "a", 0.5).connect(open_link())


@pytest.mark.parametrize("address", ["nonsense", "http://10.0.0.5:29510", "10.0.0.5", "10.0.0.5:99999", "::1:29510"])
def test_no_address(address):
    with pytest.raises(UserError, match="is no address: write host:port, say 10.0.0.5:29510"):
        TorchFTMembership(address, "a").connect(open_link())


def test_a_port_in_use(address):
    expected = r"port \d+ is in use on this machine: give the lighthouse a free one"
    with pytest.raises(UserError, match=expected), lighthouse(address):
        pass
