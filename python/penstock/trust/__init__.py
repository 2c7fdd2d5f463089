"""Signatures of checkpoints: whose are trusted, making them, and making sure of files by them.

Signatures are those of OpenSSF Model Signing, made and verified by its library (``model-signing``): nothing here
computes with keys. What the library leaves open is decided here: certificates that have expired, names that a
directory should not hold, versions.

* ``policy``: ``Policy``, which signatures are trusted.
* ``signature``: one signature file, from its bytes to the files that it has.
* ``directory``: what a signed directory holds, beside what is signed.
* ``opening``: what ``penstock.open`` has to know before it reads anything.
* ``checking``: ``verify``, of all files. ``signing``: ``sign``.

Loads are verified by the core, which is given names and digests.
"""

from __future__ import annotations

from penstock.trust.checking import Verified, verify
from penstock.trust.policy import Policy
from penstock.trust.signing import SignedDirectory, sign

__all__ = ["Policy", "SignedDirectory", "Verified", "sign", "verify"]
