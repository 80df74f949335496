"""What a configuration says of an elastic world reaches its engine."""

import pytest

from isthmus.core import UserError
from isthmus.recipes import load_config
from isthmus.train.assemble import build_transport


def test_the_stragglers_grace_is_an_option_of_hivemind(tmp_path):
    spec = f"{{type: hivemind, grace_seconds: 3.5, identity_folder: {tmp_path}, host: 127.0.0.1}}"
    assert build_transport(load_config(None, [f"outer.transport={spec}"])).membership.grace_seconds == 3.5


def test_of_torchft_it_is_the_lighthouses():
    with pytest.raises(UserError, match="outer.transport.grace_seconds: unknown key"):
        load_config(None, ["outer.transport={type: torchft, grace_seconds: 3}"])
