"""``penstock.sign``: a manifest of a directory, and a signature of all of it by the library of OpenSSF Model Signing.

The signature is an ordinary one. With SHA-256, the library's default and the only one that its command verifies, the
manifest is one of the files that are signed. With BLAKE3 the signed digests are the manifest's roots themselves, and
the manifest is left out of the signature. Either way blocks of the manifest can be traced to the signature.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock._native import shown
from penstock.arguments import AnyPath, is_url, location
from penstock.errors import ConfigError, LocationAccessError, LocationChangedError, StorageError
from penstock.manifests import manifest
from penstock.trust.directory import MANIFEST_NAME, VERSION_NAME
from penstock.trust.policy import SIGNATURE_NAME, version_of
from penstock.trust.signature import library

HASHES = ("sha256", "blake3")


class SignedDirectory(NamedTuple):
    """What ``sign`` made.

    Attributes:
        path: where the signature is.
        digest: the hash of the signature file, which a policy can pin: ``"sha256:…"``.
        files: paths of the files that are signed, sorted.
        nbytes: their bytes.
        version: the version that was written, or None.
        seconds: wall-clock time.
    """

    path: Path
    digest: str
    files: list[str]
    nbytes: int
    version: str | None
    seconds: float


def sign(
    directory: AnyPath,
    *,
    key: AnyPath | None = None,
    password: str | bytes | None = None,
    certificate: AnyPath | None = None,
    certificate_chain: AnyPath | Iterable[AnyPath] = (),
    sigstore: bool = False,
    identity_token: str | None = None,
    trust_config: AnyPath | None = None,
    hash: Literal["sha256", "blake3"] = "sha256",  # noqa: A002 - what it is
    version: str | None = None,
    signature: str = SIGNATURE_NAME,
) -> SignedDirectory:
    """Makes a manifest of a local directory, and a signature of all files in it and below.

    Names that begin with a dot are left out. Files are read twice: once for each.

    Args:
        directory: of this machine. Sign before you upload, and upload the signature and the manifest too.
        key: the file of a private key (PEM; the curves P-256, P-384 and P-521).
        password: of the key file.
        certificate: the file of the key's certificate (PEM), for whoever trusts its issuer.
        certificate_chain: files of the certificates between that and the root.
        sigstore: sign by Sigstore, with the identity that a workflow has, or a browser asks for. Needs a network.
        identity_token: for Sigstore: a token of OpenID Connect.
        trust_config: for Sigstore: the trust configuration of an instance of one's own.
        hash: ``"sha256"``, which everything verifies; or ``"blake3"``, which ``model_signing``'s command refuses as of
            1.1.1, while its Python interface verifies it.
        version: numbers with dots between them; written to the file ``penstock-version``, which is signed with the
            others, so that a policy can refuse older ones.
        signature: the name of the signature file.

    Raises:
        ConfigError: for a URL, for no or several kinds of signing, and for a key that cannot be used.
        LocationAccessError: the directory holds links, whose targets nobody can sign.
        LocationNotFoundError, StorageError: the directory or a file in it cannot be read, or the signature cannot be
            written.
        LocationChangedError: a file was written to meanwhile.
        MissingDependencyError: where ``model-signing`` is not installed.
    """
    where = location(directory, "directory")
    if is_url(where) or where.startswith("file://"):
        cause = f"{shown(where)} is a URL: only a local directory can be signed"
        raise ConfigError(
            cause=cause, remedy="Name a local copy by its path, then upload the signature beside the files"
        )
    if hash not in HASHES:
        raise ConfigError(cause=f"hash={hash!r} is not one of {', '.join(HASHES)}")
    if not signature or "/" in signature or signature in {MANIFEST_NAME, VERSION_NAME, ".", ".."}:
        raise ConfigError(cause=f"signature={signature!r} is no name of a signature file in the directory")
    if version is not None:
        version_of(version)
    began = time.monotonic()
    signer = _signer(key, password, certificate, certificate_chain, sigstore, identity_token, trust_config)
    # Its own name is in the signature; what leads to it may be a link.
    root = Path(where).resolve()
    _refuse_links(root)
    if version is not None:
        _write(root / VERSION_NAME, f"{version}\n".encode())
    made = manifest(where)
    before = _state(root, signature)
    ignored = [signature, ".cache", *_hidden(root), *([MANIFEST_NAME] if hash == "blake3" else [])]
    data = _signed(signer, root, hash, ignored)
    if _state(root, signature) != before:
        cause = "files were written to while they were signed"
        raise LocationChangedError(location=where, cause=cause, remedy="Sign again when nothing writes there")
    path = root / signature
    _write(path, data)
    files = {file.path: file.nbytes for file in made.files if file.path != signature}
    if hash == "sha256":
        files[MANIFEST_NAME] = made.path.stat().st_size
    from hashlib import sha256

    digest, nbytes = f"sha256:{sha256(data).hexdigest()}", sum(files.values())
    return SignedDirectory(path, digest, sorted(files), nbytes, version, time.monotonic() - began)


def _signer(
    key: AnyPath | None,
    password: str | bytes | None,
    certificate: AnyPath | None,
    chain: AnyPath | Iterable[AnyPath],
    sigstore: bool,
    identity_token: str | None,
    trust_config: AnyPath | None,
) -> Any:
    """The library's configuration for signing."""
    if sigstore == (key is not None) or (certificate is not None and key is None):
        cause = "sign takes a key, a key with its certificate, or sigstore=True"
        raise ConfigError(cause=cause, remedy='Write penstock.sign(directory, key="private.pem")')
    configuration = library("penstock.sign").signing.Config()
    try:
        if sigstore:
            return configuration.use_sigstore_signer(
                identity_token=identity_token,
                use_ambient_credentials=identity_token is None,
                trust_config=None if trust_config is None else Path(os.fsdecode(trust_config)),
            )
        path = Path(os.fsdecode(key or ""))
        if certificate is None:
            # The library's own type is text, and what it calls takes bytes.
            secret = password.encode() if isinstance(password, str) else password
            return configuration.use_elliptic_key_signer(private_key=path, password=secret)
        given = [chain] if isinstance(chain, (str, bytes, os.PathLike)) else list(chain)
        return configuration.use_certificate_signer(
            private_key=path,
            signing_certificate=Path(os.fsdecode(certificate)),
            # The library fails without any, and one that is there twice does no harm.
            certificate_chain=[Path(os.fsdecode(one)) for one in given or [certificate]],
        )
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        cause = f"the key or its certificate cannot be used: {why}"
        raise ConfigError(cause=cause, remedy="Give PEM files that belong together, and the key's password") from error


