"""Extra parameters and thinking as a real process receives them, and the backend's warnings."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kit.engine_settings import engine_settings
from kit.engines import CALL, chat, control_of, fake_engine, frames_of, started
from kit.fake_backend import run_fake_backend

from runner_svc.backend.port import Backend
from runner_svc.openai_upstream.client import MIN_REPORTED_BYTES
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.openai_http.openai_http_backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import OpenAiHttpModel
from weft.api.common.v1 import completion_pb2, embedding_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.text.json_objects import to_json_object
from weft_testing.fake_backend.process import FakeControl

LONG_PROMPT = "word " * (MIN_REPORTED_BYTES // 4)


@asynccontextmanager
async def _running(**settings: Any) -> AsyncGenerator[tuple[LlamaServerBackend, FakeControl]]:
    async with started(fake_engine({"tokens": 3}, **settings)) as (backend, _), control_of(backend) as control:
        yield backend, control


async def _frames(backend: Backend, extra: dict[str, Any], text: str = "hi") -> list[Frame]:
    return await frames_of(backend, chat(text, extra_parameters=to_json_object(extra, "extra")))


async def test_warnings_precede_the_answer_and_only_allowed_parameters_reach_the_server() -> None:
    async with _running(thinking=False) as (backend, control):
        frames = await _frames(backend, {"mirostat": 2, "frobnicate": 1, "cache_prompt": False})
        body = (await control.state()).last_request_body
    assert [event.warning.field for event in frames[0]] == ["frobnicate", "cache_prompt"]
    assert not any(event.HasField("warning") for frame in frames[1:] for event in frame)
    assert frames[-1][-1].HasField("finished")
    assert body["mirostat"] == 2
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert not {"frobnicate", "cache_prompt"} & set(body)


async def test_vector_length_the_server_ignores_is_rejected_by_name() -> None:
    payload = embedding_pb2.EmbeddingPayload(inputs=[completion_pb2.PromptInput(text="a")])
    async with _running() as (backend, _):
        own = len((await backend.embed(payload, CALL)).embeddings[0].values)
        payload.dimensions = own
        assert await backend.embed(payload, CALL)
        payload.dimensions = own - 1
        with pytest.raises(FieldError, match="dimensions"):
            await backend.embed(payload, CALL)


async def test_only_a_managed_server_is_sent_return_progress() -> None:
    """Strict servers refuse fields that they do not know, and `return_progress` is llama.cpp's."""
    async with _running() as (backend, control):
        await _frames(backend, {}, LONG_PROMPT)
        assert (await control.state()).last_request_body["return_progress"] is True
        await _frames(backend, {})
        assert "return_progress" not in (await control.state()).last_request_body, "one batch has nothing to report"
    async with run_fake_backend() as server:
        attached = AttachedServer(
            *engine_settings(OpenAiHttpModel, url=server.base_url, upstream_model="fake", passthrough="all")
        )
        await attached.start()
        try:
            await _frames(attached, {"return_progress": True}, LONG_PROMPT)
            assert "return_progress" not in (await server.state()).last_request_body
        finally:
            await attached.stop()
