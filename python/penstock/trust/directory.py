"""A signed directory: its signature file, and what it holds beside what is signed.

A directory is one of this machine or a prefix of a store. A plain HTTP server cannot list, so there files that are
missing or do not belong are noticed only when they are asked for.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from penstock import _native
from penstock._native import Source, shown, without_file_scheme
from penstock.arguments import is_http, is_url, joined
from penstock.errors import ConfigError, LocationNotFoundError, SignatureError
from penstock.trust.policy import SIGNATURE_NAME, Policy, version_of
from penstock.trust.signature import MAX_BYTES, Signature, SignedEntry, read

MANIFEST_NAME = "penstock-manifest.blake3"
VERSION_NAME = "penstock-version"
_VERSION_BYTES = 200
SMALL_BYTES = 64 << 20
"""What is a small file: configurations and tokenizers."""

Storage = list[tuple[str, str]] | None
Tree = tuple[str, list[tuple[str, str, list[tuple[int | None, bytes]]]]]


class Directory(NamedTuple):
    """A signed directory whose signature is trusted."""

    root: str
    """Its location."""
    signature: Signature
    nbytes: dict[str, int] | None
    """Of each file below it, by path; nothing where its server cannot list."""
    version: str | None
    """What its signed version file says, where it was asked for."""

    @property
    def tree(self) -> Tree:
        """As the core takes it."""
        files = [(path, entry.algorithm, entry.parts) for path, entry in self.signature.files.items()]
        return self.root.partition("?")[0] if is_http(self.root) else self.root, files


def root_of(path: str) -> str:
    """The directory that a path or URL which ``penstock.open`` takes is in, or is."""
    path = without_file_scheme(path)
    if is_url(path):
        base, mark, query = path.partition("?") if is_http(path) else (path, "", "")
        named = base.endswith((".safetensors", ".json")) or re.search(r"[*\[]", base.rpartition("/")[2])
        return f"{base.rpartition('/')[0] if named else base.rstrip('/')}{mark}{query}"
    if os.path.isdir(path):  # noqa: PTH112 - text as it was given: what the core makes of it begins alike
        return path.rstrip("/") or path
    if not os.path.lexists(path) and (pattern := re.search(r"[*?\[]", path)):
        path = path[: pattern.start()]
    return os.path.dirname(path) or "."  # noqa: PTH120


def trusted(root: str, policy: Policy, storage: Storage) -> Directory | None:
    """The directory at ``root``, of whose signature and listing is made sure; None where it has none and need not.

    Raises:
        SignatureError: there is no signature, the policy does not trust it, or files are missing or do not belong.
        PenstockError: what the store reports.
    """
    where = _signature_location(root, policy)
    data = _read_local(where) if not is_url(where) else _read_remote(where, storage)
    if data is None:
        if policy.unsigned == "accept":
            return None
        cause = "there is no signature, and one is required"
        remedy = "Have the directory signed (penstock sign), name the signature file, or do without trust="
        raise SignatureError(location=shown(where), cause=cause, remedy=remedy, code="no_signature")
    signature = read(data, where, policy)
    nbytes = None if is_http(root) else _on_store(root, storage) if is_url(root) else listed(root)
    if nbytes is not None:
        compare(root, signature, nbytes, policy, where)
    version = _version(root, signature, policy, storage)
    return Directory(root, signature, nbytes, version)


def _signature_location(root: str, policy: Policy) -> str:
    name = os.fsdecode(policy.signature)
    return name if is_url(name) or name.startswith("/") else joined(root, name)


def _read_local(path: str) -> bytes | None:
    """A signature file of this machine, opened without following a link. In the cache of the hub every file is one."""
    try:
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            if not re.fullmatch(r"(\.\./)+blobs/[^/]+", os.readlink(path)):  # noqa: PTH115
                cause = "a symbolic link stands in the signature's place"
                remedy = "Put the signature's own file there"
                raise SignatureError(location=path, cause=cause, remedy=remedy, code="bad_signature") from None
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        raise SignatureError(location=path, cause="the signature is a directory", code="bad_signature") from None
    if len(data) > MAX_BYTES:
        cause = f"the signature has more than {MAX_BYTES} bytes"
        raise SignatureError(location=path, cause=cause, code="bad_signature")
    return data


def _read_remote(url: str, storage: Storage, limit: int = MAX_BYTES) -> bytes | None:
    try:
        return _native.read_object(url, limit, storage)
    except LocationNotFoundError:
        return None


def _on_store(root: str, storage: Storage) -> dict[str, int]:
    return dict(Source(root if root.startswith("hf://") else f"{root.rstrip('/')}/", storage).entries)


def listed(root: str) -> dict[str, int]:
    """Bytes of every file below a directory of this machine, by path. A link to a directory is listed as a file."""
    found: dict[str, int] = {}
    for inside, folders, names in os.walk(root):
        below = os.path.relpath(inside, root)
        for name in (*folders, *names):
            path = name if below == "." else f"{below}/{name}"
            if name in folders and not Path(inside, name).is_symlink():
                continue
            try:
                found[path] = Path(inside, name).stat().st_size
            except FileNotFoundError:
                found[path] = 0  # A link that leads nowhere: it is there, and opening it will say more.
        folders[:] = [name for name in folders if not name.startswith(".")]
    return found


def compare(root: str, signature: Signature, nbytes: Iterable[str], policy: Policy, where: str) -> None:
    """Refuses files beside those that are signed, and a directory that lacks some."""
    beside = {MANIFEST_NAME, SIGNATURE_NAME, os.fsdecode(policy.signature)}
    ignored = tuple(f"{path}/" for path in signature.ignored)
    there = set(nbytes)
    if policy.extra_files == "refuse":
        extra = sorted(
            path
            for path in there.difference(signature.files)
            if path.rpartition("/")[2] != MANIFEST_NAME
            and path not in beside
            and not any(part.startswith(".") for part in path.split("/"))
            and not f"{path}/".startswith(ignored)
        )
        if extra:
            remedy = 'Take them away, or give extra_files="accept": they are not loaded then'
            raise _differs(root, "holds files that are not signed", extra, remedy, "not_signed")
    if policy.missing_files == "refuse" and (missing := sorted(set(signature.files).difference(there))):
        remedy = f'Fetch them, or give missing_files="accept" for a part of what {shown(where)} has'
        raise _differs(root, "lacks files that are signed", missing, remedy, "signed_file_missing")


def _differs(root: str, how: str, names: list[str], remedy: str, code: str) -> SignatureError:
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
    cause = f"the directory {how}: {listed}"
    details = {"files": "\n".join(names)}
    return SignatureError(location=shown(root), cause=cause, remedy=remedy, code=code, details=details)


def _version(root: str, signature: Signature, policy: Policy, storage: Storage) -> str | None:
    """What the signed version file says, which is compared with the signature before it is read."""
    if VERSION_NAME not in signature.files:
        if policy.least_version is None:
            return None
        raise _too_old(root, "none", policy.least_version)
    path = joined(root, VERSION_NAME)
    data = _read_remote(path, storage, _VERSION_BYTES) if is_url(path) else _read_version(path)
    if data is None or not is_signed(data, signature.files[VERSION_NAME]):
        cause = "the version file is not the signed one"
        raise SignatureError(location=shown(path), cause=cause, code="signature_mismatch")
    text = data.decode("ascii", "replace").strip()
    if policy.least_version is not None:
        try:
            if version_of(text) < version_of(policy.least_version):
                raise _too_old(root, text, policy.least_version)
        except ConfigError:
            raise _too_old(root, repr(text), policy.least_version) from None
    return text


def _read_version(path: str) -> bytes | None:
    try:
        with Path(path).open("rb") as file:
            return file.read(_VERSION_BYTES)
    except FileNotFoundError:
        return None


def _too_old(root: str, version: str, least: str) -> SignatureError:
    cause = f"the version of the directory is {version}, and at least {least} is wanted"
    remedy = "Someone may have put an old version there: fetch the new one from whoever published it"
    return SignatureError(location=shown(root), cause=cause, remedy=remedy, code="old_version")


def is_signed(data: bytes, entry: SignedEntry) -> bool:
    """Whether a whole file's bytes are the signed ones."""
    if entry.algorithm == "blake3":
        from blake3 import blake3

        return entry.parts == [(None, blake3(data).digest())]
    at = 0
    for end, digest in entry.parts:
        if hashlib.sha256(data[at:end]).digest() != digest:
            return False
        at = len(data) if end is None else end
    return at == len(data)
