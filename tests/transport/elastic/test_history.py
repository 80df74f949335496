from isthmus.transport.elastic.history import CommitHistory, extend_chain
from isthmus.transport.elastic.membership import Rendezvous


def test_the_chain_tells_commits_apart():
    one = extend_chain("a", 3, "rendezvous-1", ["a", "b"])
    assert one == extend_chain("a", 3, "rendezvous-1", ["a", "b"])
    others = [extend_chain("b", 3, "rendezvous-1", ["a", "b"]), extend_chain("a", 4, "rendezvous-1", ["a", "b"])]
    others += [extend_chain("a", 3, "rendezvous-2", ["a", "b"]), extend_chain("a", 3, "rendezvous-1", ["a"])]
    assert len({one, *others}) == 5


def test_who_made_the_last_commit_is_saved_and_former_checkpoints_do_without():
    history, later = CommitHistory(None), CommitHistory(None)
    for names in (["a", "b", "c"], ["b", "c"]):
        history.append(1, Rendezvous("r", {name: {"proposal": None} for name in "abc"}), names, [1.0] * len(names))
    assert history.members == ["b", "c"]
    later.load_state_dict(history.state_dict())
    assert later.members == ["b", "c"]
    former = {key: value for key, value in history.state_dict().items() if key != "members"}
    later.load_state_dict(former)
    assert later.members == []
