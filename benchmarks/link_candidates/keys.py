"""Keys for both peers, made for one run: certificates that sign themselves for TLS, key pairs for CURVE."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def make_keys(folder: Path) -> None:
    """Write RANK.key and RANK.pem, and CURVE's where pyzmq is installed."""
    for rank in (0, 1):
        _make_certificate(folder, rank)
    with suppress(ImportError):
        import zmq.auth

        public, secret = folder / "curve", folder / "curve-secret"
        public.mkdir()
        secret.mkdir()
        for rank in (0, 1):
            made, _ = zmq.auth.create_certificates(secret, str(rank))
            Path(made).rename(public / f"{rank}.key")


def _make_certificate(folder: Path, rank: int) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"peer {rank}")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("peer")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / f"{rank}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / f"{rank}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
