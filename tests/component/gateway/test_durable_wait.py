"""`durable: "wait"`: a live request that runs as a durable task while its caller waits, in every API that has it."""

import json
from typing import Any

import pytest
from gateway_script import RawResponse, RunningGateway, ScriptedDispatcher, delta, finished, hello, serving, started
from task_script import ScriptedTasks, output

from gateway.gateway_config import GatewayConfig
from weft.api.common.v1.priority_pb2 import PRIORITY_NORMAL
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HI}
ANSWER = output(*(frame for frame in hello() if isinstance(frame, list)))
HELLO = output([started()], [delta("Hello")])
VECTOR = output([started()], [finished()], vectors=[[0.5]])
SURFACES = [
    ("/v1/chat/completions", CHAT, ANSWER),
    ("/v1/completions", {"model": "tiny", "prompt": "hi"}, ANSWER),
    ("/v1/embeddings", {"model": "tiny", "input": "hi"}, VECTOR),
    ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": HI}, ANSWER),
    ("/v1/responses", {"model": "tiny", "input": "hi", "store": False}, ANSWER),
]
VOLATILE = {"id", "created", "created_at", "completed_at"}


async def ask(
    gateway: RunningGateway, path: str = "/v1/chat/completions", body: dict[str, Any] | None = None, **fields: Any
) -> RawResponse:
    return await gateway.request("POST", path, {**(body or CHAT), **fields})


def lasting(value: Any) -> Any:
    """JSON without the fields that differ in every answer."""
    if isinstance(value, dict):
        return {name: lasting(inner) for name, inner in value.items() if name not in VOLATILE}
    return [lasting(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("path", "body", "answer"), SURFACES)
async def test_durable_answer_equals_the_live_answer_and_includes_its_task_id(
    path: str, body: dict[str, Any], answer: Any
) -> None:
    tasks = ScriptedTasks(at_once=[answer])
    async with serving(ScriptedDispatcher(vectors=[[0.5]]), tasks=tasks) as gateway:
        live = await ask(gateway, path, body)
        kept = await ask(gateway, path, body, durable="wait")
        assert (live.status, kept.status) == (200, 200)
        assert lasting(kept.json) == lasting(live.json)
        assert kept.headers["x-weft-task-id"] == tasks.one.task.id
        assert "x-weft-task-id" not in live.headers
        assert len(gateway.dispatcher.contexts) == 1
        assert tasks.one.new.spec.options.priority == PRIORITY_NORMAL
        assert tasks.cancelled == []


@pytest.mark.parametrize(("when_left", "is_cancelled"), [(None, True), ("cancel", True), ("keep", False)])
@pytest.mark.parametrize("stream", [True, False])
async def test_client_disconnect_cancels_its_task_unless_on_disconnect_is_keep(
    when_left: str | None, is_cancelled: bool, stream: bool
) -> None:
    tasks = ScriptedTasks()
    fields = {} if when_left is None else {"on_disconnect": when_left}
    body = json.dumps({**CHAT, **fields, "durable": "wait", "stream": stream}).encode()
    async with serving(tasks=tasks) as gateway:
        async with gateway.connection() as (_, writer):
            writer.write(gateway.post("/v1/chat/completions", body))
            await tasks.was_watched.wait()
        await tasks.was_left.wait()
        if is_cancelled:
            await tasks.was_cancelled.wait()
    assert tasks.cancelled == (list(tasks.kept) if is_cancelled else [])
    assert len(tasks.kept) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_caller_deadline_ends_the_wait_and_cancels_the_task(stream: bool) -> None:
    tasks = ScriptedTasks()
    config = GatewayConfig(port=0, deadline_slack_seconds=3600.0)
    body = json.dumps({**CHAT, "durable": "wait", "stream": stream}).encode()
    async with serving(tasks=tasks, config=config) as gateway:
        answer = await gateway.request("POST", "/v1/chat/completions", body, {"X-Request-Timeout-Seconds": "0.05"})
        assert b'"code":"deadline_exceeded"' in answer.body
        await tasks.was_cancelled.wait()


@pytest.mark.parametrize("when_left", ["cancel", "keep"])
async def test_cancelling_a_streamed_response_cancels_its_task_even_if_kept(
    when_left: str,
) -> None:
    tasks = ScriptedTasks()
    fields = {"durable": "wait", "on_disconnect": when_left, "stream": True, "store": False}
    body = json.dumps({"model": "tiny", "input": "hi", **fields}).encode()
    async with serving(tasks=tasks) as gateway, gateway.connection() as (reader, writer):
        writer.write(gateway.post("/v1/responses", body))
        await tasks.was_watched.wait()
        tasks.begin()
        tasks.say(HELLO)
        told = await reader.readuntil(b'"Hello"')
        response_id = told.split(b'"response":{"id":"')[1].split(b'"')[0].decode()
        answer = await gateway.request("POST", f"/v1/responses/{response_id}/cancel")
        assert answer.json["status"] == "cancelled"
        assert b'"code":"cancelled"' in await reader.readuntil(b"0\r\n\r\n")
    assert tasks.cancelled == list(tasks.kept)


async def test_answer_of_a_kept_task_is_readable_afterwards() -> None:
    tasks = ScriptedTasks(at_once=[ANSWER])
    async with serving(tasks=tasks) as gateway:
        live = json.loads((await ask(gateway, durable="wait", on_disconnect="keep")).body)
        answer = await gateway.request("GET", f"/api/v1/inference-tasks/{tasks.one.task.id}")
        assert lasting(answer.json["result"]) == lasting(live)


async def test_same_idempotency_key_returns_the_same_task() -> None:
    tasks = ScriptedTasks(at_once=[ANSWER])
    async with serving(tasks=tasks) as gateway:
        body = json.dumps({**CHAT, "durable": "wait", "on_disconnect": "keep"}).encode()
        for _ in range(2):
            answer = await gateway.request("POST", "/v1/chat/completions", body, {"Idempotency-Key": "k"})
            assert (answer.status, answer.headers["x-weft-task-id"]) == (200, tasks.one.task.id)
        answer = await gateway.request("POST", "/v1/chat/completions", body, {"Idempotency-Key": ""})
        assert (answer.status, answer.error["param"]) == (400, "Idempotency-Key")


async def test_failed_submission_returns_503_and_nothing_runs() -> None:
    tasks = ScriptedTasks(failure=WeftError(Reason.SERVICE_UNAVAILABLE, "the disk is full", retry_after_seconds=3))
    async with serving(tasks=tasks) as gateway:
        answer = await ask(gateway, durable="wait")
        assert (answer.status, answer.headers["retry-after"]) == (503, "3")
        assert "x-weft-task-id" not in answer.headers
        assert gateway.dispatcher.contexts == []


async def test_unsupported_field_is_rejected_by_name() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks) as gateway:
        for path, fields, param in (
            ("/v1/chat/completions", {"durable": "later"}, "durable"),
            ("/v1/chat/completions", {"durable": True}, "durable"),
            ("/v1/chat/completions", {"durable": "wait", "on_disconnect": "stay"}, "on_disconnect"),
            ("/v1/chat/completions", {"on_disconnect": "keep"}, "on_disconnect"),
            ("/v1/rerank", {"query": "a", "documents": ["b"], "durable": "wait"}, "durable"),
            ("/v1/messages/count_tokens", {"durable": "wait"}, "durable"),
        ):
            answer = await ask(gateway, path, CHAT, **fields)
            assert (answer.status, answer.error["param"]) == (400, param)
            assert (tasks.kept, gateway.dispatcher.contexts) == ({}, [])
