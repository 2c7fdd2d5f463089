"""Answers that are odd but usable, and answers, certificates and names that are not: what servers and proxies do."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
import servers
from conftest import Raw, assert_bits, opened_elsewhere, raw_bytes, shard, write_raw
from services import Write, bare, certificate

pytestmark = pytest.mark.stores

_META = 'ETag: "1"\r\nLast-Modified: Sat, 21 Nov 2026 00:00:00 GMT\r\n'

Part = Callable[[bytes, int, int], Iterator[bytes]]
"""What answers to a request for a part of the bytes."""


def _head(status: str, *headers: str) -> bytes:
    return (f"{status}\r\n{_META}" + "".join(f"{header}\r\n" for header in headers) + "\r\n").encode()


def _range(body: bytes, start: int, end: int) -> str:
    return f"Content-Range: bytes {start}-{end}/{len(body)}"


def plain(body: bytes, start: int, end: int) -> Iterator[bytes]:
    yield _head("HTTP/1.1 206 P", _range(body, start, end), f"Content-Length: {end + 1 - start}", "Connection: close")
    yield body[start : end + 1]


def until_the_end(body: bytes, start: int, end: int) -> Iterator[bytes]:
    yield _head("HTTP/1.0 206 P", _range(body, start, end))
    yield body[start : end + 1]


def in_chunks(body: bytes, start: int, end: int) -> Iterator[bytes]:
    yield _head("HTTP/1.1 206 P", _range(body, start, end), "Transfer-Encoding: chunked", "Connection: close")
    for at in range(start, end + 1, 100_000):
        piece = body[at : min(at + 100_000, end + 1)]
        yield b"%x\r\n%s\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def whole(body: bytes, *_: int) -> Iterator[bytes]:
    yield _head("HTTP/1.1 200 O", f"Content-Length: {len(body)}", "Connection: close")
    yield body


def whole_and_large(body: bytes, *_: int) -> Iterator[bytes]:
    yield _head("HTTP/1.1 200 O", f"Content-Length: {40 << 20}", "Connection: close")
    yield body


def named_in_latin_1(body: bytes, start: int, end: int) -> Iterator[bytes]:
    head, part = plain(body, start, end)
    yield head.replace(b"\r\n\r\n", "\r\nContent-Disposition: inline; filename=ü.bin\r\n\r\n".encode("latin-1"))
    yield part


def dated_otherwise(body: bytes, start: int, end: int) -> Iterator[bytes]:
    head, part = plain(body, start, end)
    yield head.replace(b"00:00:00 GMT", b"00:00:00 +0000").replace(b'ETag: "1"\r\n', b"")
    yield part


def dated_in_iso(body: bytes, start: int, end: int) -> Iterator[bytes]:
    head, part = plain(body, start, end)
    yield head.replace(b"Sat, 21 Nov 2026 00:00:00 GMT", b"2026-11-21T00:00:00Z")
    yield part


def in_several_parts(body: bytes, start: int, end: int) -> Iterator[bytes]:
    inner = f"--X\r\nContent-Type: a/b\r\n{_range(body, start, end)}\r\n\r\n".encode()
    text = inner + body[start : end + 1] + b"\r\n--X--\r\n"
    kind = "Content-Type: multipart/byteranges; boundary=X"
    yield _head("HTTP/1.1 206 P", kind, f"Content-Length: {len(text)}", "Connection: close")
    yield text


def without_total(body: bytes, start: int, end: int) -> Iterator[bytes]:
    head, part = plain(body, start, end)
    yield head.replace(b"/%d\r\n" % len(body), b"/*\r\n")
    yield part


def cut(answer: Part, after: int) -> Part:
    """The answer, but for its end."""

    def shorter(body: bytes, start: int, end: int) -> Iterator[bytes]:
        left = after
        for number, piece in enumerate(answer(body, start, end)):
            yield piece if number == 0 else piece[:left]
            left -= 0 if number == 0 else len(piece)
            if left <= 0:
                return

    return shorter


def server_of(body: bytes, *answers: Part) -> Write:
    """Answers to requests one after the other, the last to all that follow."""
    left = list(answers)

    def write(head: str) -> Iterator[bytes]:
        asked = re.search(r"(?i)^range: bytes=(\d+)-(\d+)", head, re.MULTILINE)
        assert asked
        start, end = int(asked[1]), min(int(asked[2]), len(body) - 1)
        return (left.pop(0) if len(left) > 1 else left[0])(body, start, end)

    return write


@pytest.fixture(params=["web", "s3"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The location of an object on a server of that address."""
    servers.forget_settings(monkeypatch)

    def location(address: str) -> str:
        if request.param == "web":
            return f"http://{address}/m.safetensors"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        return "s3://bucket/m.safetensors"

    return location


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """An object of S3 at an endpoint, with keys, and with these variables."""
    servers.forget_settings(monkeypatch)

    def location(endpoint: str, **variables: str) -> str:
        keys = {"AWS_ACCESS_KEY_ID": "sentinel-access", "AWS_SECRET_ACCESS_KEY": "SENTINEL-secret-key"}
        for name, value in {"AWS_ENDPOINT_URL": endpoint, **keys, **variables}.items():
            monkeypatch.setenv(name, value)
        return "s3://bucket/m.safetensors"

    return location


