"""What finds a model whose gradients cross at every step, in a process with other threads."""

import sys
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from isthmus.core import UserError
from isthmus.recipes.wrapping import refuse_shared_gradients


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def restless_threads() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("process_group")
def test_the_wrapper_is_found_however_deep_the_model_is_in_it() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    wrapper = DistributedDataParallel(nn.Sequential(nn.Sequential(model), nn.Tanh()))
    refuse_shared_gradients(model, ranks_per_worker=1)
    for wrapped in (model, wrapper.module, wrapper):
        with pytest.raises(UserError, match="the model is wrapped in DistributedDataParallel"):
            refuse_shared_gradients(wrapped, ranks_per_worker=0)
    refuse_shared_gradients(other, ranks_per_worker=0)


@pytest.mark.usefixtures("restless_threads")
def test_to_look_for_a_wrapper_does_not_disturb_other_threads() -> None:
    ended, failures = threading.Event(), list[SystemError]()

    def build() -> None:
        try:
            while not ended.is_set():
                tuple(i for i in range(11))
        except SystemError as error:
            failures.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    for _ in range(5):
        refuse_shared_gradients(nn.Linear(2, 2), ranks_per_worker=1)
    ended.set()
    thread.join()
    assert not failures
