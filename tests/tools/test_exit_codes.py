"""What the program says of errors that were foreseen."""

import numpy as np
import pytest
import torch

from isthmus.tools.exit_codes import message_and_code

PETABYTES = 10**16


@pytest.mark.parametrize(
    "allocate", [lambda: np.empty(PETABYTES), lambda: torch.empty(PETABYTES)], ids=["numpy", "torch"]
)
def test_memory_that_is_not_there_is_one_line_with_advice(allocate):
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        allocate()
    message, code = message_and_code(caught.value)
    assert message == "there is not enough memory: lower inner.batch_size, or set inner.micro_batch_size"
    assert code == 1


def test_an_error_that_nobody_foresaw_is_raised_again():
    with pytest.raises(RuntimeError, match="a defect"):
        message_and_code(RuntimeError("a defect"))
