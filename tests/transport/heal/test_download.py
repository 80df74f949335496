import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from isthmus.transport import TransportError
from isthmus.transport.heal.download import Download
from isthmus.transport.heal.snapshot import Incoming, Manifest, Outgoing, Snapshot


def promise(value: int, name: str = "v1") -> Manifest:
    return Manifest.parse(Outgoing(Snapshot(name, {"value": value})).manifest, 0)


def elect(offers: dict[str, Manifest]):
    """The elected manifest, and what each donor got from its offer."""
    download = Download(list(offers), 20, time.monotonic() + 20)
    with ThreadPoolExecutor(len(offers)) as threads:
        answers = {donor: threads.submit(download.offer, donor, manifest) for donor, manifest in offers.items()}
        try:
            elected = download.elect()
            download.receive(Incoming(elected))
            return elected, {donor: str(answer.exception()) for donor, answer in answers.items()}
        finally:
            download.end()


def test_the_majority_is_elected_and_the_others_told():
    elected, answers = elect({"a": promise(1), "b": promise(2), "c": promise(2)})
    assert elected == promise(2)
    assert answers == {"a": "its state v1 differs from the majority's", "b": "None", "c": "None"}


def test_more_donors_before_the_first_donor():
    elected, answers = elect({"a": promise(1, "v2"), "b": promise(1), "c": promise(1)})
    assert elected.id == "v1"
    assert answers == {"a": "its state is v2, not v1", "b": "None", "c": "None"}


def test_the_first_donor_in_a_tie():
    elected, _ = elect({"a": promise(1, "v2"), "b": promise(1, "v1")})
    assert elected.id == "v2"


def test_a_state_of_two_forms_without_a_majority_is_refused():
    with pytest.raises(TransportError, match="disagree about state v1"):
        elect({"a": promise(1), "b": promise(2), "c": promise(1, "v0")})


def test_a_chunk_is_asked_again_when_it_was_given_back_or_takes_too_long():
    outgoing = Outgoing(Snapshot("v1", {"values": torch.zeros(4)}), 8)
    incoming = Incoming(Manifest.parse(outgoing.manifest, 16))
    chunks = [memoryview(b"".join(outgoing.chunk(index))) for index in range(2)]
    download = Download(["a", "b"], 0.01, time.monotonic() + 20)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(download.receive, incoming)
        assert download.offer("a", incoming.manifest) is incoming
        assert [download.reserve(wait=True), download.reserve(wait=False), download.reserve(wait=False)] == [
            0,
            1,
            None,
        ]
        download.give_back([1])
        assert download.reserve(wait=False) == 1
        assert download.reserve(wait=True) == 0  # the oldest, after its patience
        download.put("b", 0, chunks[0])
        download.put("a", 0, chunks[0])  # too late
        download.give_back([0])  # nor is it missing again
        assert download.reserve(wait=True) == 1
        download.put("a", 1, chunks[1])
        assert download.reserve(wait=True) is None
        done.result()
    assert download.chunks == {"a": 1, "b": 1}
    assert torch.equal(incoming.finish()["values"], torch.zeros(4))