@pytest.fixture
def held(tmp_path: Path) -> tuple[bytes, dict[str, Raw]]:
    return shard(tmp_path, 0)


@pytest.mark.parametrize("answer", [until_the_end, in_chunks])
def test_parts_without_a_length_are_counted(
    answer: Part, where: Callable[[str], str], held: tuple[bytes, dict[str, Raw]]
) -> None:
    body, tensors = held
    with bare(server_of(body, answer)) as (address, _):
        assert_bits(penstock.open(where(address)).load(framework="np"), tensors)
    # What ends early is asked for from there on: of the first request of the load, the second brings the rest.
    with bare(server_of(body, answer, cut(answer, 50_000), answer)) as (address, asked):
        assert_bits(penstock.open(where(address)).load(framework="np"), tensors)
    starts = [int(found[1]) for head in asked if (found := re.search(r"(?i)range: bytes=(\d+)-", head))]
    assert any(start % 4096 for start in starts), starts


def never_ending(body: bytes, start: int, end: int) -> Iterator[bytes]:
    *pieces, _ = in_chunks(body, start, end)
    yield from pieces
    time.sleep(20)


def without_end(body: bytes, start: int, end: int) -> Iterator[bytes]:
    *pieces, _ = in_chunks(body, start, end)
    yield from pieces


def too_long(body: bytes, start: int, end: int) -> Iterator[bytes]:
    *pieces, last = in_chunks(body, start, end)
    yield from pieces
    yield b"4\r\nmore\r\n"
    yield last


@pytest.mark.parametrize("odd", [never_ending, without_end, too_long])
def test_an_answer_that_goes_wrong_after_its_last_byte_costs_no_load(
    odd: Part, where: Callable[[str], str], held: tuple[bytes, dict[str, Raw]]
) -> None:
    body, tensors = held
    with bare(server_of(body, in_chunks, odd, in_chunks)) as (address, _):
        began = time.monotonic()
        assert_bits(penstock.open(where(address)).load(framework="np"), tensors)
        assert time.monotonic() - began < 15


def test_nothing_is_kept_of_an_answer_that_is_longer_than_was_asked_for(tmp_path: Path) -> None:
    tensors = {"w": Raw("U8", (3 << 19,), raw_bytes("U8", (3 << 19,)))}
    body = write_raw(tmp_path / "m.safetensors", tensors).read_bytes()
    no_model = bytes(len(body))

    def denied(*_: object) -> Iterator[bytes]:
        yield _head("HTTP/1.1 403 F", "Content-Length: 0", "Connection: close")

    def wrong(_: bytes, start: int, end: int) -> Iterator[bytes]:
        return too_long(no_model, start, end)

    with bare(server_of(body, in_chunks, wrong, denied, plain)) as (address, _):
        # One request at a time: another that is denied would stop this answer before it turns out to be too long.
        one = penstock.LoadOptions(readers=1)
        ckpt = penstock.open(f"http://{address}/m.safetensors", cache_dir=tmp_path / "cache", options=one)
        with pytest.raises(penstock.LocationAccessError):
            ckpt.load(framework="np")
        assert penstock.flush_disk_cache()
        ckpt = penstock.open(f"http://{address}/m.safetensors", cache_dir=tmp_path / "cache")
        assert_bits(ckpt.load(framework="np"), tensors)


