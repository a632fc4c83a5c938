"""The admin port of a service, over real sockets."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from kit.keys import Keys, bearer

from weft.kernel.channels.tls import TlsFiles
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.health import HealthCheck, down
from weft.kernel.services.health_monitor import HealthMonitor
from weft.kernel.telemetry.metrics_page import MetricsPage
from weft_app.compose.metrics_server import MAX_CONNECTIONS, MAX_SCRAPES, MetricsAccess, MetricsServer
from weft_app.compose.security import KeyCheck
from weft_testing.certificates import Authority
from weft_testing.fake_clock import FakeClock


@asynccontextmanager
async def _serving(listen: str = "127.0.0.1:0", page: MetricsPage | None = None) -> AsyncGenerator[MetricsServer]:
    page = page or MetricsPage()
    page.counter("ends", "e", ("model",))["m",].inc()
    server = MetricsServer(page, listen)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def test_metrics_server_serves_only_the_page_in_the_requested_format() -> None:
    async with _serving() as server, aiohttp.ClientSession() as http:
        async with http.get(server.url) as answer:
            assert answer.status == 200
            assert answer.headers["content-encoding"] in {"gzip", "deflate"}
            assert 'ends_total{model="m"} 1.0' in await answer.text()
        async with http.get(server.url, headers={"accept": "application/openmetrics-text; version=1.0.0"}) as answer:
            assert answer.headers["content-type"].startswith("application/openmetrics-text")
            assert (await answer.text()).endswith("# EOF\n")
        async with http.head(server.url) as answer:
            assert answer.status == 200
        async with http.post(server.url, data=b"x") as answer:
            assert answer.status == 405
        async with http.get(server.url.replace("/metrics", "/")) as answer:
            assert answer.status == 404


async def test_probes_return_the_process_health() -> None:
    full_disk = down("store_not_writable", "the database cannot be written (SQLITE_FULL)")
    monitor = HealthMonitor([HealthCheck(name="store", probe=lambda: full_disk)], FakeClock())
    server = MetricsServer(MetricsPage(), "127.0.0.1:0", monitor)
    await server.start()
    await monitor.start()
    try:
        async with aiohttp.ClientSession() as http:
            answers = {}
            for path in ("/livez", "/readyz", "/health"):
                async with http.get(server.url.replace("/metrics", path)) as answer:
                    answers[path] = answer.status, await answer.json()
    finally:
        await monitor.stop()
        await server.stop(0)
    assert answers["/livez"] == (200, {"status": "ok"})
    assert answers["/readyz"] == (503, {"status": "starting"})
    status, document = answers["/health"]
    assert (status, document["live"], document["ready"]) == (503, True, False)
    assert [(each["name"], each["reason"]) for each in document["components"]] == [
        ("event_loop", ""),
        ("store", "store_not_writable"),
    ]


async def test_unix_socket_is_private_and_removed_at_stop(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.touch()  # of a process that was killed
    async with _serving(f"unix:{path}"):
        assert path.stat().st_mode & 0o777 == 0o600
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http,
            http.get("http://x/metrics") as answer,
        ):
            assert "ends_total" in await answer.text()
    assert not path.exists()


async def test_unix_socket_of_another_running_service_is_taken(tmp_path: Path) -> None:
    """Regression: the second service of one configuration took the socket, and the first one's page was gone."""
    listen = f"unix:{tmp_path / 'm'}"
    async with _serving(listen):
        with pytest.raises(WeftError) as taken:
            await MetricsServer(MetricsPage(), listen).start()
        assert taken.value.reason is Reason.ALREADY_EXISTS


async def test_concurrent_scrapes_over_the_limit_are_rejected() -> None:
    page, may_go, all_wait = MetricsPage(), asyncio.Event(), asyncio.Event()
    waiting = 0

    async def prepare() -> None:
        nonlocal waiting
        waiting += 1
        if waiting == MAX_SCRAPES:
            all_wait.set()
        await may_go.wait()

    page.before_scrape(prepare)
    async with _serving(page=page) as server, aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:

        async def scrape() -> int:
            async with http.get(server.url) as answer:
                return answer.status

        first = [tasks.create_task(scrape()) for _ in range(MAX_SCRAPES)]
        await all_wait.wait()
        assert await scrape() == 503
        may_go.set()
        assert [await each for each in first] == [200] * MAX_SCRAPES
        assert await scrape() == 200


async def test_connections_over_the_limit_are_closed() -> None:
    async with _serving() as server:
        host, port = server.url.removeprefix("http://").removesuffix("/metrics").split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(MAX_CONNECTIONS + 1)]
        reader, _ = opened[-1]
        assert await reader.read() == b""
        reader, writer = opened[0]
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        for _, writer in opened:
            writer.close()


