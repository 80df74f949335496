"""Who a worker is: an Ed25519 key, and the TLS contexts under which only chosen keys are let in.

A fingerprint is the public key itself, so whoever knows a fingerprint can check a signature, and can make the trust
anchor that TLS asks for: a certificate authority of that key. Nobody needs another worker's certificate in advance.
"""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from isthmus.core.types import UserError

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )

    _is_installed = True
except ModuleNotFoundError:  # a worker alone trains without it
    _is_installed = False

_KIND = "ed25519:"
_BEGIN, _END = datetime(2020, 1, 1), datetime(2120, 1, 1)  # the list of keys decides who is let in, no clock does


class Identity:
    """A private key, by which the others know this worker."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.fingerprint = _fingerprint(key.public_key())
        self._contexts: dict[bool, tuple[list[str], ssl.SSLContext]] = {}  # the last that were made

    @classmethod
    def generate(cls) -> Identity:
        """Return a new identity."""
        _check_installed()
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_secret(cls, secret: str) -> Identity:
        """Return the identity that all who know a secret share."""
        _check_installed()
        derive = HKDF(SHA256(), length=32, salt=None, info=b"isthmus run secret")
        return cls(Ed25519PrivateKey.from_private_bytes(derive.derive(secret.encode())))

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Return the identity of a file that `save` wrote.

        Raises:
            UserError: the file cannot be read, or holds no such key.
        """
        _check_installed()
        try:
            key = load_pem_private_key(path.read_bytes(), None)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): make it with isthmus identity {path}") from None
        except (ValueError, TypeError):
            raise UserError(f"{path} holds no key without a password: make one with isthmus identity {path}") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise UserError(f"{path} holds a key of another kind: make one with isthmus identity {path}")
        return cls(key)

    def save(self, path: Path) -> None:
        """Write the key to a new file that only its owner can read."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}): choose another path") from None
        with open(descriptor, "wb") as file:
            file.write(self._private_pem())

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message, 64 bytes."""
        return self._key.sign(message)

    def tls_context(self, trusted: Iterable[str], server: bool) -> ssl.SSLContext:
        """Return a context of TLS 1.3 that lets in whoever holds the key of a trusted fingerprint, and nobody else.

        It is made once for the same fingerprints: that takes milliseconds for each, and strangers can ask for it.

        Raises:
            UserError: a fingerprint is none.
        """
        fingerprints = sorted(set(trusted))
        made = self._contexts.get(server)
        if made is None or made[0] != fingerprints:
            self._contexts[server] = made = (fingerprints, self._make_context(fingerprints, server))
        return made[1]

    def _make_context(self, trusted: list[str], server: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the key is what is checked
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0  # sessions are not resumed
        name = _name(self.fingerprint)
        leaf = _certificate(x509.Name([]), name, self._key.public_key(), self._key, is_authority=False)
        with tempfile.NamedTemporaryFile() as file:  # `load_cert_chain` reads files only; this one is for the owner
            file.write(self._private_pem() + leaf.public_bytes(Encoding.PEM))
            file.flush()
            context.load_cert_chain(file.name)
        if anchors := [_trust_anchor(fingerprint) for fingerprint in trusted]:
            context.load_verify_locations(cadata="".join(anchors))
        return context

    def _private_pem(self) -> bytes:
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _check_installed() -> None:
    if not _is_installed:
        raise UserError("workers know one another by keys of the package cryptography: pip install cryptography")


def fingerprint_of(connection: ssl.SSLSocket) -> str:
    """Return the fingerprint of the other end of a connection, which its handshake has checked."""
    certificate = connection.getpeercert(binary_form=True)
    assert certificate is not None, "the handshake comes first"
    key = x509.load_der_x509_certificate(certificate).public_key()
    assert isinstance(key, Ed25519PublicKey), "no other kind is trusted"
    return _fingerprint(key)


def check_fingerprint(fingerprint: str) -> None:
    """Raise `UserError` where a text is no fingerprint."""
    _public_key(fingerprint)


def is_signed_by(fingerprint: str, signature: bytes, message: bytes) -> bool:
    """Return whether the holder of a key signed this message."""
    try:
        _public_key(fingerprint).verify(signature, message)
    except (InvalidSignature, UserError):
        return False
    return True


def _fingerprint(key: Ed25519PublicKey) -> str:
    return _KIND + base64.urlsafe_b64encode(key.public_bytes_raw()).decode().rstrip("=")


def _public_key(fingerprint: str) -> Ed25519PublicKey:
    try:
        if not fingerprint.startswith(_KIND):
            raise ValueError
        return Ed25519PublicKey.from_public_bytes(base64.urlsafe_b64decode(fingerprint.removeprefix(_KIND) + "="))
    except ValueError:
        raise UserError(f"{fingerprint!r} is no fingerprint: isthmus identity prints them") from None


def _trust_anchor(fingerprint: str) -> str:
    """Return a certificate authority of a public key; nobody checks who signed a trust anchor, so a stranger does."""
    name = _name(fingerprint)
    authority = _certificate(name, name, _public_key(fingerprint), Ed25519PrivateKey.generate(), is_authority=True)
    return authority.public_bytes(Encoding.PEM).decode()


def _name(fingerprint: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, fingerprint)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: Ed25519PublicKey, signer: Ed25519PrivateKey, is_authority: bool
) -> x509.Certificate:
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(_BEGIN).not_valid_after(_END)
    builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    return builder.sign(signer, None)