@pytest.mark.parametrize("answer", [named_in_latin_1, dated_otherwise, dated_in_iso])
def test_headers_that_nothing_hangs_on_may_be_odd(
    answer: Part, where: Callable[[str], str], held: tuple[bytes, dict[str, Raw]]
) -> None:
    body, tensors = held
    with bare(server_of(body, answer)) as (address, _):
        assert_bits(penstock.open(where(address)).load(framework="np"), tensors)


def test_of_a_small_object_that_comes_whole_the_part_is_taken(
    where: Callable[[str], str], held: tuple[bytes, dict[str, Raw]], tmp_path: Path
) -> None:
    body, tensors = held
    with bare(server_of(body, whole)) as (address, _):
        location = where(address)
        assert_bits(penstock.open(location).load(framework="np"), tensors)
        assert_bits(dict(penstock.open(location).stream(framework="np")), tensors)
    # An empty one is asked for once more, without a range.
    with bare(lambda _: whole(b"")) as (address, _), pytest.raises(penstock.FormatError, match="the file is empty"):
        penstock.open(where(address))


def test_a_large_object_that_comes_whole_is_told_at_once(
    where: Callable[[str], str], held: tuple[bytes, dict[str, Raw]]
) -> None:
    body, _ = held
    with bare(server_of(body, whole_and_large)) as (address, asked):
        with pytest.raises(penstock.StorageError, match="does not answer requests for part") as raised:
            penstock.open(where(address))
        assert "HTTP ranges" in (raised.value.remedy or "")
        assert len(asked) == 1


@pytest.mark.parametrize("once", [whole, whole_and_large])
def test_something_between_that_forgets_the_range_once_does_no_harm(
    once: Part, s3: Callable[..., str], held: tuple[bytes, dict[str, Raw]]
) -> None:
    body, tensors = held
    with bare(server_of(body, plain, once, plain)) as (address, _):
        assert_bits(penstock.open(s3(f"http://{address}")).load(framework="np"), tensors)


@pytest.mark.slow
def test_an_answer_in_several_parts_is_told_once_it_was_asked_for_a_minute(held: tuple[bytes, dict[str, Raw]]) -> None:
    with (
        bare(server_of(held[0], in_several_parts)) as (address, _),
        pytest.raises(penstock.StorageError, match=r"an unusable answer.*Content-Range"),
    ):
        penstock.open(f"http://{address}/m.safetensors")


def test_an_answer_in_several_parts_is_not_taken_for_the_object(
    where: Callable[[str], str], held: tuple[bytes, dict[str, Raw]]
) -> None:
    body, tensors = held
    with bare(server_of(body, plain, in_several_parts, plain)) as (address, _):
        assert_bits(penstock.open(where(address)).load(framework="np"), tensors)


def test_a_size_that_nobody_says_is_told_to_be_missing(
    where: Callable[[str], str], held: tuple[bytes, dict[str, Raw]]
) -> None:
    with (
        bare(server_of(held[0], without_total)) as (address, asked),
        pytest.raises(penstock.StorageError, match="does not say how large") as raised,
    ):
        penstock.open(where(address))
    assert "send the size" in (raised.value.remedy or "")
    assert len(asked) == 1


def test_a_password_does_not_follow_to_another_host(s3: Callable[..., str], held: tuple[bytes, dict[str, Raw]]) -> None:
    body, tensors = held
    with bare(server_of(body, plain)) as (far, asked):

        def send_there(_: str) -> list[bytes]:
            there = f"Location: http://{far.replace('127.0.0.1', 'localhost')}/m.safetensors"
            return [_head("HTTP/1.1 302 F", there, "Content-Length: 0", "Connection: close")]

        with bare(send_there) as (near, first):
            ckpt = penstock.open(f"http://me:SENTINEL-password@{near}/m.safetensors")
            assert_bits(ckpt.load(framework="np"), tensors)
            assert all("authorization: Basic" in head for head in first)
            assert asked
            assert not [head for head in asked if "authorization" in head.lower()]
            # What is signed is for one host, and goes nowhere else.
            asked.clear()
            with pytest.raises(penstock.StorageError, match="HTTP 302") as raised:
                penstock.open(s3(f"http://{near}"))
            assert "sends elsewhere" in (raised.value.remedy or "")
            assert not asked