def _signed(signer: Any, root: Path, hash_: str, ignored: list[str]) -> bytes:
    """The bytes of a signature."""
    hashing = library("penstock.sign").hashing.Config()
    hashing.use_file_serialization(hashing_algorithm=hash_).set_ignored_paths(paths=ignored)
    with tempfile.TemporaryDirectory(prefix="penstock-signature-") as directory:
        path = Path(directory, "signature")
        try:
            signer.set_hashing_config(hashing).sign(root, path)
        except OSError as error:
            raise StorageError(location=str(root), cause=f"signing failed: {error}", errno=error.errno) from error
        return path.read_bytes()


def _hidden(root: Path) -> list[str]:
    """Paths whose names begin with a dot, without those below them: the manifest leaves them out too."""
    found = []
    for inside, folders, names in os.walk(root):
        found += [str(Path(inside, name).relative_to(root)) for name in (*folders, *names) if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
    return found


def _refuse_links(root: Path) -> None:
    for inside, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in (*folders, *names):
            path = Path(inside, name)
            if path.is_symlink() and not name.startswith("."):
                remedy = "Copy what it leads to: cp -rL"
                raise LocationAccessError(location=str(path), cause="a link cannot be signed", remedy=remedy)


def _state(root: Path, signature: str) -> list[tuple[str, int, int, int]]:
    """What changes when a file is written to or replaced."""
    found = []
    for inside, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(inside, name)
            if name.startswith(".") or path == root / signature:
                continue
            state = path.stat()
            found.append((str(path), state.st_ino, state.st_size, state.st_mtime_ns))
    return sorted(found)


def _write(path: Path, data: bytes) -> None:
    """Puts a file there, whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StorageError(location=str(path), cause=f"writing failed: {error.strerror}", errno=error.errno) from error
