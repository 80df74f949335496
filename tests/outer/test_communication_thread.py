"""The communication thread."""

import gc
import subprocess
import sys
import time
import weakref

import pytest
import torch

from isthmus.outer.communication_thread import CommunicationThread


def test_jobs_run_one_after_the_other_and_hand_over_results_and_errors() -> None:
    background, seen = CommunicationThread(), []

    def slow() -> str:
        time.sleep(0.05)
        seen.append("slow")
        return "result"

    first = background.submit(slow)
    second = background.submit(lambda: seen.append("quick"))
    third = background.submit(lambda: 1 / 0)
    assert first.result() == "result"
    second.result()
    with pytest.raises(ZeroDivisionError):
        third.result()
    assert seen == ["slow", "quick"]
    assert background.submit(torch.is_grad_enabled).result() is False


def test_the_thread_keeps_nothing_of_a_finished_job_alive() -> None:
    background = CommunicationThread()
    result = background.submit(lambda: torch.ones(3)).result()
    gone = weakref.ref(result)
    del result
    for _ in range(100):
        gc.collect()
        if gone() is None:
            return
        time.sleep(0.01)
    pytest.fail("a finished job's result is still held")


@pytest.mark.processes
def test_a_program_that_forgets_to_close_ends_cleanly_in_the_middle_of_a_job() -> None:
    code = (
        "import torch; from isthmus.outer.communication_thread import CommunicationThread; b = CommunicationThread();"
        "b.submit(lambda: [torch.randn(300, 300) @ torch.randn(300, 300) for _ in range(40)])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
