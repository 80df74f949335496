"""The number of a worker, from whoever has started it."""

import os
from collections.abc import Callable

import pytest

from isthmus.core import UserError
from isthmus.transport.elastic.worker_ranks import worker_number
from isthmus.transport.rendezvous import find_world, follow_srun

KUBERNETES = {"JOB_COMPLETION_INDEX": "2"}
ARRAY = {"SLURM_ARRAY_TASK_ID": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
STEP = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"}
CASES = {
    "nobody": ({}, 0),
    "an Indexed Job": (KUBERNETES, 2),
    "an array of Slurm": (ARRAY, 4),
    "a step of Slurm": (STEP, 3),
    "SkyPilot": ({"SKYPILOT_NODE_RANK": "1"}, 1),
    "dstack": ({"DSTACK_NODE_RANK": "1"}, 1),
    "torchrun in any of them": (KUBERNETES | ARRAY | {"RANK": "7"}, 7),
    "the second site": (KUBERNETES | {"ISTHMUS_WORKER_OFFSET": "8"}, 10),
    "the second site's torchrun": ({"RANK": "1", "ISTHMUS_WORKER_OFFSET": "8"}, 9),
    "alone at the second site": ({"ISTHMUS_WORKER_OFFSET": "8"}, 8),
    "told": (KUBERNETES | {"RANK": "7", "ISTHMUS_WORKER": "5", "ISTHMUS_WORKER_OFFSET": "8"}, 5),
}


@pytest.fixture
def environ(monkeypatch) -> Callable[[dict[str, str]], None]:
    """Sets the environment of a worker, whatever that of the tests is."""

    def chosen(values: dict[str, str]) -> None:
        monkeypatch.setattr(os, "environ", dict(values))

    return chosen


@pytest.mark.parametrize("case", CASES)
def test_a_worker_of_one_rank(environ, case):
    environment, number = CASES[case]
    environ(environment)
    assert worker_number() == number


def test_of_a_worker_of_several_ranks_these_are_not_counted(environ):
    environ(KUBERNETES | STEP | {"RANK": "7", "ISTHMUS_WORKER_OFFSET": "8"})
    assert worker_number(4) == 10
    environ(STEP | {"RANK": "7", "SKYPILOT_NODE_RANK": "1"})
    assert worker_number(4) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ISTHMUS_WORKER", "it should be this worker's number, from 0 on"),
        ("ISTHMUS_WORKER_OFFSET", "it should be the number of this site's first worker, from 0 on"),
        ("JOB_COMPLETION_INDEX", "it should be a number that a scheduler gives, from 0 on"),
    ],
)
@pytest.mark.parametrize("value", ["", "-1", "two"])
def test_what_is_no_number_is_named(environ, name, message, value):
    environ({name: value})
    with pytest.raises(UserError) as error:
        worker_number()
    assert str(error.value) == f"{name} is {value!r}: {message}"


def test_srun_counts_ranks_as_torchrun_does(environ):
    place = {"MASTER_ADDR": "first", "MASTER_PORT": "29500"}
    environ(STEP | place)
    follow_srun()
    assert (find_world(), os.environ["LOCAL_RANK"]) == ((3, 4), "1")
    environ(STEP | place | {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"})  # a torchrun in a step
    follow_srun()
    assert (find_world(), os.environ["LOCAL_RANK"]) == ((1, 2), "0")
    for alone in (ARRAY, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}):  # the latter is a batch script
        environ(alone)
        follow_srun()
        assert find_world() == (0, 1)
    environ(STEP)
    follow_srun()
    with pytest.raises(UserError, match="WORLD_SIZE is 4, but MASTER_ADDR, MASTER_PORT not set"):
        find_world()