async def test_address_in_use_is_reported() -> None:
    async with _serving() as server:
        taken = server.url.removeprefix("http://").removesuffix("/metrics")
        with pytest.raises(WeftError, match=r"taken by another program.*metrics\.listen") as raised:
            await MetricsServer(MetricsPage(), taken).start()
    assert raised.value.reason is Reason.ALREADY_EXISTS


@pytest.mark.parametrize("listen", ["", "9464", "127.0.0.1:", "127.0.0.1:99999", ":9464", "127.0.0.1:x"])
def test_address_without_a_host_or_port_is_rejected(listen: str) -> None:
    with pytest.raises(WeftError, match=r"metrics\.listen"):
        MetricsServer(MetricsPage(), listen)


@asynccontextmanager
async def _everywhere(
    access: MetricsAccess, listen: str = "0.0.0.0:0"
) -> AsyncGenerator[tuple[str, aiohttp.ClientSession]]:
    """A page on all addresses: its URL on this machine, and a client that trusts it."""
    server = MetricsServer(MetricsPage(), listen, access=access)
    await server.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as http:
            yield server.url.replace("0.0.0.0", "127.0.0.1"), http
    finally:
        await server.stop(0)


async def _status(http: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None) -> int:
    async with http.get(url, headers=headers) as answer:
        return answer.status


def _files(folder: Path) -> TlsFiles:
    return Authority().issue("mesh").write(folder)


def _key_check(scopes: Sequence[str]) -> KeyCheck:
    keys = KeyCheck(FakeClock())
    keys.use(lambda: Keys(scopes).ring)
    return keys


@pytest.mark.parametrize(
    ("scopes", "headers", "status"),
    [
        (["telemetry:view"], {}, 401),
        (["telemetry:view"], bearer("abcdefghijk9"), 401),
        (["models:view"], bearer(), 403),
        (["telemetry:view"], bearer(), 200),
    ],
    ids=["no key", "unknown key", "another scope", "key"],
)
async def test_page_beyond_loopback_needs_tls_and_a_key_of_its_scope(
    tmp_path: Path, scopes: list[str], headers: dict[str, str], status: int
) -> None:
    access = MetricsAccess(tls=_files(tmp_path), keys=_key_check(scopes))
    async with _everywhere(access) as (url, http):
        assert url.startswith("https://")
        assert await _status(http, url, headers) == status
        assert await _status(http, url.replace("/metrics", "/livez")) == 200, "probes need no key"


@pytest.mark.parametrize(("has_certificate", "has_keys"), [(False, True), (True, False), (False, False)])
async def test_unprotected_page_beyond_loopback_is_refused_and_tells_what_is_missing(
    tmp_path: Path, *, has_certificate: bool, has_keys: bool
) -> None:
    access = MetricsAccess(
        tls=_files(tmp_path) if has_certificate else None,
        keys=_key_check(["*:*"]) if has_keys else None,
    )
    async with _everywhere(access) as (url, http), http.get(url, headers=bearer()) as answer:
        assert answer.status == 403
        assert "metrics.insecure: true" in await answer.text()


async def test_page_on_loopback_needs_a_key_if_keys_are_required(tmp_path: Path) -> None:
    access = MetricsAccess(tls=_files(tmp_path), keys=_key_check(["telemetry:view"]))
    async with _everywhere(access, "127.0.0.1:0") as (url, http):
        assert url.startswith("http://")
        assert [await _status(http, url, each) for each in ({}, bearer())] == [401, 200]
        async with http.get(url, headers=bearer()) as answer:
            assert 'weft_admin_port_refusals_total{code="401"} 1.0' in await answer.text()
    async with _everywhere(access, f"unix:{tmp_path / 'm'}"):
        connector = aiohttp.UnixConnector(str(tmp_path / "m"))
        async with aiohttp.ClientSession(connector=connector) as http:
            assert await _status(http, "http://x/metrics") == 200, "only this user reaches the socket"


async def test_page_is_open_beyond_loopback_if_the_operator_says_so(tmp_path: Path) -> None:
    access = MetricsAccess(tls=_files(tmp_path), keys=_key_check(["*:*"]), is_insecure=True)
    async with _everywhere(access) as (url, http):
        assert url.startswith("http://")
        assert await _status(http, url) == 200


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Host": "evil.example:9464"}, {"Sec-Fetch-Site": "cross-site"}],
    ids=["rebound name", "rebound name with a port", "image of a page"],
)
async def test_foreign_page_reads_no_metrics_on_loopback(headers: dict[str, str]) -> None:
    async with _serving() as server, aiohttp.ClientSession() as http:
        assert await _status(http, server.url, headers) == 403
        assert await _status(http, server.url, {"Host": "LOCALHOST:9464"}) == 200


async def test_unstarted_server_can_be_stopped_twice() -> None:
    server = MetricsServer(MetricsPage(), "127.0.0.1:0")
    await server.stop(0)
    await server.stop(0)
