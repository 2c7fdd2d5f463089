"""Findings about the way to a store: access, clocks, regions, addresses."""

from __future__ import annotations

from penstock.doctor.facts import Facts
from penstock.doctor.finding import Finding, Rule

_CLOCK = 60.0
"""Seconds that a clock may be wrong."""
_CLOCK_REFUSED = 300.0
"""From here on some services refuse signatures; S3 does from 900."""
_SKEWED = {"RequestTimeTooSkewed", "RequestExpired"}
_SIGNED = {"s3", "gs", "az", "abfss"}


def clock_skew(facts: Facts) -> Finding | None:
    """A clock that is wrong, which signatures do not survive."""
    ahead = facts.remote.clock_ahead if facts.remote else None
    refused = facts.failure is not None and facts.failure.server_code in _SKEWED
    if not refused and (ahead is None or abs(ahead) < _CLOCK):
        return None
    how_far = (
        "differs from the server's"
        if ahead is None
        else (f"is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's")
    )
    is_fatal = refused or (ahead is not None and abs(ahead) >= _CLOCK_REFUSED)
    return Finding(
        "clock_skew",
        "error" if is_fatal else "warning",
        f"this machine's clock {how_far}: signed requests are refused, or soon will be",
        "Set the clock: sudo chronyc makestep, or timedatectl set-ntp true",
    )


def metadata_hops(facts: Facts) -> Finding | None:
    """The metadata service is there, and gives no session token: its answers do not live as long as the way is."""
    cloud = facts.cloud
    if cloud is None or cloud.provider != "aws" or not cloud.reachable or cloud.gives_tokens is not False:
        return None
    return Finding(
        "metadata_hops",
        "error" if facts.failure is not None and facts.failure.code == "credentials" else "warning",
        "the instance's metadata service gives no session token: within a container its answer needs two hops, and the "
        "instance allows one",
        "aws ec2 modify-instance-metadata-options --instance-id ID --http-put-response-hop-limit 2 --http-tokens "
        "required; or give the pod a role of its own (IRSA, Pod Identity)",
    )


def other_region(facts: Facts) -> Finding | None:
    """The bucket is in another region than this machine."""
    remote, cloud = facts.remote, facts.cloud
    if not remote or not cloud or remote.scheme != "s3" or cloud.provider != "aws":
        return None
    if (
        not remote.region
        or not cloud.region
        or remote.region == cloud.region
        or not remote.host.endswith(".amazonaws.com")
    ):
        return None
    return Finding(
        "other_region",
        "warning",
        f"the bucket is in {remote.region}, this machine in {cloud.region}: every byte costs latency and money",
        "Copy the model to a bucket of this region, or keep it in a disk cache (PENSTOCK_CACHE_DIR)",
    )


def needs_path_style(facts: Facts) -> Finding | None:
    """A server of one's own is asked for ``bucket.host``, which has no address."""
    remote = facts.remote
    if not remote or not remote.by_host or remote.resolves:
        return None
    return Finding(
        "needs_path_style",
        "error",
        "requests name the bucket in the host {host}, which has no address: this endpoint needs path style",
        "Unset AWS_VIRTUAL_HOSTED_STYLE_REQUEST, or give addressing_style=path: then the bucket is part of the path",
        {"host": remote.host},
    )


def unknown_host(facts: Facts) -> Finding | None:
    """The server's name has no address."""
    remote = facts.remote
    if not remote or remote.resolves or remote.by_host:
        return None
    return Finding(
        "unknown_host",
        "error",
        "the host {host} has no address here",
        "Check the endpoint's name and this machine's DNS; behind a firewall set HTTPS_PROXY",
        {"host": remote.host},
    )


def through_proxy(facts: Facts) -> Finding | None:
    """Weights of an object store come through a proxy."""
    remote = facts.remote
    if not remote or not remote.proxy or remote.scheme not in _SIGNED:
        return None
    return Finding(
        "through_proxy",
        "warning",
        f"requests to {{host}} go through the proxy that {remote.proxy} names, which all bytes have to pass",
        "Put the store's host into NO_PROXY, and give the network a VPC endpoint (or Private Google Access)",
        {"host": remote.host},
    )


_BETTER_KNOWN: list[Rule] = [clock_skew, metadata_hops, needs_path_style, unknown_host]


def cannot_be_read(facts: Facts) -> Finding | None:
    """Opening or reading the checkpoint failed, and no other finding says why."""
    failure = facts.failure
    if failure is None or any(found and found.severity == "error" for found in (rule(facts) for rule in _BETTER_KNOWN)):
        return None
    # What the core says names paths, hosts and keys; a ticket shows the code instead.
    told = ", ".join(filter(None, [failure.code, failure.status and f"HTTP {failure.status}", failure.server_code]))
    return Finding(
        "cannot_be_read",
        "error",
        f"the checkpoint cannot be read ({told}): {{cause}}",
        "{remedy}",
        {"cause": failure.cause, "remedy": failure.remedy or "See the manual: Errors"},
    )


def cache_not_writable(facts: Facts) -> Finding | None:
    """The disk cache's directory is closed to this process."""
    if facts.cache_dir is None:
        return None
    return Finding(
        "cache_not_writable",
        "warning",
        "the disk cache's directory {directory} may not be written to: nothing is kept for the next load",
        "chown it to the user of this process, or name another directory (PENSTOCK_CACHE_DIR)",
        {"directory": facts.cache_dir},
    )


RULES: list[Rule] = [
    clock_skew,
    metadata_hops,
    needs_path_style,
    unknown_host,
    cannot_be_read,
    other_region,
    through_proxy,
    cache_not_writable,
]
