"""What ``penstock.open`` needs to know of a policy before it reads anything: which files are signed, by which digests.

The core makes sure of every file that it opens. What lies beside weights on this machine (configurations, tokenizers)
is compared here, since other libraries read it by path.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from penstock import _native
from penstock._native import shown
from penstock.arguments import is_url, joined
from penstock.trust.directory import (
    MANIFEST_NAME,
    SMALL_BYTES,
    Directory,
    Storage,
    Tree,
    compare,
    listed,
    root_of,
    trusted,
)
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


class Guard(NamedTuple):
    """A signed directory of which a library reads files by path: what makes sure of those."""

    policy: Policy
    """With its root."""
    directory: Directory

    @classmethod
    def of(cls, root: str, trust: Any, storage: Storage = None, *, is_partial: bool = False) -> Guard | None:
        """That of the directory at ``root``, where the policy names no other; None where there is no policy, or it lets
        directories through that are not signed.

        Args:
            trust: as for ``penstock.open``.
            is_partial: whether files are fetched as they are needed, so that some are missing in any case.

        Raises:
            SignatureError: as ``signed_trees``.
        """
        policy = Policy.of(trust)
        if policy is None:
            return None
        missing: Any = "accept" if is_partial else policy.missing_files
        policy = replace(policy, root=policy.root or root, missing_files=missing)
        directory = trusted(os.fsdecode(policy.root or root), policy, storage)
        if directory is None:
            return None
        check_small_files(directory)
        return cls(policy, directory)

    def check_copy(self, local: str, below: str = "", names: Iterable[str] = ()) -> None:
        """Makes sure of a directory of this machine that has copies of files of a folder of the signed directory.

        Args:
            local: the directory. Only some of the files need be there.
            below: the folder.
            names: files that are to be made sure of whatever their size, as far as they are there.

        Raises:
            SignatureError: a file is not signed, or not the signed one.
        """
        prefix = f"{below.strip('/')}/" if below.strip("/") else ""
        of_folder = self.directory.signature
        files = {path.removeprefix(prefix): of for path, of in of_folder.files.items() if path.startswith(prefix)}
        ignored = tuple(path.removeprefix(prefix) for path in of_folder.ignored if path.startswith(prefix))
        nbytes = listed(local)
        copy = Directory(local, of_folder._replace(files=files, ignored=ignored), nbytes, None)
        compare(local, copy.signature, nbytes, replace(self.policy, missing_files="accept"), local)
        check_small_files(copy)
        check_files(copy, [name for name in names if name in nbytes])


def roots_of(paths: Iterable[str], policy: Policy) -> list[str]:
    """The directories whose signatures speak of these paths."""
    return [os.fsdecode(policy.root)] if policy.root is not None else list(dict.fromkeys(map(root_of, paths)))


def check_files(directory: Directory, paths: Iterable[str], readers: int = 8, storage: Storage = None) -> int:
    """Reads files of a signed directory whole, and makes sure of them; returns their bytes.

    Raises:
        SignatureError: one is not the signed one.
    """
    files: list[Any] = []
    tree = directory.tree
    for path in paths:
        # A URL's query is asked for with the file, and no part of where the directory is.
        parent = joined(tree[0], path.rpartition("/")[0]) if "/" in path else tree[0]
        files.append((joined(directory.root, path), parent))
    return _native.check_signed(files, [tree], readers, storage)
