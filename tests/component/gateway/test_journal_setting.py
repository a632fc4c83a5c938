"""Requests that are journaled by setting: on every surface, with their caller's word, and never silently without."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from file_script import MemoryFiles
from gateway_script import FixedFleet, RawResponse, RunningGateway, ScriptedDispatcher, finished, hello, model, serving
from response_script import MemoryResponses
from task_script import ScriptedTasks, output
from test_durable_wait import CHAT, HI, SURFACES, lasting

from weft.api.common.v1 import chat_pb2, event_pb2, image_pb2
from weft.api.registry.v1 import journal_pb2, settings_pb2
from weft.api.router.v1 import file_service_pb2
from weft.api.router.v1.task_pb2 import TaskState
from weft.kernel.requests.request_values import JournalMode

WAIT, KEEP = JournalMode.WAIT, JournalMode.KEEP
ANSWER = output(*(frame for frame in hello() if isinstance(frame, list)))


def fleet(journal: JournalMode, *, of_mesh: bool = False) -> FixedFleet:
    if not of_mesh:
        return FixedFleet.of(replace(model("tiny"), journal=journal), model("small"))
    settings = settings_pb2.MeshSettings(journal=journal_pb2.JournalMode.ValueType(journal))
    return FixedFleet(replace(FixedFleet.of(model("tiny"), model("small")).view, settings=settings))


async def ask(gateway: RunningGateway, path: str, body: dict[str, Any], **headers: str) -> RawResponse:
    return await gateway.request("POST", path, body, headers=headers)


@pytest.mark.parametrize("of_mesh", [False, True])
@pytest.mark.parametrize(("path", "body", "answer"), SURFACES)
async def test_every_text_surface_journals_and_answers_as_before(
    path: str, body: dict[str, Any], answer: Any, of_mesh: bool
) -> None:
    tasks = ScriptedTasks(at_once=[answer])
    async with serving(ScriptedDispatcher(vectors=[[0.5]]), tasks=tasks) as gateway:
        live = await ask(gateway, path, body)
    async with serving(tasks=tasks, fleet=fleet(WAIT, of_mesh=of_mesh)) as gateway:
        journaled = await ask(gateway, path, body)
        assert (journaled.status, gateway.dispatcher.contexts) == (200, [])
    assert lasting(journaled.json) == lasting(live.json)
    assert journaled.headers["x-weft-task-id"] == tasks.one.task.id


@pytest.mark.parametrize(
    ("journal", "said", "is_cancelled"),
    [(WAIT, None, True), (KEEP, None, False), (WAIT, "keep", False), (KEEP, "cancel", True)],
)
async def test_client_disconnect_cancels_its_task_unless_kept_by_setting_or_request(
    journal: JournalMode, said: str | None, is_cancelled: bool
) -> None:
    tasks = ScriptedTasks()
    body = CHAT if said is None else {**CHAT, "on_disconnect": said}
    async with serving(tasks=tasks, fleet=fleet(journal)) as gateway:
        async with gateway.connection() as (_, writer):
            writer.write(gateway.post("/v1/chat/completions", body))
            await tasks.was_watched.wait()
        await tasks.was_left.wait()
        if is_cancelled:
            await tasks.was_cancelled.wait()
    assert tasks.cancelled == (list(tasks.kept) if is_cancelled else [])
    assert tasks.one.task.state != TaskState.TASK_STATE_COMPLETED


async def test_background_response_is_journaled_only_once() -> None:
    tasks = ScriptedTasks(at_once=[ANSWER])
    async with serving(tasks=tasks, fleet=fleet(KEEP), responses=MemoryResponses()) as gateway:
        answer = await ask(gateway, "/v1/responses", {"model": "tiny", "input": "hi", "background": True})
        assert answer.status == 200, answer
        for _ in range(100):
            await asyncio.sleep(0)
    assert len(tasks.kept) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"model": "tiny", "query": "a", "documents": ["b"]}),
        ("/v1/images/generations", {"model": "tiny", "prompt": "a"}),
        ("/v1/audio/speech", {"model": "tiny", "input": "a", "voice": "b"}),
    ],
)
async def test_request_that_cannot_be_journaled_is_rejected_before_dispatch(path: str, body: dict[str, Any]) -> None:
    async with serving(tasks=ScriptedTasks(), fleet=fleet(WAIT)) as gateway:
        refused = await ask(gateway, path, body)
        assert (refused.status, gateway.dispatcher.contexts) == (501, [])
    error = refused.error
    assert (error["code"], error["param"]) == ("unsupported_operation", "model")
    assert "are journaled" in error["message"]


async def test_image_is_journaled_if_images_are_stored() -> None:
    files = MemoryFiles()
    tasks = ScriptedTasks(at_once=[output([await stored_image(files)], [finished()])])
    async with serving(tasks=tasks, files=files, fleet=fleet(WAIT)) as gateway:
        answer = await ask(gateway, "/v1/images/generations", {"model": "tiny", "prompt": "a"})
        assert (answer.status, gateway.dispatcher.contexts) == (200, [])
        assert answer.headers["x-weft-task-id"] == tasks.one.task.id
        assert answer.json["data"] == [{"b64_json": "UE5H"}]


async def stored_image(files: MemoryFiles) -> event_pb2.InferenceEvent:
    """An image that a task has kept."""

    async def content() -> AsyncIterator[bytes]:
        yield b"PNG"

    new = file_service_pb2.File(tenant="default", name="a.png", purpose="result", media_type="image/png")
    part = chat_pb2.MediaPart(file_id=(await files.save(new, content())).id, media_type="image/png")
    return event_pb2.InferenceEvent(image=image_pb2.GeneratedImage(image=part))


async def test_token_counting_does_not_create_a_task() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks, fleet=fleet(KEEP)) as gateway:
        await ask(gateway, "/v1/messages/count_tokens", {"model": "tiny", "messages": HI})
        assert len(gateway.dispatcher.contexts) == 1
    assert tasks.kept == {}


async def test_gateway_without_tasks_rejects_requests_that_must_be_journaled() -> None:
    async with serving(fleet=fleet(WAIT)) as gateway:
        refused = await ask(gateway, "/v1/chat/completions", CHAT)
        assert (refused.status, gateway.dispatcher.contexts) == (501, [])
        assert "send them to the endpoint of the mesh" in refused.error["message"]


async def test_task_has_caller_labels_and_request_id() -> None:
    tasks = ScriptedTasks(at_once=[ANSWER])
    async with serving(tasks=tasks, fleet=fleet(WAIT)) as gateway:
        body = {**CHAT, "user": "eve", "metadata": {"job": "42"}}
        assert (await ask(gateway, "/v1/chat/completions", body, **{"x-request-id": "mine-1"})).status == 200
        new = tasks.one.new
        assert (new.caller, new.request_id) == ("local", "mine-1")
        assert (new.spec.user, dict(new.spec.metadata)) == ("eve", {"job": "42"})


async def test_messages_user_comes_from_its_metadata() -> None:
    tasks = ScriptedTasks(at_once=[ANSWER])
    async with serving(tasks=tasks, fleet=fleet(WAIT)) as gateway:
        body = {"model": "tiny", "max_tokens": 9, "messages": HI, "metadata": {"user_id": "eve"}}
        assert (await ask(gateway, "/v1/messages", body)).status == 200
        assert (tasks.one.new.spec.user, len(tasks.one.new.spec.metadata)) == ("eve", 0)