def test_an_empty_object_needs_no_more_than_reading(where: Callable[[str], str], tmp_path: Path) -> None:
    def write(head: str) -> list[bytes]:
        if not head.startswith("GET"):
            return [_head("HTTP/1.1 403 F", "Content-Length: 0", "Connection: close")]
        if "list-type" in head:
            return [_head("HTTP/1.1 200 O", "Content-Length: 21", "Connection: close"), b"<ListBucketResult/>\r\n"]
        if "range:" in head.lower():
            return [_head("HTTP/1.1 416 R", "Content-Range: bytes */0", "Content-Length: 0", "Connection: close")]
        return [_head("HTTP/1.1 200 O", "Content-Length: 0", "Connection: close")]

    with bare(write) as (address, _):
        pulled = penstock.pull(where(address), tmp_path / "to")
        assert (tmp_path / "to" / "m.safetensors").read_bytes() == b""
        assert pulled.nbytes == 0


def test_a_host_that_nobody_knows_is_named(s3: Callable[..., str]) -> None:
    with pytest.raises(penstock.StorageError, match=r"no connection to http://no-such-host\.invalid:9000: ") as raised:
        penstock.open(s3("http://no-such-host.invalid:9000"))
    assert "Check the endpoint" in (raised.value.remedy or "")


def test_a_clock_that_is_wrong_is_told(s3: Callable[..., str]) -> None:
    said = "<Error><Code>RequestTimeTooSkewed</Code><Message>The difference is too large.</Message></Error>"
    answer = [_head("HTTP/1.1 403 F", f"Content-Length: {len(said)}", "Connection: close"), said.encode()]
    with bare(lambda _: answer) as (address, asked):
        with pytest.raises(penstock.LocationAccessError, match="RequestTimeTooSkewed") as raised:
            penstock.open(s3(f"http://{address}"))
        assert raised.value.remedy == "Set this machine's clock"
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("names", "days", "told"),
    [
        ("DNS:elsewhere.example", ("20200101000000", "20991231235959"), r'not valid for name "127\.0\.0\.1"'),
        ("IP:127.0.0.1", ("20200101000000", "20200102000000"), "certificate expired"),
        ("IP:127.0.0.1", ("20980101000000", "20990102000000"), "not valid yet"),
    ],
)
def test_what_is_wrong_with_a_certificate_is_told_at_once(
    names: str, days: tuple[str, str], told: str, s3: Callable[..., str], tmp_path: Path
) -> None:
    settings, cert = certificate(tmp_path, names, days)
    with bare(lambda _: [], settings) as (address, _):
        location = s3(f"https://{address}", AWS_CA_BUNDLE=cert)
        with pytest.raises(penstock.StorageError, match=told) as raised:
            penstock.open(location)
        assert "times" not in str(raised.value)
        assert "Check the endpoint's certificate" in (raised.value.remedy or "")


