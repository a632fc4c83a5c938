"""Streams of background responses: opened, left, resumed at any event, and refused where that is impossible."""

import json
from typing import Any

import pytest
from background_script import (
    asked,
    asking,
    events_in,
    followed,
    hello_pieces,
    long_answer,
    made_whole,
    pieces,
    stage,
)
from gateway_script import RunningGateway
from response_script import PATH, MemoryResponses
from task_script import ScriptedTasks

from gateway.gateway_config import GatewayConfig
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

QUEUED = "response.queued"
BEGUN = "response.in_progress"


async def numbers_told(gateway: RunningGateway, response_id: str, starting_after: int | None = None) -> list[int]:
    answer = await followed(gateway, response_id, starting_after)
    assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    return [event["sequence_number"] for event in events_in(answer.body)]


@pytest.mark.slow("runs whole services")
async def test_client_reads_a_background_response_as_a_stream() -> None:
    store = MemoryResponses()
    async with (
        stage(ScriptedTasks(at_once=hello_pieces()), store) as gateway,
        gateway.sdk.responses.stream(model="chat", input="hi", background=True) as stream,
    ):
        told = [event async for event in stream]
        done = await stream.get_final_response()
    assert [event.type for event in told][:3] == ["response.created", QUEUED, BEGUN]
    assert [event.sequence_number for event in told] == list(range(len(told)))
    assert [event.response.status for event in told[:3]] == ["queued", "queued", "in_progress"]  # type: ignore[union-attr]
    assert (done.status, done.output_text) == ("completed", "Hello, world")
    kept = json.loads(store.kept[done.id].body)
    assert (kept["status"], kept["output"][0]["content"][0]["text"]) == ("completed", "Hello, world")


async def test_stream_starts_immediately_and_the_response_continues_after_a_disconnect() -> None:
    tasks = ScriptedTasks()
    async with stage(tasks) as gateway:
        async with gateway.connection() as (reader, writer):
            writer.write(gateway.post(PATH, asking(stream=True)))
            begun = await reader.readuntil(b"response.queued")
            assert b"x-weft-task-id: task-" in begun
            await tasks.was_watched.wait()
        await tasks.was_left.wait()
        assert tasks.cancelled == []
        tasks.begin()
        for piece in hello_pieces():
            tasks.say(piece)
        tasks.complete()
        response_id = tasks.one.task.id.replace("task-", "resp_")
        rest = events_in((await followed(gateway, response_id, 1)).body)
    assert rest[0]["type"] == BEGUN
    assert rest[-1]["response"]["output"][0]["content"][0]["text"] == "Hello, world"


async def test_stream_resumes_with_exactly_the_events_after_any_sequence_number() -> None:
    tasks = ScriptedTasks(at_once=pieces(long_answer()))
    async with stage(tasks) as gateway:
        more = {"include": ["metrics"], "stream_options": {"include_weft_events": True}}
        whole = events_in((await gateway.request("POST", PATH, asking(stream=True, truncation="auto", **more))).body)
        made = whole[0]["response"]
        for index, event in enumerate(whole):
            rest = events_in((await followed(gateway, made["id"], event["sequence_number"])).body)
            assert rest == whole[index + 1 :]
    assert {"response.weft", "response.metrics", "response.function_call_arguments.delta"} <= {
        event["type"] for event in whole
    }


async def test_broken_stream_ends_with_an_error_and_the_response_continues() -> None:
    away = WeftError(Reason.SERVICE_UNAVAILABLE, "the router cannot be reached")
    tasks = ScriptedTasks(at_once=hello_pieces(), watch_failures=[away])
    async with stage(tasks) as gateway:
        made = await gateway.request("POST", PATH, asking(stream=True))
        told = events_in(made.body)
        response_id = told[0]["response"]["id"]
        assert (await numbers_told(gateway, response_id, told[-1]["sequence_number"]))[0] == 3
    assert [event["type"] for event in told] == ["response.created", QUEUED, BEGUN, "error"]
    assert (told[-1]["sequence_number"], told[-1]["code"]) == (2, "service_unavailable")


async def test_rejected_watch_is_a_status() -> None:
    class Full(ScriptedTasks):
        def watch(self, tenant: str, task_id: str, after_event: int = 0) -> Any:
            raise WeftError(Reason.TOO_MANY_RESOURCES, "as many watch as may")

    async with stage(Full()) as gateway:
        made = await asked(gateway)
        answer = await followed(gateway, made["id"])
    assert (answer.status, answer.error["code"]) == (429, "too_many_resources")


async def test_concurrent_stream_limit_is_enforced() -> None:
    tasks = ScriptedTasks()
    async with stage(tasks, config=GatewayConfig(port=0, max_running_responses=1)) as gateway:
        made = await asked(gateway)
        async with gateway.connection() as (_, writer):
            head = f"GET {PATH}/{made['id']}?stream=true HTTP/1.1\r\nHost: localhost\r\n\r\n"
            writer.write(head.encode())
            await tasks.was_watched.wait()
            assert (await followed(gateway, made["id"])).status == 429


async def test_stream_ends_when_the_gateway_stops() -> None:
    tasks = ScriptedTasks()
    async with stage(tasks) as gateway:
        made = await asked(gateway)
        async with gateway.connection() as (reader, writer):
            head = f"GET {PATH}/{made['id']}?stream=true HTTP/1.1\r\nHost: localhost\r\n\r\n"
            writer.write(head.encode())
            await reader.readuntil(QUEUED.encode())
            await gateway.service.stop(grace_seconds=10.0)
            rest = await reader.read()
            assert b'event: error\ndata: {"type":"error","sequence_number":1,"code":"shutting_down"' in rest
    assert tasks.cancelled == []


async def test_reader_past_the_stored_events_receives_the_end() -> None:
    tasks = ScriptedTasks()
    async with stage(tasks) as gateway:
        made = await asked(gateway)
        tasks.begin()
        tasks.fail(Reason.WORKER_LOST, "the runner is gone")
        assert await numbers_told(gateway, made["id"], 40) == [41, 42]
        assert await numbers_told(gateway, made["id"], 3) == [4]
        assert await numbers_told(gateway, made["id"], 4) == []


async def test_invalid_sequence_number_is_rejected() -> None:
    tasks = ScriptedTasks(at_once=hello_pieces())
    async with stage(tasks) as gateway:
        for given in ("-1", "x", "", "9007199254740993"):
            made = await made_whole(gateway)
            for stream in ("true", "false"):
                answer = await gateway.request("GET", f"{PATH}/{made['id']}?stream={stream}&starting_after={given}")
                assert answer.refusal[::2] == (400, "starting_after")


async def test_unavailable_stream_is_rejected_by_its_parameter() -> None:
    tasks = ScriptedTasks(at_once=hello_pieces())
    async with stage(tasks) as gateway:
        for query, field in (
            ("starting_after=1", "starting_after"),
            ("stream=yes", "stream"),
            ("stream=true&starting_after=9007199254740992", "starting_after"),
            ("stream=true&starting_after=1000000", "starting_after"),
        ):
            made = await asked(gateway)
            assert (await gateway.request("GET", f"{PATH}/{made['id']}?{query}")).refusal[::2] == (400, field)
