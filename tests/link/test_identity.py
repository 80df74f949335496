"""Keys, and the TLS contexts that let in chosen ones."""

import socket
import ssl
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from isthmus.core import UserError
from isthmus.link import identity as module
from isthmus.link.identity import Identity, fingerprint_of, is_signed_by


def handshake(server: Identity, client: Identity, server_trusts: list[str], client_trusts: list[str]):
    """The fingerprints that both ends saw; raises what either raised."""
    ours, theirs = socket.socketpair()

    def serve() -> str:
        with ours, server.tls_context(server_trusts, server=True).wrap_socket(ours, server_side=True) as connection:
            seen = fingerprint_of(connection)
            connection.sendall(connection.recv(1))
            return seen

    with ThreadPoolExecutor(1) as pool, theirs:
        served = pool.submit(serve)
        try:
            with client.tls_context(client_trusts, server=False).wrap_socket(theirs) as connection:
                seen = fingerprint_of(connection)
                assert connection.version() == "TLSv1.3"
                connection.sendall(b"!")
                assert connection.recv(1) == b"!"
        finally:
            theirs.close()
            seen_by_server = served.result(10)
    return seen_by_server, seen


def test_each_end_sees_the_others_key():
    a, b = Identity.generate(), Identity.generate()
    assert handshake(a, b, [b.fingerprint], [a.fingerprint]) == (b.fingerprint, a.fingerprint)


def test_of_many_that_are_trusted_each_is_let_in():
    a, *others = (Identity.generate() for _ in range(4))
    trusted = [other.fingerprint for other in others]
    for other in others:
        assert handshake(a, other, trusted, [a.fingerprint])[0] == other.fingerprint


def test_a_stranger_is_let_in_by_neither_end():
    a, b, c = (Identity.generate() for _ in range(3))
    with pytest.raises(ssl.SSLError):
        handshake(a, c, [b.fingerprint], [a.fingerprint])
    with pytest.raises(ssl.SSLError):
        handshake(c, b, [b.fingerprint], [a.fingerprint])


def test_who_only_says_that_it_is_trusted_is_not(monkeypatch):
    a, b, thief = (Identity.generate() for _ in range(3))
    monkeypatch.setattr(thief, "fingerprint", b.fingerprint)  # so its certificate has b's name, signed by itself
    with pytest.raises(ssl.SSLError):
        handshake(a, thief, [b.fingerprint], [a.fingerprint])


def test_nobody_is_trusted_where_the_list_is_empty():
    a, b = Identity.generate(), Identity.generate()
    with pytest.raises(ssl.SSLError):
        handshake(a, b, [], [a.fingerprint])


def test_all_who_know_a_secret_share_an_identity():
    assert Identity.from_secret("open").fingerprint == Identity.from_secret("open").fingerprint
    assert Identity.from_secret("open").fingerprint != Identity.from_secret("Open").fingerprint


def test_a_file_is_for_its_owner_and_never_overwritten(tmp_path):
    path, made = tmp_path / "key", Identity.generate()
    made.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load(path).fingerprint == made.fingerprint
    with pytest.raises(UserError, match="File exists"):
        made.save(path)


@pytest.mark.parametrize("content", [None, b"", b"not a key", b"\xff\xfe"])
def test_a_file_without_a_key_is_one_line(tmp_path, content):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="isthmus identity") as error:
        Identity.load(path)
    assert "\n" not in str(error.value)


def test_signatures():
    a, b = Identity.generate(), Identity.generate()
    signature = a.sign(b"message")
    assert is_signed_by(a.fingerprint, signature, b"message")
    assert not is_signed_by(a.fingerprint, signature, b"massage")
    assert not is_signed_by(b.fingerprint, signature, b"message")
    assert not is_signed_by("no fingerprint", signature, b"message")


@pytest.mark.parametrize("text", ["", "ed25519:", "ed25519:AAAA", "rsa:" + "A" * 43, "ed25519:" + "%" * 43])
def test_what_is_no_fingerprint_is_refused(text):
    with pytest.raises(UserError, match="is no fingerprint"):
        module._public_key(text)
