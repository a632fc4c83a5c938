"""Backends and served models with the fake backend as their engine, and requests to them."""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from kit.engine_settings import engine_settings
from runner_svc.backend.port import Backend, BackendFacts, CacheUse, CallInfo, LoadOrder
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.timeouts import StopGraces
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from weft.api.common.v1 import chat_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft_testing.fake_backend.process import FakeControl, fake_backend_command

CALL = CallInfo(request_id="r1", traceparent=new_traceparent())
GRACES = StopGraces(first_term_seconds=0.5, second_term_seconds=0.5)
START_SECONDS = 20.0
ANSWER_SECONDS = 20.0
AnyBackend = TypeVar("AnyBackend", bound=Backend)


def fake_engine(switches: Mapping[str, Any] | None = None, **settings: Any) -> LlamaServerBackend:
    """A llama-server backend that starts the fake backend with `switches`."""
    command = tuple(fake_backend_command(**(switches or {})))
    given = {"command": command, "path": Path(__file__), "graces": GRACES, **settings}
    return LlamaServerBackend(*engine_settings(LlamaServerModel, **given))


def fake_model(
    name: str = "m", switches: Mapping[str, Any] | None = None, engine: Mapping[str, Any] | None = None, **served: Any
) -> ServedModel:
    """A model over the fake backend. `engine`: settings of the engine; `served`: fields of ServedModel."""
    return ServedModel(name=name, make_backend=lambda: fake_engine(switches, name=name, **(engine or {})), **served)


def control_of(backend: Backend) -> FakeControl:
    """The control routes of the running fake backend."""
    return FakeControl(re.findall(r"listening on (http://\S+)", "\n".join(backend.log_lines(100)))[-1])


async def told_lines(backend: Backend, beginning: str, count: int) -> list[str]:
    """The lines of an engine with this beginning, once there are so many: its output is not read before its answer."""
    async with asyncio.timeout(ANSWER_SECONDS):
        while len(lines := [line for line in backend.log_lines(10_000) if line.startswith(beginning)]) < count:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
    return lines


@asynccontextmanager
async def started(
    backend: AnyBackend, order: LoadOrder | None = None
) -> AsyncGenerator[tuple[AnyBackend, BackendFacts]]:
    """The backend, started, and its facts; stopped with the block."""
    async with asyncio.timeout(START_SECONDS):
        facts = await backend.start(order)
    try:
        yield backend, facts
    finally:
        await backend.stop()


@asynccontextmanager
async def started_process(
    backend: Backend, order: LoadOrder | None = None
) -> AsyncGenerator[tuple[BackendFacts, psutil.Process]]:
    """The facts of the backend, started, and its process."""
    async with started(backend, order) as (_, facts):
        yield facts, psutil.Process(backend.process_id)


def call_of(use: CacheUse | None) -> CallInfo:
    """A call of a tenant, or of nobody."""
    return replace(CALL, cache=use or CacheUse())


def chat(text: str = "hi", **fields: Any) -> chat_pb2.ChatPayload:
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text=text)])
    return chat_pb2.ChatPayload(messages=[message], **fields)


async def frames_of(backend: Backend, payload: Any = None, call: CallInfo = CALL) -> list[Frame]:
    async with asyncio.timeout(ANSWER_SECONDS):
        return [frame async for frame in backend.generate(payload or chat(), call)]


async def failure_of(backend: Backend, payload: Any = None) -> WeftError:
    try:
        await frames_of(backend, payload)
    except WeftError as error:
        return error
    raise AssertionError("a failure was expected")


async def events_of(backend: Backend, payload: Any = None, call: CallInfo = CALL) -> Frame:
    return [event for frame in await frames_of(backend, payload, call) for event in frame]


async def cached_tokens(backend: Backend, text: str, call: CallInfo = CALL) -> int:
    """The cached tokens that an engine tells, which are those that the library had."""
    count = len(await told_lines(backend, "prompt: ", 0))
    told = (await events_of(backend, chat(text), call))[-1].finished.receipt.usage.cached_prompt_tokens
    said = (await told_lines(backend, "prompt: ", count + 1))[-1]
    assert told == int(said.split()[1])
    return told


async def reply(backend: Backend, payload: Any = None, call: CallInfo = CALL) -> str:
    return "".join(event.delta.text for event in await events_of(backend, payload, call))
