"""A runner's own HTTP API, over real processes: what it tells, what it refuses, and what the registry does for it."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from apart_mesh import Apart
from kit.otlp_receiver import running_receiver
from mesh_process import MeshProcess, eventually, fake_runner, running_mesh, write_config

from weft.api.operations.v1 import operation_pb2
from weft.signing.tokens import make_op_token
from weft_testing.free_port import free_port

SECONDS = 30.0
LIGHT = {"registry": {"report_interval_seconds": 0.2}}


class OneRunner:
    """A registry and a runner with its HTTP API."""

    def __init__(self, mesh: Apart | MeshProcess, url: str) -> None:
        self.mesh = mesh
        self.url = url

    async def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Status, body and headers."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with (
            aiohttp.ClientSession() as http,
            http.request(method, f"{self.url}{path}", json=body, headers=named) as response,
        ):
            is_json = response.content_type == "application/json"
            answer = await response.json() if is_json else await response.text()
            return response.status, answer, {name.lower(): value for name, value in response.headers.items()}

    async def chat(self, content: str = "hi", **headers: str) -> tuple[int, Any, dict[str, str]]:
        """One answer in one piece."""
        body = {"model": "m-a", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        return await self.ask("POST", "/v1/chat/completions", body, **headers)

    @asynccontextmanager
    async def stream(self, tokens: int) -> AsyncIterator[aiohttp.ClientResponse]:
        """A stream whose first bytes have come."""
        body = {"model": "m-a", "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": "x"}]}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.url}/v1/chat/completions", json=body) as response,
        ):
            assert response.status == 200
            while b'"content"' not in await response.content.readline():
                pass
            yield response

    async def until_serving(self) -> dict[str, Any]:
        """Wait until its model is loaded; the capabilities then."""

        async def loaded() -> Any:
            status, body, _ = await self.ask("GET", "/v1/capabilities")
            return body if status == 200 and body["models"]["loaded"] else None

        return dict(await eventually(loaded, SECONDS, "the model is not loaded"))


@contextmanager
def one_runner(
    folder: Path,
    *,
    runner: dict[str, Any] | None = None,
    **sections: Any,
) -> Iterator[OneRunner]:
    """Registry and runner `a`, with one model `m-a`; both end with exit code 0."""
    section = fake_runner("a", slots=1, **(runner or {}))
    config = write_config(folder, section, **{**LIGHT, **sections})
    mesh, port = Apart(folder / "home", config), free_port()
    try:
        mesh.start("registry")
        mesh.start("runner", "--http-port", str(port))
        yield OneRunner(mesh, f"http://127.0.0.1:{port}")
    finally:
        codes = mesh.end_all()
    assert set(codes) == {0}


async def test_runner_requests_and_their_operations_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    wanted = {"POST /v1/chat/completions", "chat m-a", "weft.generate", "POST /v1/cache/flush", "weft.operation"}
    with running_receiver() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with one_runner(tmp_path) as runner:
            await runner.until_serving()
            assert (await runner.chat("a secret", traceparent=f"00-{trace}-{caller}-01"))[0] == 200
            flush = await runner.ask("POST", "/v1/cache/flush", {"scope": "all"}, traceparent=f"00-{trace}-{caller}-01")
            assert flush[0] in {200, 202}, flush
            await asyncio.to_thread(collector.wait_for, lambda spans: wanted <= {span.name for span in spans})
    spans = collector.of_trace(trace)
    assert wanted <= spans.keys()
    edge, chat, operation = spans["POST /v1/chat/completions"], spans["chat m-a"], spans["weft.operation"]
    assert (edge.kind, edge.service, edge.parent_id) == ("SPAN_KIND_SERVER", "weft-runner", caller)
    assert (chat.service, chat.parent_id) == ("weft-runner", edge.span_id)
    assert (operation.service, operation.parent_id) == ("weft-registry", spans["POST /v1/cache/flush"].span_id)
    assert operation.attributes["weft.operation.action"] == "flush"
    assert "a secret" not in repr(collector.spans)


async def test_runner_starts_without_a_registry_and_reports_starting(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"), **LIGHT)
    mesh, port = Apart(tmp_path / "home", config), free_port()
    try:
        mesh.start("runner", "--http-port", str(port))
        runner = OneRunner(mesh, f"http://127.0.0.1:{port}")
        status, answer, headers = await runner.ask("GET", "/v1/capabilities")
        assert (status, answer["error"]["message"]) == (503, "the runner is starting")
        assert "retry-after" in headers
        assert (await runner.ask("GET", "/health"))[0] == 200
        mesh.start("registry")
        await runner.until_serving()
    finally:
        mesh.end_all()


async def test_stopping_runner_finishes_its_stream_and_serves_no_capabilities(tmp_path: Path) -> None:
    with one_runner(tmp_path, runner={"tokens_per_second": 20.0, "answer_tokens": 0}) as runner:
        assert isinstance(runner.mesh, Apart)
        end = runner.mesh.end
        await runner.until_serving()
        async with runner.stream(tokens=40) as response:
            ending = asyncio.create_task(asyncio.to_thread(end, "runner", signal.SIGTERM))

            async def stopping() -> Any:
                status, answer, _ = await runner.ask("GET", "/v1/capabilities")
                return answer if status == 503 else None

            answer = await eventually(stopping, SECONDS, "it does not stop")
            assert answer["error"]["code"] == "shutting_down"
            rest = await response.content.read()
            assert b"tok39" in rest
            assert rest.endswith(b"data: [DONE]\n\n")
        assert await ending == 0


async def test_up_passes_the_port_through_and_the_mesh_shares_slots_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").touch()
    monkeypatch.setenv("MODEL_BASE_PATH", str(tmp_path / "models"))
    section = fake_runner("a", slots=1, tokens_per_second=20.0, answer_tokens=0)
    section["models"][0]["path"] = "tiny.gguf"
    config, port = write_config(tmp_path, section, **LIGHT), free_port()
    with running_mesh(tmp_path / "home", "--config", str(config), "--http-port", str(port)) as mesh:
        runner = OneRunner(mesh, f"http://127.0.0.1:{port}")
        await runner.until_serving()
        async with OneRunner(mesh, mesh.url).stream(tokens=30) as held:
            waited = asyncio.create_task(runner.chat())
            await held.content.read()
        status, _, headers = await waited
        assert status == 200
        # Thirty tokens at twenty a second, less what had come before it asked.
        assert int(headers["x-queue-wait-ms"]) > 500


def op_token(key: bytes, signers: Sequence[str] = ("admin1", "admin2")) -> dict[str, Any]:
    """The envelope of an operation token for an unload of the model."""
    action = operation_pb2.OperationAction(unload_model=operation_pb2.UnloadModel(model="m-a"))
    return make_op_token(action, signers=signers, issued_at=int(time.time()), key=key)
