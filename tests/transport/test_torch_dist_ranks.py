"""Workers of two ranks, in real processes over gloo: rank r belongs to worker r // 2."""

import math
import socket

import pytest

from isthmus.core import UserError
from isthmus.transport.rendezvous import RankLayout

pytestmark = pytest.mark.processes

BUDGET = 6.0  # seconds for a sync, where somebody is lost
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def zygote(the_zygote):
    return the_zygote.of("rank_scenarios")


def results(ended):
    assert [rank.code for rank in ended] == [0] * len(ended), ended
    return [rank.result for rank in ended]


def test_ranks_of_six():
    ranks = RankLayout(size=6, per_worker=2)
    assert [list(ranks.peers_of(rank)) for rank in (0, 3)] == [[0, 2, 4], [1, 3, 5]]
    assert [list(ranks.of_worker(rank)) for rank in (0, 3)] == [[0, 1], [2, 3]]
    assert ranks.name(3, "x") == "worker 1 (rank 3, host x)"
    assert RankLayout(size=6).name(3, "x") == "worker 3 (host x)"
    assert list(RankLayout(size=3).peers_of(2)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("ranks", "expected_workers", "message"),
    [
        (RankLayout(3, 2), None, "a worker has 2 ranks, but 3 ranks started: start a multiple of that"),
        (RankLayout(3, 2), 2, "the configuration says 2 workers of 2 ranks, but 3 ranks started"),
        (RankLayout(4, 2), 4, "the configuration says 4 workers of 2 ranks, but 4 ranks started"),
        (RankLayout(1, 4), 1, "the configuration says 1 worker of 4 ranks, but 1 rank started"),
    ],
    ids=str,
)
def test_a_world_that_does_not_multiply_up(ranks, expected_workers, message):
    with pytest.raises(UserError) as caught:
        ranks.check(expected_workers)
    assert str(caught.value) == message


def test_a_wrong_number_of_ranks_is_found_at_join(zygote):
    expected = "the configuration says 3 workers of 2 ranks, but 2 ranks started"
    assert results(zygote.run("join_only", 2, ranks_per_worker=[2, 2], expected_workers=3)) == [expected] * 2


def test_ranks_that_differ_in_the_mesh_find_it_at_join(zygote):
    one, other = results(zygote.run("join_only", 2, ranks_per_worker=[1, 2]))
    assert one == "workers differ in ranks per worker: worker 0 has 1, worker 1 has 2"
    assert other == "workers differ in ranks per worker: worker 0 (rank 0) has 1, worker 0 (rank 1) has 2"


def test_the_contract_of_transports_holds_at_every_place_of_a_worker(zygote):
    for outcomes in results(zygote.run("contract", 4)):
        assert not any(outcomes.values()), outcomes


