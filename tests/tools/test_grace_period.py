"""How long a worker may take from SIGTERM to its end."""

from pathlib import Path

import pytest
from tests.train.toy_runs import toy_config

from isthmus.models import outline
from isthmus.recipes import load_config
from isthmus.tools.grace_period import GracePeriod, checkpoint_bytes
from isthmus.train.assemble import build_model_spec
from isthmus.train.worker import train

TORCHFT = "outer.transport.type=torchft"


@pytest.mark.parametrize("recipe", ["ddp", "diloco", "streaming", "muloco", "sparseloco"])
def test_no_checkpoint_is_larger(tmp_path, recipe):
    config = toy_config(tmp_path, f"outer.recipe={recipe}", "model.arguments={width: 256}", "train.workers=1")
    train(config)
    (newest,) = Path(config.train.run_dir).glob("checkpoints/step-00000012/worker-0")
    written = sum(path.stat().st_size for path in newest.iterdir())
    most = checkpoint_bytes(config, outline(build_model_spec(config)))
    assert 0.5 * most < written <= 1.02 * most


@pytest.mark.parametrize(
    ("overrides", "workers", "expected"),
    [
        (["outer.recipe=diloco"], 1, (1 + 8, 0)),
        (["outer.recipe=diloco", "outer.schedule.local_steps=50"], 2, (1 + 50 + 8, 3 * 20)),
        (["outer.recipe=ddp"], 2, (1 + 8, 3 * 20)),
        (["outer.recipe=diloco", TORCHFT], 2, (1 + 8, 60)),
        (
            ["outer.recipe=diloco", TORCHFT, "outer.transport.sync_budget_seconds=20", "train.eval_batches=1"],
            2,
            (2, 20),
        ),
    ],
)
def test_what_it_is_made_of(overrides, workers, expected):
    config = load_config("examples/tiny.yaml", overrides, workers)
    period = GracePeriod.of(config, outline(build_model_spec(config)))
    assert (period.num_steps, period.sync_seconds) == expected
    assert period.tracker_seconds == 0


def test_it_is_said_with_and_without_the_seconds_of_a_step():
    period = GracePeriod(9, 60.0, 30.0, 500_000_000)
    assert period.seconds(0.5) == 60 + 30 + 5 + 4.5
    assert period.describe(0.5) == (
        "from SIGTERM to its end a worker takes up to 99.5 s: 60 s for syncs under way, 5 s to write 500.0 MB at "
        "100.0 MB/s, modelled, 30 s for the trackers, and 4.5 s for 9 inner steps"
    )
    assert GracePeriod(1, 0.0, 0.0, 1_000_000).describe() == (
        "from SIGTERM to its end a worker takes up to 0.0 s and 1 inner step: 10 ms to write 1.0 MB at 100.0 MB/s, "
        "modelled, and 1 inner step (--step-seconds says how long one is)"
    )
