"""One signature file: from its bytes to the names and digests that it vouches for.

The library of OpenSSF Model Signing verifies; it is asked by its public interface, with a hashing configuration that
hashes nothing and only hears what is expected. Its word is taken for the signature. Three things it leaves open are
decided here: whether a certificate is valid now (it only asks whether it was when its validity began), whose it is,
and whether the names are such as a directory may have.

Nothing here reads a file of the checkpoint.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from penstock._native import shown
from penstock.errors import ConfigError, MissingDependencyError, SignatureError
from penstock.trust.policy import Policy

Part = tuple[int | None, bytes]
MAX_BYTES = 64 << 20
"""The longest signature file that is read: that of some 300,000 files."""
_EXPIRED, _NOT_YET = 10, 9
"""OpenSSL's numbers for certificates whose time is over, or to come."""


class SignedEntry(NamedTuple):
    """A file of a signature."""

    algorithm: str
    """``"sha256"`` or ``"blake3"``."""
    parts: list[Part]
    """Where each part ends and its digest; one part without an end is the whole file."""


class Signature(NamedTuple):
    """What a signature that is trusted says."""

    files: dict[str, SignedEntry]
    """By path in the signed directory."""
    ignored: tuple[str, ...]
    """Paths that the signer left out, with all below them."""
    signer: str
    """Whom the policy trusts for it, for people."""
    digest: str
    """The hash of the signature file, as policies pin it."""


def read(data: bytes, where: str, policy: Policy) -> Signature:
    """Verifies the bytes of a signature file.

    Args:
        where: its location, for errors.

    Raises:
        SignatureError: it is not one that the policy trusts; ``code`` says why.
        ConfigError: a file of the policy's cannot be read.
        MissingDependencyError: where the library is not installed.
    """
    library("trust=")
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if policy.digest is not None and digest != policy.digest:
        cause = f"the signature is not the one that is pinned: its digest is {digest}"
        remedy = "Someone may have put another version there. If it is the one you want, pin its digest"
        raise SignatureError(location=shown(where), cause=cause, remedy=remedy, code="wrong_digest")
    refusals: list[SignatureError] = []
    for attempt in (_by_key, _by_certificate, _by_sigstore):
        for signer, configuration in attempt(policy):
            try:
                expected = _asked(configuration, data)
                if attempt is _by_certificate:
                    _check_certificate(data, where, policy)
            except SignatureError as refusal:
                refusals.append(refusal)
                continue
            except Exception as error:  # noqa: BLE001 - the library raises what it meets, assertions among it
                refusals.append(_refused(where, signer, error))
                continue
            files = dict(_entries(expected, where))
            ignored = tuple(map(str, expected.serialization_type.get("ignore_paths", ())))
            return Signature(files, ignored, signer, digest)
    # What came furthest says most.
    refusals.sort(key=lambda refusal: refusal.code == "bad_signature")
    if len(refusals) > 1 and refusals[0].code == "bad_signature":
        tried = "; ".join(refusal.cause for refusal in refusals)
        raise _bad(where, f"nobody who is trusted has signed this: {tried}")
    raise refusals[0]


def library(by: str) -> Any:
    """The package ``model_signing``.

    Raises:
        MissingDependencyError: it is not installed, or something that it needs.
    """
    try:
        import model_signing
        import model_signing.hashing
        import model_signing.signing
        import model_signing.verifying
    except ImportError as error:
        remedy = "pip install 'penstock-loader[sign]'"
        message = f"{by} needs the package 'model-signing', with pyOpenSSL: {error}. Install them: {remedy}"
        raise MissingDependencyError(message, cause=str(error), remedy=remedy) from error
    return model_signing


class _Hears:
    """Stands where the library wants a hashing configuration, and what that found: hears what is expected."""

    expected: Any = None

    def hash(self, model_path: Any, *, files_to_hash: Any = None) -> _Hears:
        del model_path, files_to_hash
        return self

    def add_ignored_paths(self, *, model_path: Any, paths: Any) -> None:
        """What is ignored is in what is expected, too."""

    def __ne__(self, expected: object) -> bool:
        self.expected = expected
        return False

    __hash__ = None  # type: ignore[assignment]


def _asked(configuration: Any, data: bytes) -> Any:
    """The files that the signature has, as the library's manifest, once the library has verified it."""
    hears = _Hears()
    with tempfile.TemporaryDirectory(prefix="penstock-signature-") as directory:
        path = Path(directory, "signature")
        path.write_bytes(data)
        # It prints warnings, which do not belong among what a command prints.
        with redirect_stdout(sys.stderr):
            configuration.set_hashing_config(hears).verify(Path(directory), path)
    if hears.expected is None:
        raise ValueError("model-signing did not say what it expects: this version of it is not known")
    return hears.expected


Attempts = Iterable[tuple[str, Any]]


def _by_key(policy: Policy) -> Attempts:
    for path in policy.keys:
        configuration = library("trust=").verifying.Config()
        try:
            configuration.use_elliptic_key_verifier(public_key=path)
        except Exception as error:
            raise _unusable("the public key", path, error) from error
        yield f"the key {path}", configuration


