"""Keys and certificates for tests of signatures, made when they are asked for."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)
Key = ec.EllipticCurvePrivateKey


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def write_key(key: Key, path: Path, password: bytes | None = None) -> Path:
    """Puts the private key at ``path``, and the public one beside it, with ``.pub`` at its end."""
    locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(public)
    return path


def pem(certificate: x509.Certificate, path: Path) -> Path:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


def certificate(
    name: str,
    key: Key,
    *,
    issuer: tuple[str, Key] | None = None,
    days: tuple[int, int] = (-1, 30),
    is_authority: bool = False,
    email: str | None = None,
    extensions: list[tuple[x509.ExtensionType, bool]] | None = None,
) -> x509.Certificate:
    """A certificate of ``key``, valid from the first day to the second, counted from now."""

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.now(timezone.utc)
    issuer_name, issuer_key = issuer or (name, key)
    usage: dict[str, Any] = dict.fromkeys(
        (
            *("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
            *("crl_sign", "encipher_only", "decipher_only"),
        ),
        False,
    )
    made = (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer_name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + days[0] * DAY)
        .not_valid_after(now + days[1] * DAY)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=not is_authority, key_cert_sign=is_authority, **usage), critical=True
        )
    )
    if email:
        made = made.add_extension(x509.SubjectAlternativeName([x509.RFC822Name(email)]), critical=False)
    for extension, critical in extensions or ():
        made = made.add_extension(extension, critical=critical)
    return made.sign(issuer_key, hashes.SHA256())
