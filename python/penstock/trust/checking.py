"""``penstock.verify``: makes sure of every file of a checkpoint's directory, and loads nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock import _native
from penstock._native import shown
from penstock.arguments import AnyPath, joined, location
from penstock.errors import ConfigError, IntegrityError, SignatureError
from penstock.storage_options import core_options
from penstock.trust.directory import MANIFEST_NAME, Directory, Storage, root_of, trusted
from penstock.trust.opening import check_files
from penstock.trust.policy import Policy
from penstock.trust.signature import Signature, SignedEntry


class Verified(NamedTuple):
    """What ``verify`` made sure of.

    Attributes:
        location: the directory, without secrets.
        files: paths of the files that were read and compared, sorted.
        nbytes: their bytes.
        signer: who is trusted for them, for people; None where a manifest was all that they were compared with.
        digest: the hash of the signature file, which a policy can pin; None as above.
        version: the signed version, or None.
        seconds: wall-clock time.
    """

    location: str
    files: list[str]
    nbytes: int
    signer: str | None
    digest: str | None
    version: str | None
    seconds: float


def verify(
    path: AnyPath,
    *,
    trust: Policy | Mapping[str, Any] | AnyPath | None = None,
    readers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Verified:
    """Reads every file of a directory that its signature has, or its manifest, and compares it with that.

    Args:
        path: a directory, a prefix of a store, a repository of the hub, or a file in one: all of its directory.
        trust: whose signatures are trusted: a ``Policy``, its names and values as a dict, or the path of a JSON file
            with them; by default that of ``PENSTOCK_TRUST``. Without any, files are compared with the manifest alone,
            which says nothing about who made it.
        readers: files that are read at a time; by default one for each core.
        storage_options: as for ``penstock.open``.

    Raises:
        SignatureError: there is no signature, the policy does not trust it, or a file is missing, not signed or not
            the signed one.
        IntegrityError: without a policy: there is no manifest, or a file is not what it says.
        ConfigError: the policy is impossible.
        PenstockError: what reading fails with.
    """
    policy = Policy.of(trust)
    where = location(path)
    storage = core_options(storage_options, [where])
    root = os.fsdecode(policy.root) if policy is not None and policy.root is not None else root_of(where)
    if readers is None:
        readers = len(os.sched_getaffinity(0))
    if isinstance(readers, bool) or not isinstance(readers, int) or not 1 <= readers <= MAX_READERS:
        raise ConfigError(cause=f"readers={readers!r} is not a number of readers, 1 to {MAX_READERS}")
    began = time.monotonic()
    directory = None if policy is None else trusted(root, policy, storage)
    if directory is None:
        return _by_manifest(root, readers, storage, began)
    files = sorted(directory.signature.files)
    if directory.nbytes is not None:
        files = [path for path in files if path in directory.nbytes]
    nbytes = check_files(directory, files, readers, storage)
    _check_manifest(directory, storage)
    signer, digest = directory.signature.signer, directory.signature.digest
    return Verified(shown(root), files, nbytes, signer, digest, directory.version, time.monotonic() - began)


def _by_manifest(root: str, readers: int, storage: Storage, began: float) -> Verified:
    files = _native.read_manifest(joined(root, MANIFEST_NAME), storage)
    if files is None:
        cause = "there is no manifest, and no policy says whose signature is trusted"
        remedy = "Make one where the files are trusted (penstock manifest), or give trust="
        raise IntegrityError(location=shown(root), cause=cause, remedy=remedy, code="no_manifest")
    entries = {path: SignedEntry("blake3", [(None, hash_)]) for path, _, hash_ in files}
    directory = Directory(root, Signature(entries, (), "", ""), None, None)
    try:
        nbytes = check_files(directory, entries, readers, storage)
    except SignatureError as error:
        cause, remedy = "the file is not what the manifest says", "Fetch it again from whoever published it"
        raise IntegrityError(location=error.location, cause=cause, remedy=remedy) from None
    return Verified(shown(root), sorted(entries), nbytes, None, None, None, time.monotonic() - began)


def _check_manifest(directory: Directory, storage: Storage) -> None:
    """A manifest that is no signed file speaks of the signed hashes, or loads will refuse it: said here already."""
    if MANIFEST_NAME in directory.signature.files:
        return
    where = joined(directory.root, MANIFEST_NAME)
    for path, _, hash_ in _native.read_manifest(where, storage) or ():
        entry = directory.signature.files.get(path)
        if entry is not None and entry.algorithm == "blake3" and entry.parts != [(None, hash_)]:
            cause = f"the manifest is not the signed one: it has another hash of {path}"
            remedy = "Make it again (penstock manifest)"
            raise SignatureError(location=shown(where), cause=cause, remedy=remedy, code="signature_mismatch")


MAX_READERS = 256
