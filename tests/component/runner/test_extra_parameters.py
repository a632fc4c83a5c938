"""Extra parameters and thinking as they arrive at a real process, and the warnings as they leave the backend."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.translate.json_value import to_json_object
from runner_svc.backends.llama_server import LlamaServerBackend, LlamaServerConfig
from runner_svc.backends.port import CallInfo
from runner_svc.policy.parameters import ParameterProfile
from runner_svc.supervise.process import StopGraces
from weft.api.common.v1 import chat_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors import FieldError
from weft.kernel.telemetry import new_traceparent
from weft.testing.fake_backend.process import FakeControl, fake_backend_command

CALL = CallInfo(request_id="r1", traceparent=new_traceparent())


@asynccontextmanager
async def _running(profile: ParameterProfile) -> AsyncGenerator[tuple[LlamaServerBackend, FakeControl]]:
    backend = LlamaServerBackend(
        LlamaServerConfig(
            command=tuple(fake_backend_command(tokens=3)),
            model_path=Path(__file__),
            alias="fake",
            graces=StopGraces(first_term_seconds=0.5, second_term_seconds=0.5),
            parameters=profile,
        )
    )
    await backend.start()
    try:
        found = re.findall(r"listening on (http://\S+)", "\n".join(backend.log_lines(100)))
        async with FakeControl(found[-1]) as control:
            yield backend, control
    finally:
        await backend.stop()


async def _frames(backend: LlamaServerBackend, extra: dict[str, Any]) -> list[Frame]:
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text="hi")])
    payload = chat_pb2.ChatPayload(messages=[message], extra_parameters=to_json_object(extra, "extra"))
    return [frame async for frame in backend.generate(payload, CALL)]


async def test_warnings_come_before_the_answer_and_only_allowed_parameters_reach_the_server() -> None:
    async with _running(ParameterProfile(thinking=False)) as (backend, control):
        frames = await _frames(backend, {"mirostat": 2, "frobnicate": 1, "cache_prompt": False})
        body = (await control.state()).last_request_body
    assert [event.warning.field for event in frames[0]] == ["frobnicate", "cache_prompt"]
    assert not any(event.HasField("warning") for frame in frames[1:] for event in frame)
    assert frames[-1][-1].HasField("finished")
    assert body["mirostat"] == 2
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert not {"frobnicate", "cache_prompt"} & set(body)


async def test_a_wrong_value_never_reaches_the_server() -> None:
    async with _running(ParameterProfile()) as (backend, control):
        with pytest.raises(FieldError, match="mirostat"):
            await _frames(backend, {"mirostat": 9})
        assert (await control.state()).requests_started == 0


async def test_passthrough_lets_a_strange_parameter_arrive() -> None:
    async with _running(ParameterProfile(passthrough=True)) as (backend, control):
        frames = await _frames(backend, {"frobnicate": [1, {"a": None}]})
        body = (await control.state()).last_request_body
    assert body["frobnicate"] == [1, {"a": None}]
    assert not any(event.HasField("warning") for frame in frames for event in frame)
