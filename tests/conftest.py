"""Options and settings shared by all tests."""

import signal

import pytest
import torch

torch.set_num_threads(1)
# a shell without job control has what it starts in the background ignore Ctrl-C, and whatever that starts, too
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate-golden", action="store_true", help="write the golden traces anew")