def test_a_certificate_that_signs_itself_is_trusted_where_it_is_named(
    where: Callable[[str], str], held: tuple[bytes, dict[str, Raw]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, tensors = held
    settings, cert = certificate(tmp_path, "DNS:localhost,IP:127.0.0.1")
    with bare(server_of(body, plain), settings) as (address, _):
        location = where(address).replace("http://", "https://")
        if (endpoint := os.environ.get("AWS_ENDPOINT_URL")) is not None:
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint.replace("http://", "https://"))
        with pytest.raises(penstock.StorageError, match="certificate"):
            penstock.open(location)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", cert)
        assert_bits(penstock.open(location).load(framework="np"), tensors)


def test_a_certificate_that_signs_itself_as_an_authority_is_told(s3: Callable[..., str], tmp_path: Path) -> None:
    # As `openssl req -x509` makes it.
    settings, cert = certificate(tmp_path, "IP:127.0.0.1", authority=True)
    with bare(lambda _: [], settings) as (address, _):
        location = s3(f"https://{address}", AWS_CA_BUNDLE=cert)
        with pytest.raises(penstock.StorageError, match="certificate") as raised:
            penstock.open(location)
        assert "-addext basicConstraints=critical,CA:FALSE" in (raised.value.remedy or "")


@pytest.mark.parametrize(
    ("user", "query", "credentials", "remedy"),
    [
        ("", "", "none", "user:password@host"),
        ("me:SENTINEL@", "", "the URL's user and password", "Check the user and the password"),
        ("", "?sig=SENTINEL", "the URL's query", "it may have expired"),
    ],
)
def test_a_server_that_wants_to_know_who_asks_says_what_it_was_told(
    user: str, query: str, credentials: str, remedy: str
) -> None:
    answer = [_head("HTTP/1.1 401 U", "WWW-Authenticate: Basic", "Content-Length: 0", "Connection: close")]
    with bare(lambda _: answer) as (address, _):
        with pytest.raises(penstock.LocationAccessError, match=f"credentials: {credentials}") as raised:
            penstock.open(f"http://{user}{address}/m.safetensors{query}")
        assert remedy in (raised.value.remedy or "")
        assert "SENTINEL" not in f"{raised.value} {raised.value!r} {vars(raised.value)}"


def test_whoever_refuses_is_named_though_another_was_asked() -> None:
    answer = [_head("HTTP/1.1 403 F", "Content-Length: 0", "Connection: close")]
    with bare(lambda _: answer) as (far, _):
        there = f"Location: http://{far.replace('127.0.0.1', 'localhost')}/m.safetensors"
        sent_on = [_head("HTTP/1.1 302 F", there, "Content-Length: 0", "Connection: close")]
        with (
            bare(lambda _: sent_on) as (near, _),
            pytest.raises(penstock.LocationAccessError, match=r"HTTP 403 \(host http://localhost"),
        ):
            penstock.open(f"http://{near}/m.safetensors")


def test_a_directory_that_may_not_be_listed_is_not_there() -> None:
    def write(head: str) -> list[bytes]:
        # As nginx answers for a directory without an index.
        status = "403 F" if head.startswith("GET /models/some ") else "404 N"
        return [_head(f"HTTP/1.1 {status}", "Content-Length: 0", "Connection: close")]

    with (
        bare(write) as (address, _),
        pytest.raises(penstock.LocationNotFoundError, match=r"none of model\.safetensors"),
    ):
        penstock.open(f"http://{address}/models/some")


def test_what_is_sent_compressed_is_told() -> None:
    packed = "Content-Encoding: gzip"
    answer = [_head("HTTP/1.1 200 O", packed, "Content-Length: 4", "Connection: close"), b"\x1f\x8b\x08\0"]
    with bare(lambda _: answer) as (address, asked):
        with pytest.raises(penstock.StorageError, match=r"sent compressed \(Content-Encoding: gzip\)") as raised:
            penstock.open(f"http://{address}/m.safetensors")
        assert "Have the server send it as it is" in (raised.value.remedy or "")
        assert "accept-encoding: identity" in asked[0].lower()


def test_an_endpoint_without_tls_is_told_at_once(s3: Callable[..., str]) -> None:
    with bare(lambda _: [_head("HTTP/1.1 400 B", "Content-Length: 0", "Connection: close")]) as (address, asked):
        with pytest.raises(
            penstock.StorageError, match=r"no connection to 127\.0\.0\.1:\d+: the server does not speak TLS"
        ) as e:
            penstock.open(s3(f"https://{address}"))
        assert "http://" in (e.value.remedy or "")
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("status", "told", "remedy"),
    [
        ("407 P", "HTTP 407", "The proxy wants to know who asks"),
        (
            "403 Forbidden by policy",
            "no connection to storage.example: the proxy does not connect to it",
            "HTTPS_PROXY",
        ),
    ],
)
def test_a_proxy_that_makes_no_tunnel_is_told(status: str, told: str, remedy: str, s3: Callable[..., str]) -> None:
    answer = [f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode()]
    with bare(lambda _: answer) as (address, asked):
        location = s3("https://storage.example", HTTPS_PROXY=f"http://user:SENTINEL-password@{address}")
        said = opened_elsewhere(location)
        assert asked[0].startswith("CONNECT storage.example:443 ")
    assert told in said
    assert remedy in said
    assert "SENTINEL" not in said
    assert said.startswith("LocationAccessError" if status.startswith("407") else "StorageError")
