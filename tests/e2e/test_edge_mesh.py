"""`weft up --edge envoy`: all that the gateway does, through Envoy; deaths of either, and the end of both."""

import asyncio
import io
import json
import os
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import psutil
import pytest
from mesh_process import POOL, MeshProcess, alive, eventually, fake_runner, run_weft, running_mesh, write_config

CHAT = "/v1/chat/completions"
RESTART_SECONDS = 15.0
CANCEL_SECONDS = 0.25
MEBIBYTE = 1024 * 1024


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": POOL, "messages": [{"role": "user", "content": "hi"}], **fields}


@pytest.fixture(scope="module")
def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("edge")
    config = write_config(folder, fake_runner("a"), edge={"proxy": "envoy"})
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


@pytest.fixture
async def mesh(shared_mesh: MeshProcess) -> MeshProcess:
    await shared_mesh.reset("a")
    return shared_mesh


@pytest.fixture
async def http(mesh: MeshProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(mesh.url) as session:
        yield session


def _envoy(mesh: MeshProcess) -> psutil.Process:
    """The process that it says it is."""
    facts = json.loads((mesh.home / "run" / "up.json").read_text())
    process = psutil.Process(facts["pids"]["edge"])
    assert process.name() == "envoy"
    return process


def test_envoy_owns_the_public_port_and_the_gateway_listens_on_loopback(mesh: MeshProcess) -> None:
    port = int(mesh.url.rpartition(":")[2])
    listening = [each.laddr for each in _envoy(mesh).net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert {(each.ip, each.port) for each in listening} == {("127.0.0.1", port)}
    host = psutil.Process(mesh.process.pid).net_connections("tcp")
    own = {each.laddr for each in host if each.status == psutil.CONN_LISTEN}
    assert {each.ip for each in own} == {"127.0.0.1"}
    assert port not in {each.port for each in own}


ANSWERED: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "chat": ("POST", CHAT, _body()),
    "workbench": ("GET", "/ui/", None),
    "resources": ("GET", "/api/v1/models", None),
    "readiness": ("GET", "/readyz", None),
}


@pytest.mark.parametrize("name", ANSWERED)
async def test_edge_forwards_requests(name: str, http: aiohttp.ClientSession) -> None:
    method, path, body = ANSWERED[name]
    async with http.request(method, path, json=body, headers={"x-request-id": f"own-{name}"}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["x-request-id"] == f"own-{name}"
        assert not {"server", "x-envoy-upstream-service-time"} & set(answer.headers)


@pytest.mark.parametrize(
    ("path", "last"), [(CHAT, "data: [DONE]"), ("/api/chat", '"done":true')], ids=["of events", "of lines"]
)
async def test_edge_forwards_a_stream(path: str, last: str, http: aiohttp.ClientSession) -> None:
    async with http.post(path, json=_body(stream=True)) as answer:
        assert answer.status == 200
        assert last in await answer.text()


async def test_edge_does_not_buffer_events(mesh: MeshProcess, http: aiohttp.ClientSession) -> None:
    async with await mesh.backend("a") as backend:
        await backend.set_behaviour(answer_tokens=0, tokens_per_second=20)
        async with http.post(CHAT, json=_body(stream=True, max_tokens=4000)) as answer:
            async for line in answer.content:
                if b'"content":"' in line and b"tok1" in line:
                    break
            # It is still being made: nothing waits for the end.
            assert (await backend.state()).active_requests == 1


async def test_edge_forwards_the_workbench_event_stream(http: aiohttp.ClientSession) -> None:
    async with http.get("/api/v1/watch?kinds=model") as answer:
        assert answer.status == 200, await answer.text()
        assert await asyncio.wait_for(answer.content.readline(), 10.0)


async def test_edge_uploads_and_downloads_a_20_mb_file(http: aiohttp.ClientSession) -> None:
    content = os.urandom(20 * MEBIBYTE)
    form = aiohttp.FormData({"purpose": "user_data"})
    form.add_field("file", io.BytesIO(content), filename="large.bin")
    async with http.post("/v1/files", data=form) as answer:
        assert answer.status == 200, await answer.text()
        file = (await answer.json())["id"]
    async with http.get(f"/v1/files/{file}/content") as answer:
        assert await answer.read() == content


async def test_edge_forwards_a_chat_body_larger_than_envoy_buffers(http: aiohttp.ClientSession) -> None:
    long = json.dumps({"model": POOL, "messages": [{"role": "user", "content": "word " * 400_000}]})
    sent = io.BytesIO(long.encode())
    async with http.post(CHAT, data=sent, headers={"content-type": "application/json"}) as answer:
        # The model refuses so many tokens: it has read them.
        assert (await answer.json())["error"]["code"] == "context_length_exceeded"


async def test_client_disconnect_stops_the_engine(mesh: MeshProcess, http: aiohttp.ClientSession) -> None:
    async with await mesh.backend("a") as backend:
        await backend.set_behaviour(answer_tokens=0, tokens_per_second=50)
        answer = await http.post(CHAT, json=_body(stream=True, max_tokens=100_000))
        await answer.content.readline()
        await backend.wait_for_state(lambda state: state.active_requests == 1)
        began = time.monotonic()
        answer.close()
        await backend.wait_for_state(lambda state: state.active_requests == 0)
        took = time.monotonic() - began
    # Generous to a busy machine; without the cancellation it would last for half an hour.
    assert took < 20 * CANCEL_SECONDS, took


async def test_mesh_health_and_doctor_include_the_edge(mesh: MeshProcess, tmp_path: Path) -> None:
    out = await mesh.weft("status", "-o", "json")
    (component,) = [each for each in _components(json.loads(out)) if each["name"] == "edge"]
    assert component["state"] == "ok"
    config = write_config(tmp_path, fake_runner("a"), edge={"proxy": "envoy"})
    _, out, _ = await run_weft("doctor", "--config", str(config), "-o", "json", home=tmp_path / "home")
    (finding,) = [each for each in json.loads(out)["items"] if each["check"] == "edge"]
    assert finding["verdict"] == "ok"


def _components(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [component for process in status["health"] for component in process["components"]]


async def test_killed_envoy_restarts_on_the_same_port(mesh: MeshProcess) -> None:
    killed = _envoy(mesh)
    killed.kill()
    async with aiohttp.ClientSession(mesh.url) as http:

        async def answers() -> bool:
            try:
                async with http.post(CHAT, json=_body()) as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        await eventually(answers, RESTART_SECONDS, "it does not come back")
    await eventually(lambda: _new_envoy(mesh) not in {None, killed.pid}, RESTART_SECONDS, "its pid is not said")
    (ended,) = mesh.log_lines("envoy ended")
    assert "SIGKILL" in ended["why"]


def _new_envoy(mesh: MeshProcess) -> int | None:
    found: int | None = json.loads((mesh.home / "run" / "up.json").read_text())["pids"]["edge"]
    return found


def test_envoy_exits_when_the_mesh_is_killed(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"))
    with running_mesh(tmp_path / "home", "--config", str(config), "--edge", "envoy") as mesh:
        envoy = _envoy(mesh)
        # `running_mesh` looks for what is left.
        mesh.process.send_signal(signal.SIGKILL)
    assert alive([envoy]) == []


async def test_stop_lets_streams_finish(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a", tokens_per_second=10, answer_tokens=30), drain_seconds=20.0)
    with running_mesh(tmp_path / "home", "--config", str(config), "--edge", "envoy") as mesh:
        async with aiohttp.ClientSession(mesh.url) as http, http.post(CHAT, json=_body(stream=True)) as answer:
            await answer.content.readline()
            mesh.process.send_signal(signal.SIGTERM)
            assert "data: [DONE]" in await answer.text()
        assert await asyncio.to_thread(mesh.process.wait, 30.0) == 0


async def test_edge_uses_the_mesh_certificate_and_reloads_it(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"))
    arguments = ("--config", str(config), "--edge", "envoy", "--tls", "auto")
    with running_mesh(tmp_path / "home", *arguments) as mesh:
        assert mesh.url.startswith("https://")
        authority = Path(mesh.facts["caFile"])
        trust = ssl.create_default_context(cafile=str(authority))
        with httpx2.Client(verify=trust) as client:
            assert client.get(f"{mesh.url}/livez").status_code == 200
            assert client.get(f"{mesh.url}/ca.pem").content == await asyncio.to_thread(authority.read_bytes)
        before = _shown(mesh, trust)
        _issue_anew(mesh.home, authority.parent)
        await eventually(lambda: _shown(mesh, trust) != before, 20.0, "the old certificate is still shown")


def _shown(mesh: MeshProcess, trust: ssl.SSLContext) -> bytes:
    """The certificate that the edge shows."""
    address = ("127.0.0.1", int(mesh.url.rpartition(":")[2]))
    with socket.create_connection(address, 5.0) as plain, trust.wrap_socket(plain, server_hostname="localhost") as tls:
        return tls.getpeercert(binary_form=True) or b""


def _issue_anew(home: Path, folder: Path) -> None:
    """Has the mesh's own authority issue another certificate, as a renewal does."""
    from datetime import UTC, datetime  # noqa: PLC0415 - with the library of certificates

    from weft_app.compose.authority import EdgeCertificate  # noqa: PLC0415

    assert folder.is_relative_to(home)
    EdgeCertificate(folder=folder).prepare(["another.example"], datetime.now(UTC))