def _by_certificate(policy: Policy) -> Attempts:
    if not policy.chain:
        return
    configuration = library("trust=").verifying.Config()
    try:
        configuration.use_certificate_verifier(certificate_chain=policy.chain)
    except Exception as error:
        raise _unusable("a certificate", ", ".join(policy.chain), error) from error
    whose = f" of {policy.certificate_identity}" if policy.certificate_identity else ""
    yield f"a certificate{whose} below {', '.join(policy.chain)}", configuration


def _by_sigstore(policy: Policy) -> Attempts:
    if policy.identity is None:
        return
    path = None if policy.trust_config is None else Path(str(policy.trust_config))
    configuration = library("trust=").verifying.Config()
    try:
        configuration.use_sigstore_verifier(identity=policy.identity, oidc_issuer=policy.issuer, trust_config=path)
    except Exception as error:
        raise _unusable(
            "Sigstore's trust configuration", "the network" if path is None else str(path), error
        ) from error
    yield f"{policy.identity} (vouched for by {policy.issuer})", configuration


def _check_certificate(data: bytes, where: str, policy: Policy) -> None:
    """Makes sure that the certificates are valid now, and that it is whose it should be."""
    from cryptography import x509
    from OpenSSL import crypto

    held = json.loads(data)["verificationMaterial"]["x509CertificateChain"]["certificates"]
    leaf, *between = (x509.load_der_x509_certificate(base64.b64decode(one["rawBytes"])) for one in held)
    if policy.expired == "refuse":
        store = crypto.X509Store()
        for path in policy.chain:
            for certificate in x509.load_pem_x509_certificates(Path(path).read_bytes()):
                store.add_cert(crypto.X509.from_cryptography(certificate))
        of_openssl = [crypto.X509.from_cryptography(one) for one in (leaf, *between)]
        try:
            crypto.X509StoreContext(store, of_openssl[0], of_openssl[1:]).verify_certificate()
        except crypto.X509StoreContextError as error:
            if not error.errors or error.errors[0] not in {_EXPIRED, _NOT_YET}:
                raise
            when = "has expired" if error.errors[0] == _EXPIRED else "is not valid yet"
            cause = f"a certificate of the signature {when}: its owner may have lost control of the key"
            remedy = 'Have it signed anew, or, if you know when it was signed, give expired="accept"'
            raise SignatureError(location=shown(where), cause=cause, remedy=remedy, code="expired_identity") from error
    if policy.certificate_identity is not None and policy.certificate_identity not in _names(leaf):
        cause = (
            f"the certificate is that of {', '.join(_names(leaf)) or 'nobody'}, not of {policy.certificate_identity}"
        )
        remedy = "If you trust that identity, name it in the policy"
        raise SignatureError(location=shown(where), cause=cause, remedy=remedy, code="untrusted_identity")


def _names(certificate: Any) -> list[str]:
    """Whom a certificate is of: its alternative names, or its common name where it has none."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [str(name.value) for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    kinds = (x509.RFC822Name, x509.UniformResourceIdentifier, x509.DNSName)
    return [str(name.value) for name in names if isinstance(name, kinds)]


def _entries(expected: Any, where: str) -> Iterable[tuple[str, SignedEntry]]:
    """The files of the library's manifest."""
    in_shards = expected.serialization_type.get("method") == "shards"
    shards: dict[str, list[tuple[int, int, bytes]]] = {}
    for item in expected.resource_descriptors():
        algorithm = re.fullmatch(r"(sha256)(?:-sharded-\d+)?|blake3", item.digest.algorithm)
        if algorithm is None or len(item.digest.digest_value) != 32:  # noqa: PLR2004 - bytes of both
            cause = f"files are hashed by {item.digest.algorithm!r}, and sha256 and blake3 are known"
            raise SignatureError(location=shown(where), cause=cause, code="unsupported_signature")
        if in_shards:
            name, start, end = item.identifier.rsplit(":", 2)
            shards.setdefault(_name(name, where), []).append((int(start), int(end), item.digest.digest_value))
        else:
            entry = SignedEntry(item.digest.algorithm, [(None, item.digest.digest_value)])
            yield _name(item.identifier, where), entry
    for name, parts in shards.items():
        parts.sort()
        starts = [0, *(end for _, end, _ in parts)]
        if any(start != before or end <= start for (start, end, _), before in zip(parts, starts, strict=False)):
            raise _bad(where, f"the parts of {name!r} that are signed are not all of it")
        yield name, SignedEntry("sha256", [(end, digest) for _, end, digest in parts])


def _name(name: str, where: str) -> str:
    """A path in the directory: what leads elsewhere, or could be read in two ways, is refused."""
    parts = name.split("/")
    if not name or "\0" in name or any(part in {"", ".", ".."} for part in parts):
        raise _bad(where, f"the name {name!r} is none of a file in the directory")
    return name


def _refused(where: str, signer: str, error: Exception) -> SignatureError:
    why = " ".join(str(error).split()) or type(error).__name__
    return _bad(where, f"the signature is not one of {signer}: {why}")


def _bad(where: str, cause: str) -> SignatureError:
    remedy = "Fetch it again from whoever published it; if someone else signed, decide whether you trust them"
    return SignatureError(location=shown(where), cause=cause, remedy=remedy, code="bad_signature")


def _unusable(what: str, path: str, error: Exception) -> ConfigError:
    cause = f"trust: {what} cannot be used: {' '.join(str(error).split()) or type(error).__name__}"
    return ConfigError(
        location=path, cause=cause, remedy="Give a PEM file that model_signing takes, or correct the path"
    )
