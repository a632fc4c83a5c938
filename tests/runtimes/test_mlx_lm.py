"""mlx-lm's own server, on a processor, as a program of the runtime `server` with its preset."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import psutil
import pytest
from kit.engine_settings import engine_settings
from native_builds import built_mlx_lm

from runner_svc.backend.port import CallInfo
from runner_svc.runtimes.server.presets import PRESETS
from runner_svc.runtimes.server.runtime import ServerModel
from runner_svc.runtimes.server.server_backend import ServerBackend
from weft.api.common.v1 import chat_pb2, event_pb2, sampling_pb2
from weft.api.runner.v1.runner_service_pb2 import CLAIM_STATE_BROKEN, CLAIM_STATE_KEPT
from weft.dispatch.frames import Frame
from weft.kernel.telemetry.structured_logs import new_traceparent

pytestmark = [pytest.mark.runtimes, pytest.mark.timeout(3700)]
CALL = CallInfo(request_id="r1", traceparent=new_traceparent())
LIMIT_SECONDS = 300.0
REST_SECONDS = 30.0
"""Time within which its processes must rest after the only caller has left, however busy the machine is."""
WORDS = "stone river wind and sea " * 40


@pytest.fixture(scope="session")
def mlx_lm() -> tuple[Path, Path]:
    return built_mlx_lm()


@asynccontextmanager
async def _running(mlx_lm: tuple[Path, Path]) -> AsyncGenerator[ServerBackend]:
    program, model = mlx_lm
    backend = ServerBackend(
        *engine_settings(
            ServerModel,
            preset="mlx_lm",
            command=(str(program), *PRESETS["mlx_lm"].command[1:]),
            model=str(model),
            name="smollm2",
            slots=2,
            context_tokens=2048,
        )
    )
    async with asyncio.timeout(LIMIT_SECONDS):
        await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


def _chat(text: str, max_tokens: int) -> chat_pb2.ChatPayload:
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text=text)])
    return chat_pb2.ChatPayload(messages=[message], sampling=sampling_pb2.SamplingParams(max_tokens=max_tokens))


async def _answer(backend: ServerBackend, payload: chat_pb2.ChatPayload) -> Frame:
    async with asyncio.timeout(LIMIT_SECONDS):
        return [event async for frame in backend.generate(payload, CALL) for event in frame]


async def test_model_answers_and_counts_total_and_cached_tokens(mlx_lm: tuple[Path, Path]) -> None:
    async with _running(mlx_lm) as backend:
        first = await _answer(backend, _chat(WORDS, 5))
        second = await _answer(backend, _chat(WORDS, 5))
        claims = {claim.name: claim.state for claim in await backend.engine_claims()}
    assert "".join(event.delta.text for event in first)
    ends = [event.delta.finish_reason for event in first if event.delta.finish_reason]
    assert ends == [event_pb2.FINISH_REASON_LENGTH]
    usage, again = first[-1].finished.receipt.usage, second[-1].finished.receipt.usage
    assert usage.completion_tokens == 5
    assert usage.prompt_tokens == again.prompt_tokens > 100
    assert again.cached_prompt_tokens > usage.prompt_tokens / 2
    assert claims["health_path"] == CLAIM_STATE_KEPT
    assert CLAIM_STATE_BROKEN not in claims.values()


async def test_disconnect_stops_its_work_and_stop_ends_all(mlx_lm: tuple[Path, Path]) -> None:
    async with _running(mlx_lm) as backend:
        async with aclosing(backend.generate(_chat("Tell a very long story.", 2000), CALL)) as stream:
            await anext(stream)
        async with asyncio.timeout(REST_SECONDS):
            while await _processor_seconds_in_a_second(backend) > 0.2:
                pass
        processes = [psutil.Process(process.pid) for process in backend.processes()]
    assert processes
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


async def _processor_seconds_in_a_second(backend: ServerBackend) -> float:
    before = backend.signs()
    await asyncio.sleep(1.0)
    after = backend.signs()
    assert before is not None
    assert after is not None
    return after.cpu_seconds - before.cpu_seconds
