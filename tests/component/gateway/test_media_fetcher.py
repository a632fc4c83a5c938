"""The fetcher against a hostile host; reliability cases M15 to M18."""

import asyncio
from dataclasses import replace

import pytest
from media_script import HOST, PUBLIC, Answer, HostileHost, Resolver, hostile_host, response, sending

from gateway.app import media_source
from gateway.media import MediaAddress, MediaConfig
from gateway.media.fetcher import MediaFetcher
from gateway.media.request_media import NoMediaSource
from weft.api.common.v1 import chat_pb2
from weft.kernel.channels.outbound import ForbiddenAddressError
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock
from weft_testing.fake_clock import FakeClock
from weft_testing.media_files import png

URL = f"https://{HOST}/cat.png?size=1"
FIELD = "messages[0].content[0].image_url.url"
CONFIG = MediaConfig(allowed_hosts=(HOST,), max_bytes=100_000, max_total_bytes=150_000)
PICTURE = png(4, 4)


def address(url: str = URL, field: str = FIELD) -> MediaAddress:
    return MediaAddress(url=url, field=field)


async def fetch(host: HostileHost, config: MediaConfig = CONFIG, url: str = URL) -> chat_pb2.MediaPart:
    files = await MediaFetcher(config, network=host.network).fetch([address(url)])
    return files[url]


async def refusal(host: HostileHost, config: MediaConfig = CONFIG, url: str = URL) -> FieldError:
    with pytest.raises(FieldError) as refused:
        await fetch(host, config, url)
    assert refused.value.field == FIELD
    for inside in ("127.0.0.1", "/root", "Errno", "certificate_verify_failed"):
        assert inside not in refused.value.message
    return refused.value


async def test_fetch_request_reveals_nothing_about_the_caller() -> None:
    async with hostile_host(sending(response(PICTURE))) as host:
        file = await fetch(host)
        again = await fetch(host)
    assert (file.data, file.media_type) == (PICTURE, "image/png")
    assert again == file
    first, *lines = host.requests[0].decode().strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert first == "GET /cat.png?size=1 HTTP/1.1"
    assert headers.pop("host") == HOST
    assert headers == {"accept": "image/*", "accept-encoding": "identity", "user-agent": "weft"} | (
        {"connection": headers["connection"]} if "connection" in headers else {}
    )
    assert host.connected_to == [PUBLIC, PUBLIC]


async def test_name_is_resolved_once_and_the_checked_address_is_used() -> None:
    async with hostile_host(sending(response(PICTURE)), addresses=[[PUBLIC], ["127.0.0.1"]]) as host:
        await fetch(host)
        assert host.resolver.asked == [HOST]
        assert host.connected_to == [PUBLIC]
        error = await refusal(host)  # and the next request looks again, and is told something else
    assert "not public" in error.message
    assert len(host.requests) == 1


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["::ffff:127.0.0.1"],
        [PUBLIC, "127.0.0.1"],
        ["127.0.0.1", PUBLIC],
    ],
    ids=str,
)
async def test_name_with_an_internal_address_is_rejected_before_connecting(addresses: list[str]) -> None:
    async with hostile_host(sending(response(PICTURE)), addresses=[addresses]) as host:
        error = await refusal(host)
    assert "not public" in error.message
    assert host.connected_to == []


async def test_internal_address_is_never_connected_even_without_the_resolver() -> None:
    async with hostile_host(sending(b"")) as host:
        (inside,) = await Resolver([["127.0.0.1"]]).look_up(HOST, 443)
        with pytest.raises(ForbiddenAddressError):
            host.network.checked_socket(inside)
    assert host.connected_to == []


async def test_name_without_an_address_cannot_be_fetched() -> None:
    async with hostile_host(sending(b""), addresses=[[]]) as host:
        assert "not reached" in (await refusal(host)).message


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 300, 304])
@pytest.mark.parametrize("location", ["http://127.0.0.1/", f"https://{HOST}/other.png"])
async def test_redirects_are_not_followed(status: int, location: str) -> None:
    raw = response(b"", status=f"{status} Elsewhere", headers={"Location": location})
    async with hostile_host(sending(raw)) as host:
        assert "redirects" in (await refusal(host)).message
    assert len(host.requests) == 1


async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(response(PICTURE, length=-1))
    while True:
        writer.write(bytes(4096))
        await writer.drain()


async def test_endless_body_is_aborted_at_the_limit() -> None:
    async with hostile_host(endless) as host:
        error = await refusal(host)
        assert error.reason is Reason.REQUEST_TOO_LARGE
        assert "max_bytes" in error.message
        await host.was_left.wait()


async def test_content_length_over_the_limit_is_rejected_before_the_body() -> None:
    async with hostile_host(sending(response(b"", length=100_001))) as host:
        assert (await refusal(host)).reason is Reason.REQUEST_TOO_LARGE


async def test_dripping_body_is_aborted_for_its_rate() -> None:
    clock = FakeClock()

    async def dripping(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response(PICTURE[:1], length=len(PICTURE)))
        await writer.drain()
        for position in range(1, len(PICTURE)):
            await clock.advance(1)
            writer.write(PICTURE[position : position + 1])
            await writer.drain()
            await asyncio.sleep(0.001)

    async with hostile_host(dripping) as host:
        fetcher = MediaFetcher(CONFIG, clock=clock, network=host.network)
        with pytest.raises(FieldError, match="bytes per second"):
            await fetcher.fetch([address()])


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def test_silent_host_times_out() -> None:
    """The time includes that of the connection, which a busy machine may need a tenth of a second for."""
    async with hostile_host(silent) as host:
        error = await refusal(host, replace(CONFIG, total_timeout_seconds=0.5))
        assert "within 0.5 seconds" in error.message
        await host.was_left.wait()


