"""A worker is killed at every point of a sync: real processes, the real lighthouse. `World.check` says what holds."""

import pytest
from elastic_world import BUDGET_SECONDS, world

pytestmark = pytest.mark.processes

VICTIMS = {  # worker 0 is the one that holds the group's store
    "before send": (2, [("before send", 4)]),
    "mid-mean": (0, [("mid-mean", 4)]),
    "mid-gather": (2, [("mid-gather", 4)]),
    "mid-exchange": (1, [("mid-exchange", 4)]),
    "before commit": (2, [("before commit", 4)]),
    "mid-commit": (1, [("mid-commit", 4)]),
    "after commit": (0, [("after commit", 4)]),
    "while healing": (2, [("mid-gather", 4), ("while healing", 1), ("healed", 1)]),
    "while checkpointing": (1, [("while checkpointing", 1), ("checkpoint written", 1)]),
}
RECIPES = {  # diloco elsewhere, whose messages are dense and in float32
    "mid-gather": "sparseloco",  # in one shot: its messages are sparse
    "mid-exchange": "muloco",  # in two: they are quantised
    "while healing": "muloco",
}
BROKEN = {"mid-mean": "all_reduce", "mid-gather": "all_gather", "mid-exchange": "all_to_all"}  # what the others were in
AT_ONCE = {"mid-commit", "while healing"}  # started again before the others have gone on without it


@pytest.mark.parametrize("point", VICTIMS)
def test_killed_the_others_go_on_and_it_comes_back(tmp_path, point):
    victim, deaths = VICTIMS[point]
    survivors = [rank for rank in range(3) if rank != victim]
    with world(tmp_path, RECIPES.get(point, "diloco")) as run:
        for rank in range(3):
            run.start(rank, deaths=deaths if rank == victim else [])
        for number in range(1, len(deaths) + 1):
            run.wait_for(lambda number=number: run.died(victim) == number and run.exit_code(victim) is not None)
            before = [run.syncs(rank, peers=2) for rank in survivors]
            if point not in AT_ONCE:
                run.wait_for(
                    lambda old=before: all(run.syncs(r, 2) > num for r, num in zip(survivors, old, strict=True))
                )
            run.start(victim, resume=True, deaths=deaths)
        if point in BROKEN:
            broken = {event["broken"] for rank in survivors for event in run.seen(rank, "broken")}
            assert f"{BROKEN[point]} of this sync" in broken
        before = run.syncs(victim, peers=3)
        run.wait_for(lambda: run.syncs(victim, peers=3) > before + 1)
        run.wait_for_end()
        for rank in survivors:
            assert max(sync["seconds"] for sync in run.seen(rank, "committed")) < BUDGET_SECONDS
        run.check([0, 1, 2])


def test_all_killed_while_checkpointing_go_on_from_the_checkpoint_before(tmp_path):
    with world(tmp_path) as run:
        for rank in range(3):
            run.start(rank, deaths=[("while checkpointing", 2)])
        run.wait_for(lambda: all(run.died(rank) for rank in range(3)))
        assert len(list(run.run_dir.glob("checkpoints/step-00000050/worker-*.tmp"))) == 3
        for rank in range(3):
            run.start(rank, resume=True)
        run.wait_for_end()
        for rank in range(3):
            assert next(line for line in run.log(rank).splitlines() if line.startswith("step ")).startswith("step 30/")
        run.check([0, 1, 2])
