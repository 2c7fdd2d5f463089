"""``Policy``: which signatures are trusted, and what else has to be so.

A policy is plain data: from Python, from JSON (a file, an engine's configuration, ``PENSTOCK_TRUST``), or from options
of the command. It opens nothing but the JSON file that it is read from.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from penstock.arguments import AnyPath, described
from penstock.errors import ConfigError

SIGNATURE_NAME = "model.sig"
"""What ``model_signing sign`` calls a signature where nothing is said."""
VARIABLE = "PENSTOCK_TRUST"

Paths = AnyPath | Iterable[AnyPath] | None
_CHOICES = {
    "unsigned": ("refuse", "accept"),
    "expired": ("refuse", "accept"),
    "missing_files": ("refuse", "accept"),
    "extra_files": ("refuse", "accept"),
}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which signatures are trusted: those of any of the identities that are given. At least one has to be.

    A file of JSON with the same names is a policy too; paths in it are relative to it.

    Args:
        key: files of public keys (PEM; the curves P-256, P-384 and P-521).
        certificate_chain: files of certificates (PEM) that signing certificates have to descend from. Nothing of the
            operating system's is trusted.
        certificate_identity: the name in a signing certificate: an e-mail address, URI or DNS name among its
            alternative names, or its common name. Without it every certificate of the chain's authorities is trusted.
        identity, issuer: the Sigstore identity, such as an e-mail address or a workflow's URI, and who vouched for it.
        trust_config: Sigstore's trust configuration (JSON), for verifying without a network or with an instance of
            one's own. By default the public instance's, which the library updates over the network.
        digest: ``"sha256:"`` and 64 hexadecimal digits: the hash of the signature file, as ``sha256sum`` prints it.
            Then no other signature is accepted, not even of the same signer.
        least_version: the version that the directory has at least, such as ``"1.2"``: what ``penstock sign --version``
            wrote into the signed file ``penstock-version``.
        signature: the signature file: a name in the signed directory, or a path or URL elsewhere.
        root: the signed directory, where only a part of it is opened. By default that of the files which are opened.
        unsigned: ``"accept"`` to load directories without a signature file as if there were no policy.
        expired: ``"accept"`` to trust certificates that have expired since. When something was signed is not known
            then, so a stolen old key may have done it.
        missing_files: ``"accept"`` for directories that lack signed files, as partial downloads do.
        extra_files: ``"accept"`` for directories with files that are not signed. Penstock loads none of those.

    Raises:
        ConfigError: no identity is given, or half of one, or a value is impossible.
    """

    key: Paths = None
    certificate_chain: Paths = None
    certificate_identity: str | None = None
    identity: str | None = None
    issuer: str | None = None
    trust_config: AnyPath | None = None
    digest: str | None = None
    least_version: str | None = None
    signature: AnyPath = SIGNATURE_NAME
    root: AnyPath | None = None
    unsigned: Literal["refuse", "accept"] = "refuse"
    expired: Literal["refuse", "accept"] = "refuse"
    missing_files: Literal["refuse", "accept"] = "refuse"
    extra_files: Literal["refuse", "accept"] = "refuse"

    def __post_init__(self) -> None:
        for name in ("key", "certificate_chain"):
            object.__setattr__(self, name, _paths(name, getattr(self, name)))
        for name in ("trust_config", "signature", "root"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, _path(name, given))
        for name in ("certificate_identity", "identity", "issuer", "digest", "least_version"):
            given = getattr(self, name)
            if given is not None and (not isinstance(given, str) or not given.strip()):
                raise _bad(name, given, "Give text that is not empty, or leave it out")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _bad(name, getattr(self, name), f"Give one of {', '.join(map(repr, choices))}")
        self._check_identities()
        if self.digest is not None and not re.fullmatch(r"sha256:[0-9a-f]{64}", self.digest):
            raise _bad("digest", self.digest, "Write sha256: and what sha256sum prints for the signature file")
        if self.least_version is not None:
            version_of(self.least_version)

    def _check_identities(self) -> None:
        if (self.identity is None) != (self.issuer is None):
            cause = "trust: a Sigstore identity is an identity and its issuer, and one of them is missing"
            raise ConfigError(cause=cause, remedy="Give both: another issuer may vouch for the same name")
        if self.certificate_identity is not None and not self.certificate_chain:
            cause = "trust: certificate_identity needs certificate_chain"
            raise ConfigError(cause=cause, remedy="Give the certificates that signing certificates descend from")
        if not self.key and not self.certificate_chain and self.identity is None:
            cause = "trust: nobody is trusted: there is no key, certificate_chain or identity"
            raise ConfigError(cause=cause, remedy='Write trust=penstock.Policy(key="publisher.pub")')

    @property
    def keys(self) -> tuple[str, ...]:
        """Files of public keys."""
        return self.key  # type: ignore[return-value]

    @property
    def chain(self) -> tuple[str, ...]:
        """Files of certificates."""
        return self.certificate_chain  # type: ignore[return-value]

    @classmethod
    def of(cls, given: Any) -> Policy | None:
        """The policy that a caller gives: one, its names and values, or a file of JSON; else the process's.

        Raises:
            ConfigError: for anything else, and a file that cannot be read or is none of a policy.
        """
        if given is None:
            path = os.environ.get(VARIABLE, "").strip()
            return cls._read(path, VARIABLE) if path else None
        if isinstance(given, Policy):
            return given
        if isinstance(given, Mapping):
            return cls._from(given, None, "trust")
        if isinstance(given, (str, bytes, os.PathLike)):
            return cls._read(os.fsdecode(given), "trust")
        cause = f"trust must be a penstock.Policy, a dict or the path of a JSON file, not {described(given)}"
        raise ConfigError(cause=cause, remedy='Write trust=penstock.Policy(key="publisher.pub")')

    @classmethod
    def _read(cls, path: str, called: str) -> Policy:
        where = Path(path).expanduser()
        try:
            given = json.loads(where.read_bytes())
        except OSError as error:
            cause = f"{called}: the policy cannot be read: {error.strerror}"
            raise ConfigError(location=path, cause=cause, remedy="Give the path of a JSON file") from error
        except ValueError as error:
            raise ConfigError(location=path, cause=f"{called}: the policy is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise ConfigError(location=path, cause=f"{called}: the policy is not an object of JSON")
        return cls._from(given, where.absolute().parent, f"{called}, {path}")

    @classmethod
    def _from(cls, given: Mapping[str, Any], base: Path | None, called: str) -> Policy:
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(map(str, given)) - set(known)):
            cause = f"{called}: a policy has no {', '.join(map(repr, unknown))}: it has {', '.join(known)}"
            raise ConfigError(cause=cause)
        made = cls(**given)
        if base is None:
            return made
        chain = tuple(str(base / path) for path in made.chain)
        config = None if made.trust_config is None else str(base / os.fsdecode(made.trust_config))
        return replace(
            made, key=tuple(str(base / path) for path in made.keys), certificate_chain=chain, trust_config=config
        )


def version_of(text: str) -> tuple[int, ...]:
    """A version's numbers, so that 1.10 is more than 1.9, and 1.0 as much as 1.

    Raises:
        ConfigError: for what is no numbers with dots between them.
    """
    if not re.fullmatch(r"\d{1,18}(\.\d{1,18}){0,7}", text):
        raise ConfigError(cause=f"{text!r} is no version", remedy="Write numbers with dots between them, such as 1.2")
    numbers = [int(number) for number in text.split(".")]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _paths(name: str, given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, (str, bytes, os.PathLike)):
        given = (given,)
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise _bad(name, given, "Give the path of a file, or several")
    return tuple(_path(name, path) for path in given)


def _path(name: str, given: Any) -> str:
    try:
        text = os.fsdecode(given)
    except TypeError:
        raise _bad(name, given, "Give the path of a file") from None
    if not text.strip():
        raise _bad(name, given, "Give the path of a file, or leave it out")
    return text


def _bad(name: str, given: Any, remedy: str) -> ConfigError:
    return ConfigError(cause=f"trust: {name}={given!r} is impossible", remedy=remedy)