async def test_unfinished_tls_handshake_times_out() -> None:
    async def deaf(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with hostile_host(deaf, tls=False) as host:
        error = await refusal(host, replace(CONFIG, connect_timeout_seconds=0.1))
    assert error.traits.http_status == 400


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (sending(response(PICTURE, length=len(PICTURE) + 1)), "sent less than it announced"),
        (sending(response(PICTURE, status="404 Not Found")), "answered 404"),
        (sending(response(PICTURE, status="206 Partial Content")), "answered 206"),
        (sending(response(PICTURE, headers={"Content-Encoding": "gzip"})), "compressed"),
        (sending(b"garbage\r\n\r\n"), "not answer as a web server"),
        (sending(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 20_000 + b"\r\n\r\n"), "not answer as a web server"),
        (sending(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n"), "not answer as a web server"),
        (sending(b""), "not answer as a web server"),
        (sending(response(b"")), "its content is of no known type"),
        (sending(response(b"<html>", headers={"Content-Type": "image/png"})), "its content is an HTML page"),
    ],
)
async def test_invalid_host_response_is_rejected_with_a_message(answer: Answer, words: str) -> None:
    async with hostile_host(answer) as host:
        assert words in (await refusal(host)).message


async def test_certificate_must_be_trusted_and_match_the_name() -> None:
    async with hostile_host(sending(response(PICTURE)), certified_for="other.example.org") as host:
        assert "certificate" in (await refusal(host)).message
    async with hostile_host(sending(response(PICTURE)), trusted=False) as host:
        assert "certificate" in (await refusal(host)).message
    assert host.requests == []


async def test_host_without_tls_is_rejected_unless_plain_http_is_allowed() -> None:
    async with hostile_host(sending(response(PICTURE)), tls=False) as host:
        await refusal(host, replace(CONFIG, connect_timeout_seconds=0.1))
        plain = replace(CONFIG, allow_plain_http=True)
        url = f"http://{HOST}/cat.png"
        assert (await fetch(host, plain, url)).data == PICTURE


async def test_proxy_environment_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with hostile_host(sending(response(PICTURE))) as host:
        assert (await fetch(host)).data == PICTURE


async def test_files_of_a_request_share_a_size_limit() -> None:
    picture = png(200, 200) + bytes(60_000)
    async with hostile_host(sending(response(picture))) as host:
        fetcher = MediaFetcher(CONFIG, network=host.network)
        wanted = [address(f"https://{HOST}/{name}.png", f"field-{name}") for name in ("a", "b", "c")]
        assert set(await fetcher.fetch(wanted[:2])) == {wanted[0].url, wanted[1].url}
        with pytest.raises(FieldError, match="max_total_bytes") as refused:
            await fetcher.fetch(wanted)
    assert (refused.value.field, refused.value.reason) == ("field-c", Reason.REQUEST_TOO_LARGE)


async def test_concurrent_fetches_are_limited_and_others_wait() -> None:
    go_on = asyncio.Event()

    async def waiting(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(response(PICTURE))
        await writer.drain()

    async with hostile_host(waiting) as host:
        fetcher = MediaFetcher(replace(CONFIG, max_concurrent_fetches=1), network=host.network)
        first = asyncio.create_task(fetcher.fetch([address()]))
        await host.was_asked.wait()
        second = asyncio.create_task(fetcher.fetch([address()]))
        await asyncio.sleep(0)
        assert len(host.requests) == 1
        go_on.set()
        assert (await first) == (await second)
    assert len(host.requests) == 2


async def test_fetch_that_waits_too_long_fails_with_too_many_resources() -> None:
    async with hostile_host(silent) as host:
        fetcher = MediaFetcher(
            replace(CONFIG, max_concurrent_fetches=1, total_timeout_seconds=0.4), network=host.network
        )
        first = asyncio.create_task(fetcher.fetch([address()]))
        await host.was_asked.wait()
        with pytest.raises(WeftError) as refused:
            await fetcher.fetch([address()])
        with pytest.raises(FieldError):
            await first
    assert refused.value.reason is Reason.TOO_MANY_RESOURCES
    assert "max_concurrent_fetches is 1" in refused.value.message
    assert refused.value.traits.retryable


async def test_cancelled_fetch_closes_its_connection_and_releases_its_slot() -> None:
    async with hostile_host(silent) as host:
        fetcher = MediaFetcher(replace(CONFIG, max_concurrent_fetches=1), network=host.network)
        task = asyncio.create_task(fetcher.fetch([address()]))
        await host.was_asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await host.was_left.wait()
        host.answer = sending(response(PICTURE))
        assert (await fetcher.fetch([address()]))[URL].data == PICTURE


async def test_fetching_is_disabled_without_allowed_hosts() -> None:
    nobody = media_source(MediaConfig(), SystemClock())
    assert isinstance(nobody, NoMediaSource)
    with pytest.raises(FieldError) as refused:
        await nobody.fetch([address()])
    assert refused.value.field == FIELD
    assert isinstance(media_source(CONFIG, SystemClock()), MediaFetcher)
