"""Models that sleep and wake, with real servers behind a real runner."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from kit.engine_settings import engine_settings
from kit.failures import fails
from kit.http_server import http_server
from kit.recipes import command_recipe, http_recipe
from runner_harness import OtherServer, RunningRunner, events_of, ready_runner, refusal, running_runner

from runner_svc.backend.port import CallInfo
from runner_svc.instance.instance_settings import HibernationSettings, ServedModel, SleepSettings
from runner_svc.policy.lifecycle import Phase
from runner_svc.runtimes.openai_http.openai_http_backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import OpenAiHttpModel
from weft.api.common.v1 import chat_pb2
from weft.api.registry.v1.wake_pb2 import WakeRecipe
from weft.api.runner.v1 import runner_service_pb2
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_backend.process import FakeControl, fake_backend_command
from weft_testing.fake_backend.state import FakeState
from weft_testing.free_port import free_port

KEY = "sk-upstream-0123456789"
KEY_VARIABLE = "WEFT_TEST_UPSTREAM_KEY"


@pytest.fixture
async def server() -> AsyncIterator[OtherServer]:
    other = OtherServer(free_port())
    try:
        yield other
    finally:
        await other.end()


def _attached(server: OtherServer, recipe: WakeRecipe | None, *, remote: bool = False, **settings: Any) -> ServedModel:
    config = engine_settings(
        OpenAiHttpModel,
        url=server.url,
        upstream_model="upstream-name",
        api_key_env=KEY_VARIABLE,
        environment={KEY_VARIABLE: KEY},
        probe_interval_seconds=0.05,
        probe_failures=2,
    )
    return ServedModel(
        name="m",
        make_backend=lambda: AttachedServer(*config),
        remote=remote,
        hibernation=HibernationSettings(attached=True, recipe=recipe, **{"max_wait_seconds": 15.0, **settings}),
    )


def _python(code: str) -> WakeRecipe:
    return command_recipe(argv=(sys.executable, "-I", "-S", "-c", code))


@asynccontextmanager
async def _http_recipe(server: OtherServer, answers: list[int]) -> AsyncIterator[WakeRecipe]:
    """A controller that begins the server with every answer of 200; `answers` holds what comes before."""

    async def answer(request: web.Request) -> web.Response:
        status = answers.pop(0) if answers else 200
        if request.headers.get("Authorization") != "Bearer controller-secret":
            status = 401
        if status == 200:
            await server.begin("--api-key", KEY)
        return web.Response(status=status)

    async with http_server(answer) as url:
        yield http_recipe(url=f"{url}/wake-the-box", headers={"Authorization": "Bearer ${WEFT_WAKE_SECRET}"})


async def _state_of(server: OtherServer) -> FakeState:
    async with FakeControl(server.url.removesuffix("/v1")) as control:
        return await control.state()


def _told(runner: RunningRunner, *more: object) -> str:
    return "\n".join(map(str, (*runner.registry.opened, *runner.registry.beats, *more)))


ENVIRONMENT: Mapping[str, str] = {**os.environ, "WEFT_WAKE_SECRET": "controller-secret"}


async def test_command_starts_the_server_and_requests_are_served(tmp_path: Path) -> None:
    port, pid_file = free_port(), tmp_path / "pid"
    command = fake_backend_command("--port", str(port), "--api-key", KEY)
    quiet = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    starts_it = (
        "import subprocess\n"
        f"server = subprocess.Popen({command!r}, {quiet})\n"
        f"open({str(pid_file)!r}, 'w').write(str(server.pid))\n"
        "server.returncode = 0"
    )
    try:
        async with running_runner(tmp_path, [_attached(OtherServer(port), _python(starts_it))]) as runner:
            assert (await runner.until(Phase.HIBERNATING)).detail == "the server does not answer"
            await runner.wake()
            await runner.until(Phase.READY)
            events = await events_of(runner.generate())
            assert events[-1].finished.receipt.usage.completion_tokens > 0
    finally:
        psutil.Process(int(pid_file.read_text())).kill()


async def test_server_url_and_key_are_never_revealed(tmp_path: Path, server: OtherServer) -> None:
    port = server.url.rpartition(":")[2].removesuffix("/v1")
    await server.begin("--api-key", KEY, status=500, status_body=f"no way to http://127.0.0.1:{port}/v1 with {KEY}")
    async with (
        _http_recipe(server, [500]) as recipe,
        ready_runner(tmp_path, [_attached(server, recipe)], environment=ENVIRONMENT) as runner,
    ):
        upstream = await refusal(events_of(runner.generate()))
        assert upstream.reason is Reason.BACKEND_ERROR
        await server.end()
        gone = await refusal(events_of(runner.generate()))
        assert gone.reason is Reason.CONNECT_FAILED
        await runner.until(Phase.HIBERNATING)
        failed = await refusal(runner.wake())
        described = await runner.control.Describe(runner_service_pb2.DescribeRequest(log_line_count=1000))
        told = _told(runner, upstream.message, gone.message, failed.message, described)
        controller_port = recipe.http.url.rpartition(":")[2].partition("/")[0]
    assert described.instances[0].process_id == 0
    # With its colon: the digits of a port alone can be in a time.
    ports = (f":{port}", f":{controller_port}")
    for secret in ("://127", "127.0.0.1", *ports, KEY, "controller-secret", "wake-the-box"):
        assert secret not in told
    assert "[hidden]" in upstream.message


async def test_wrong_key_is_reported(tmp_path: Path, server: OtherServer) -> None:
    await server.begin("--api-key", "another-key")
    async with running_runner(tmp_path, [_attached(server, None, attach_retry_seconds=0.05)]) as runner:
        state = await runner.until(Phase.FAILED)
        assert state.detail == "the server refuses the key (status 401)"
        await server.end()
        await server.begin("--api-key", KEY)
        await runner.until(Phase.READY)


async def test_request_without_a_first_token_fails_when_its_server_is_released(server: OtherServer) -> None:
    await server.begin(prefill_seconds=30.0)
    backend = AttachedServer(*engine_settings(OpenAiHttpModel, url=server.url, upstream_model="m"))
    await backend.start()
    payload = chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER)])
    answer = asyncio.create_task(anext(backend.generate(payload, CallInfo(request_id="r", traceparent=""))))
    async with asyncio.timeout(20.0):
        while not (await _state_of(server)).active_requests:
            pass
    await backend.stop()
    with fails(Reason.WORKER_RESTARTED):
        await answer


async def test_server_without_a_key_gets_no_authorization_header(server: OtherServer) -> None:
    await server.begin()
    backend = AttachedServer(*engine_settings(OpenAiHttpModel, url=server.url, upstream_model="m"))
    await backend.start()
    payload = chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER)])
    try:
        async for _ in backend.generate(payload, CallInfo(request_id="r", traceparent="")):
            pass
    finally:
        await backend.stop()
    assert "authorization" not in (await _state_of(server)).last_request_headers


async def test_sleep_action_runs_for_an_attached_server(tmp_path: Path, server: OtherServer) -> None:
    slept = tmp_path / "slept"
    action = _python(f"open({str(slept)!r}, 'a').write('x')")
    await server.begin("--api-key", KEY)
    model = _attached(server, _python(""), sleep=SleepSettings(after_seconds=0.2, action=action))
    async with running_runner(tmp_path, [model]) as runner:
        await runner.until(Phase.HIBERNATING)
        assert slept.read_text() == "x"
        await runner.wake()
        assert (await events_of(runner.generate()))[-1].HasField("finished")
