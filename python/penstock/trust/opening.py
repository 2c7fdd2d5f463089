"""What ``penstock.open`` needs to know of a policy before it reads anything: which files are signed, by which digests.

The core makes sure of every file that it opens. What lies beside weights on this machine (configurations, tokenizers)
is compared here, since other libraries read it by path.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from penstock import _native
from penstock._native import shown
from penstock.arguments import AnyPath, is_url, locations
from penstock.integrations.shared.small_files import joined
from penstock.trust.directory import MANIFEST_NAME, SMALL_BYTES, Directory, Storage, Tree, compare, listed, root_of, trusted
from penstock.trust.policy import Policy

logger = logging.getLogger(__name__)


def signed_trees(paths: Iterable[str], policy: Policy, storage: Storage) -> list[Tree] | None:
    """The signed directories that these paths are in, as the core takes them; None where nothing has to be signed.

    Raises:
        SignatureError: there is no signature, the policy does not trust it, the directory holds other files than those
            that are signed, or a small file of this machine is not the signed one.
    """
    directories = [found for root in roots_of(paths, policy) if (found := trusted(root, policy, storage)) is not None]
    for directory in directories:
        check_small_files(directory)
        logger.debug("%s is signed by %s", shown(directory.root), directory.signature.signer)
    if not directories and policy.unsigned == "accept":
        return None
    return [directory.tree for directory in directories]


def check_small_files(directory: Directory) -> None:
    """Makes sure of a local directory's small files.

    Raises:
        SignatureError: one is not the signed one.
    """
    if directory.nbytes is None or is_url(directory.root):
        return
    wanted = [
        path
        for path, nbytes in directory.nbytes.items()
        if path in directory.signature.files
        and nbytes <= SMALL_BYTES
        and not path.endswith((".safetensors", MANIFEST_NAME))
    ]
    check_files(directory, wanted)


def check_copies(paths: Any, copies: Iterable[AnyPath], trust: Any, storage: Storage = None) -> None:
    """Makes sure of directories of this machine into which small files of a signed directory were fetched.

    Args:
        paths: what is opened of the signed directory, as ``penstock.open`` takes it.
        copies: the directories.
        trust: as for ``penstock.open``.

    Raises:
        SignatureError: the policy does not trust the signature, or a file of a copy is not signed or not the signed one.
    """
    policy = Policy.of(trust)
    if policy is None:
        return
    for root in roots_of(locations(paths), policy):
        directory = trusted(root, policy, storage)
        for copy in copies if directory is not None else ():
            where = os.fsdecode(copy)
            nbytes = listed(where)
            # Only what is needed was fetched.
            compare(where, directory.signature, nbytes, replace(policy, missing_files="accept"), where)
            check_small_files(directory._replace(root=where, nbytes=nbytes))


def roots_of(paths: Iterable[str], policy: Policy) -> list[str]:
    """The directories whose signatures speak of these paths."""
    return [os.fsdecode(policy.root)] if policy.root is not None else list(dict.fromkeys(map(root_of, paths)))


def check_files(directory: Directory, paths: Iterable[str], readers: int = 8, storage: Storage = None) -> int:
    """Reads files of a signed directory whole, and makes sure of them; returns their bytes.

    Raises:
        SignatureError: one is not the signed one.
    """
    files: list[Any] = []
    for path in paths:
        where = joined(directory.root, path)
        parent = joined(directory.root, path.rpartition("/")[0]) if "/" in path else directory.root
        files.append((where, parent))
    return _native.check_signed(files, [directory.tree], readers, storage)
