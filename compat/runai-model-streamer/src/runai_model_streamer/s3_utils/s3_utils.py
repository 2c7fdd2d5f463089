"""Credentials of S3, and which store a path belongs to."""

from __future__ import annotations

import fnmatch

from penstock._native import shown_setting


class S3Credentials:
    """Credentials for one call. What is None is found as AWS's own tools find it."""

    def __init__(
        self,
        access_key_id: str | None = None,
        secret_access_key: str | None = None,
        session_token: str | None = None,
        region_name: str | None = None,
        endpoint: str | None = None,
    ) -> None:
        self.access_key_id = access_key_id
        self.secret_access_key = secret_access_key
        self.session_token = session_token
        self.region_name = region_name
        self.endpoint = endpoint

    def __repr__(self) -> str:
        endpoint = None if self.endpoint is None else shown_setting(self.endpoint)
        return f"S3Credentials(region_name={self.region_name!r}, endpoint={endpoint!r})"


def is_s3_path(path: str) -> bool:
    """Whether it is ``s3://…``."""
    return path.startswith("s3://")


def is_gs_path(path: str) -> bool:
    """Whether it is ``gs://…``."""
    return path.startswith("gs://")


def is_azure_path(path: str) -> bool:
    """Whether it is ``az://…``."""
    return path.startswith("az://")


def is_object_storage(path: str) -> bool:
    """Whether it is on any of them."""
    return is_s3_path(path) or is_gs_path(path) or is_azure_path(path)


def filter_allow(paths: list[str], patterns: list[str]) -> list[str]:
    """Those that match any of the shell patterns."""
    return [path for path in paths if any(fnmatch.fnmatch(path, pattern) for pattern in patterns)]


def filter_ignore(paths: list[str], patterns: list[str]) -> list[str]:
    """Those that match none of the shell patterns."""
    return [path for path in paths if not any(fnmatch.fnmatch(path, pattern) for pattern in patterns)]


def removeprefix(s: str, prefix: str) -> str:
    """``s`` without ``prefix`` at its beginning."""
    return s.removeprefix(prefix)