def test_ranks_average_with_those_that_hold_the_same_shard(zygote):
    for rank, (place, mean, inside, sent_bytes) in enumerate(results(zygote.run("average", 4))):
        assert place == [rank // 2, 2, rank // 2, 2]
        assert mean == [1.0 + rank % 2] * (3 + 2 * (rank % 2))
        assert inside == ([0, 1] if rank < 2 else [2, 3])
        assert sent_bytes == 4 * len(mean), "to the other workers only"


def test_a_vote_is_that_of_all_ranks(zygote):
    assert results(zygote.run("commit", 4)) == [True] * 4
    assert results(zygote.run("commit", 4, against=3)) == [False] * 4


def test_a_lone_worker_of_two_ranks_agrees_with_itself(zygote):
    assert results(zygote.run("commit", 2)) == [True] * 2
    assert results(zygote.run("commit", 2, against=0)) == [False] * 2


def test_drift_of_one_rank_is_that_of_its_worker(zygote):
    for ranks, message in results(zygote.run("commit", 4, drifted=3)):
        assert ranks == [1]
        assert "of worker 1 differ from those of worker 0" in message


@pytest.mark.parametrize("victim", [3, 0])
def test_a_lost_rank_is_named_by_all_within_the_budget(zygote, victim):
    ended = zygote.run("lose_a_rank", 4, whole_end=True, within_seconds=30, victim=victim, budget=BUDGET)
    for rank in ended[:victim] + ended[victim + 1 :]:
        lost = rank.result
        assert lost["ranks"] == [victim]
        assert f"worker {victim // 2} (rank {victim}, host {HOST})" in lost["message"]
        assert lost["seconds"] < BUDGET
        assert rank.code == 3, "exit code chosen by the scenario"
        assert rank.ended_at - lost["ended_at"] < BUDGET, "a stuck collective must not hold up the exit"


def test_a_rank_that_does_not_come_is_named_however_many_collectives_others_made(zygote):
    for ranks, message in results(zygote.run("come_late", 4, budget=2.0))[:3]:
        assert ranks == [3]
        assert f"worker 1 (rank 3, host {HOST})" in message


def test_a_rank_that_does_not_come_inside_its_worker_is_named(zygote):
    ranks, message = results(zygote.run("come_late_inside", 4, budget=2.0))[2]
    assert ranks == [3]
    assert message.startswith("all_gather inside the worker failed: not done in 2 s, worker 1 (rank 3")
    assert "did not come, though alive" in message


def test_a_rank_may_wait_inside_its_worker_for_longer_than_one_collective(zygote):
    waited = results(zygote.run("wait_inside", 4, budget=3.0, pauses=3, pause_seconds=1.2))
    assert waited[0] > 3.0
    assert waited[2] > 3.0


def test_a_call_after_leaving_is_an_error(zygote):
    message = "all_gather inside the worker: this worker has not joined, or has left"
    assert results(zygote.run("call_after_leaving", 2)) == [message] * 2


def check_all_alike(trained, param):
    """All ranks tell the same of every sync, and stand where they should."""
    for rank in trained:
        assert rank["param"] == pytest.approx([param] * len(rank["param"]), abs=2e-4)
        for key in ("committed", "reasons", "left_out", "anchor_hash"):
            assert rank[key] == trained[0][key]


def test_training_reports_norms_of_the_whole_worker(zygote):
    trained = results(zygote.run("train", 4))
    check_all_alike(trained, param=-0.9)
    for rank in trained:
        assert rank["norms"] == pytest.approx([0.3 * math.sqrt(3 + 5)] * 3)
        assert rank["cosines"] == pytest.approx([1.0] * 3)
        assert rank["left_out"] == [{}] * 3


def test_bad_values_in_one_shard_leave_the_worker_out_on_all_ranks(zygote):
    """Worker 1 gives nothing to the second sync, and all its ranks go on from the anchor."""
    trained = results(zygote.run("train", 4, spoil=3))
    check_all_alike(trained, param=-(0.3 + 0.2 + 0.3))
    assert trained[0]["left_out"] == [{}, {"1": "its contribution is not finite"}, {}]
    assert trained[0]["committed"] == [True] * 3


def test_a_message_that_overflows_in_one_shard_is_refused_by_all_ranks(zygote):
    """Worker 0 keeps the progress of the refused sync, both ranks of worker 1 start over from the anchor."""
    trained = results(zygote.run("train", 4, spoil=3, value=1e5, wire="float16", max_norm_factor=math.inf))
    check_all_alike(trained, param=-(0.3 + (0.4 + 0.4) / 2))
    assert trained[0]["committed"] == [True, False, True]
    assert trained[0]["reasons"][1] == "the message of worker 1 is not finite"
    assert trained[0]["left_out"] == [{}, {"1": "its message is not finite"}, {}]


def test_a_lone_worker_starts_over_on_all_ranks(zygote):
    trained = results(zygote.run("train", 2, spoil=1, workers=1))
    check_all_alike(trained, param=-0.4)
    assert trained[0]["committed"] == [True, False, True]


def test_other_weights_on_one_rank_are_refused_by_all(zygote):
    assert results(zygote.run("train_from_other_weights", 4, odd=3)) == [[1]] * 4
