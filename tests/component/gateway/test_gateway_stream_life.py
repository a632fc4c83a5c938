"""Streams from their head to their end."""

import asyncio
import json

import pytest
from gateway_script import (
    RunningGateway,
    ScriptedDispatcher,
    Step,
    delta,
    finished,
    hello,
    queued,
    serving,
    started,
)

from gateway.gateway_config import GatewayConfig
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

CHAT = "/v1/chat/completions"
STREAM = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}'
UNARY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
EMBED = b'{"model":"tiny","input":"hi"}'


def events_of(body: bytes) -> list[str]:
    """The data fields of a stream, in order."""
    return [part[6:] for part in body.decode().split("\n\n") if part.startswith("data: ")]


async def test_stream_headers_disable_buffering() -> None:
    async with serving() as gateway:
        response = await gateway.request("POST", CHAT, STREAM)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"].startswith("req-")
    assert "content-encoding" not in response.headers
    assert events_of(response.body)[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("path", "raw"),
    [
        ("/v1/chat/completions", b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}'),
        ("/v1/completions", b'{"model":"tiny","stream":true,"prompt":"hi"}'),
        ("/v1/messages", b'{"model":"tiny","stream":true,"max_tokens":5,"messages":[{"role":"user","content":"hi"}]}'),
        ("/v1/responses", b'{"model":"tiny","stream":true,"store":false,"input":"hi"}'),
    ],
)
@pytest.mark.parametrize("by_setting", [True, False])
async def test_receipt_comment_can_be_disabled_by_header_or_setting(path: str, raw: bytes, by_setting: bool) -> None:
    """Clients that read no comments had no way to leave it out."""
    async with serving(config=GatewayConfig(port=0, receipt_comments=by_setting)) as gateway:
        plain = await gateway.request("POST", path, raw)
        without = await gateway.request("POST", path, raw, {"X-Receipt-Comment": "false"})
        with_it = await gateway.request("POST", path, raw, {"X-Receipt-Comment": "True"})
        wrong = await gateway.request("POST", path, raw, {"X-Receipt-Comment": "no"})
    assert [b": x-queue-wait-ms=" in each.body for each in (plain, without, with_it)] == [by_setting, False, True]
    assert (wrong.status, b"X-Receipt-Comment" in wrong.body) == (400, True)


async def test_rejection_within_the_first_second_is_a_status_even_after_queueing() -> None:
    rejection = WeftError(Reason.QUEUE_TIMEOUT, "waited too long", retry_after_seconds=3)
    async with serving(ScriptedDispatcher([[queued()], [started()], rejection])) as gateway:
        response = await gateway.request("POST", CHAT, STREAM)
    assert response.status == 503
    assert response.error["code"] == "queue_timeout"
    assert response.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (WeftError(Reason.SERVER_DIED, "the engine died"), "server_died"),
        (RuntimeError("secret /etc/path"), "internal"),
        ([], "backend_protocol_error"),
    ],
)
async def test_failure_after_content_ends_with_an_error_event_and_no_done(failure: Step, code: str) -> None:
    async with serving(ScriptedDispatcher([[delta("Hel")], failure])) as gateway:
        response = await gateway.request("POST", CHAT, STREAM)
        await require_counted(gateway, f'code="200",model="tiny",reason="{code}",surface="chat"')
    events = events_of(response.body)
    error = json.loads(events[-1])["error"]
    assert response.status == 200
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}
    assert b"[DONE]" not in response.body
    assert b"secret" not in response.body


async def test_failure_after_the_complete_answer_is_ignored() -> None:
    steps: list[Step] = [*hello(), WeftError(Reason.SERVICE_UNAVAILABLE, "the router is gone")]
    async with serving(ScriptedDispatcher(steps)) as gateway:
        response = await gateway.request("POST", CHAT, STREAM)
    assert events_of(response.body)[-1] == "[DONE]"


@pytest.mark.parametrize(("path", "body"), [(CHAT, STREAM), (CHAT, UNARY), ("/v1/embeddings", EMBED)])
async def test_disconnect_of_a_silent_stream_stops_the_work(path: str, body: bytes) -> None:
    never = asyncio.Event()
    async with serving(ScriptedDispatcher([[started()], never], vectors=never)) as gateway:
        async with gateway.connection() as (_, writer):
            writer.write(gateway.post(path, body))
            await gateway.dispatcher.was_asked.wait()
        await asyncio.wait_for(gateway.dispatcher.was_closed.wait(), 20)
        await require_cancelled(gateway)


async def test_disconnect_during_tokens_stops_the_work() -> None:
    class Endless(list[Step]):
        def __iter__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204
            while True:
                yield tick
                yield [delta("word ")]

    tick = asyncio.Event()
    tick.set()
    async with serving(ScriptedDispatcher(Endless())) as gateway:
        async with gateway.connection() as (reader, writer):
            writer.write(gateway.post(CHAT, STREAM))
            await reader.readuntil(b'"content":"word "')
        await asyncio.wait_for(gateway.dispatcher.was_closed.wait(), 20)


async def test_disconnect_reaches_the_running_request_of_a_pipeline() -> None:
    never = asyncio.Event()
    async with serving(ScriptedDispatcher([[started()], never])) as gateway:
        async with gateway.connection() as (_, writer):
            writer.write(gateway.post(CHAT, STREAM) + gateway.post(CHAT, STREAM))
            await gateway.dispatcher.was_asked.wait()
        await asyncio.wait_for(gateway.dispatcher.was_closed.wait(), 20)


@pytest.mark.slow("runs whole services")
async def test_stalled_reader_is_disconnected() -> None:
    class Endless(list[Step]):
        def __iter__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204
            while True:
                yield [delta("x" * 60_000)]

    config = GatewayConfig(port=0, write_timeout_seconds=0.1)
    async with serving(ScriptedDispatcher(Endless()), config=config) as gateway:
        async with gateway.connection() as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(gateway.post(CHAT, STREAM))
            await asyncio.wait_for(gateway.dispatcher.was_closed.wait(), 20)
        await require_cancelled(gateway)


async def test_request_past_its_deadline_is_ended() -> None:
    config = GatewayConfig(port=0, request_timeout_seconds=0.02, deadline_slack_seconds=0.02)
    never = asyncio.Event()
    async with serving(ScriptedDispatcher([[queued()], never]), config=config) as gateway:
        for body in (STREAM, UNARY):
            response = await gateway.request("POST", CHAT, body)
            assert response.status == 504
            assert response.error["code"] == "deadline_exceeded"
            assert gateway.dispatcher.was_closed.is_set()


async def require_cancelled(gateway: RunningGateway) -> None:
    await require_counted(gateway, 'code="499"')


async def require_counted(gateway: RunningGateway, label: str) -> None:
    """Wait until the metrics show `label`: the request's task ends a few steps after its dispatch was closed."""
    async with asyncio.timeout(20):
        while label not in (await gateway.request("GET", "/metrics")).body.decode():
            pass


async def test_warning_survives_single_frame_answers_and_retries() -> None:
    one_frame: list[Step] = [[started(), delta("Hi"), delta(finish="STOP"), finished()]]
    retried: list[Step] = [[started("a")], [started("b")], [delta("Hi")], [delta(finish="STOP"), finished()]]
    for steps in (one_frame, retried):
        async with serving(ScriptedDispatcher(steps)) as gateway:
            answer = await gateway.request("POST", CHAT, UNARY[:-1] + b',"x_task":"draft"}')
        assert [warning["field"] for warning in answer.json["warnings"]] == ["x_task"]
