"""torch must not ask DNS for those who connect."""

import os
import subprocess
import sys

PROGRAM = """
import socket
try:
    socket.gethostbyaddr("127.9.9.9")  # the process has asked DNS before
except OSError:
    pass
from isthmus.transport.dns import spare_lookups
spare_lookups()
print("spared", flush=True)
from torch.distributed import TCPStore
TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
"""


def test_the_one_lookup_that_torch_makes_fails_and_is_the_last():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"TORCH_CPP_LOG_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("The hostname of the client socket cannot be retrieved") == 1
