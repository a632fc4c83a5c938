"""Wakes, attached servers, providers and pulls connect to no address that nobody may name."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import pytest
from kit.recipes import http_recipe
from typing_extensions import override

from runner_svc.engine_http.client import EngineClient
from runner_svc.engine_http.faults import UnconnectedError
from runner_svc.model_store.checked_client import PullClient
from runner_svc.model_store.http_file import FileOrder, FileTransfer, TransferPorts
from runner_svc.openai_upstream.answers import unreached
from weft.kernel.channels.outbound import MESH_PROCESS
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.wake.run import run_recipe

FILE = b"GGUF"


@contextmanager
def web_server(*, redirect: str = "") -> Iterator[tuple[int, list[str]]]:
    """A server on all loopback addresses; yields its port and the requested paths."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        @override
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302 if redirect else 200)
            self.send_header("location", redirect)
            self.send_header("content-length", str(len(FILE)))
            self.end_headers()
            self.wfile.write(FILE)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server.server_port, asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def wake(url: str, _: Path) -> str:
    try:
        await run_recipe(http_recipe(url=url), timeout_seconds=5.0, environment={})
    except WeftError as error:
        return error.message
    return ""


async def call(url: str, _: Path) -> str:
    client = EngineClient(url, headers={}, connect_seconds=5.0, idle_seconds=1.0)
    try:
        (await client.send("GET", "", {})).release()
    except UnconnectedError as error:
        return unreached(error)
    finally:
        client.close()
    return ""


async def pull(url: str, folder: Path) -> str:
    order = FileOrder(name="m.gguf", url=url, partial=folder / "partial", size_bytes=len(FILE))
    with PullClient({}) as client:
        ports = TransferPorts(
            client=client, restrict=client.restrict, on_bytes=lambda _: None, sleep=lambda _: None, allow_http=True
        )
        try:
            FileTransfer(order, ports).run()
        except WeftError as error:
            # What is served is no model, which is another error.
            return error.message if error.reason is Reason.PERMISSION_DENIED else ""
    return ""


USES = pytest.mark.parametrize("use", [wake, call, pull])
Use = Callable[[str, Path], Any]


@pytest.fixture(autouse=True)
def _without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@USES
@pytest.mark.parametrize("host", ["169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]", "2852039166"])
async def test_link_local_address_is_refused(use: Use, host: str, tmp_path: Path) -> None:
    assert "is link-local" in await use(f"http://{host}:8080/x", tmp_path)


@USES
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0"])
async def test_port_of_the_mesh_itself_is_refused(
    use: Use, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with web_server() as (port, asked):
        url = f"http://{host}:{port}/x"
        assert not await use(url, tmp_path)
        assert asked == ["/x"]
        monkeypatch.setenv(MESH_PROCESS, str(os.getppid()))
        monkeypatch.setattr("weft.kernel.channels.outbound.listeners_of", lambda _: {("127.0.0.1", port)})
        assert "is a port of the mesh itself" in await use(url, tmp_path)
        assert asked == ["/x"]


@USES
async def test_name_that_changes_after_the_check_is_not_connected_to(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up, found = socket.getaddrinfo, iter(["127.0.0.1", *["169.254.169.254"] * 9])

    def changing(host: Any, *rest: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        return look_up(next(found) if name == "changing.example" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", changing)
    with web_server() as (port, _):
        refusal = await use(f"http://changing.example:{port}/x", tmp_path)
    # A wake resolves twice; its second address is refused.
    assert refusal == ("the recipe's request could not connect" if use is wake else "")


async def test_redirect_of_a_public_server_leads_to_public_addresses_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with web_server() as (inner, asked), web_server(redirect=f"http://127.0.0.1:{inner}/secret") as (outer, _):
        assert not await pull(f"http://127.0.0.1:{outer}/x", tmp_path)
        assert asked == ["/secret"]
        monkeypatch.setattr("runner_svc.model_store.checked_client.public_refusal", lambda _: None)
        assert "is not public" in await pull(f"http://127.0.0.1:{outer}/x", tmp_path)
        assert asked == ["/secret"]


def test_client_of_pulls_leaves_the_decision_to_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with PullClient({}) as client, pytest.raises(httpx2.ConnectError):
        client.get("http://169.254.169.254/x")


@pytest.mark.parametrize("variable", ["no_proxy", "https_proxy"])
async def test_address_that_no_proxy_connects_to_is_checked(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    if variable == "no_proxy":
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.setenv("no_proxy", "169.254.169.254")
    assert "is link-local" in await pull("http://169.254.169.254/x", tmp_path)
