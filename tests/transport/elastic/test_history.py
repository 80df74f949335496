from isthmus.transport.elastic.history import extend_chain


def test_the_chain_tells_commits_apart():
    one = extend_chain("a", 3, "rendezvous-1", ["a", "b"])
    assert one == extend_chain("a", 3, "rendezvous-1", ["a", "b"])
    others = [extend_chain("b", 3, "rendezvous-1", ["a", "b"]), extend_chain("a", 4, "rendezvous-1", ["a", "b"])]
    others += [extend_chain("a", 3, "rendezvous-2", ["a", "b"]), extend_chain("a", 3, "rendezvous-1", ["a"])]
    assert len({one, *others}) == 5
