"""Any background response, in any chunks and with any end, is the same on every retrieval, from every event on."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest
from background_script import PATH, asking, events_in, followed, found, stage
from gateway_script import RunningGateway
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from response_script import MemoryResponses
from sdk_cases import Case, cases
from task_script import ScriptedTasks, output

from gateway.responses import output as responses_output
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason

pytestmark = pytest.mark.slow("streams each example through a real gateway")

Check = Callable[[RunningGateway, ScriptedTasks, Case], Coroutine[Any, Any, None]]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"include": ["message.output_text.logprobs", "metrics"], "stream_options": {"include_weft_events": True}},
]
_UNKEPT = frozenset({"queued", "loading", "progress"})


def check_all(check: Check) -> None:
    """One gateway, many answers of one choice."""
    with asyncio.Runner() as runner:
        stack, tasks, store = AsyncExitStack(), ScriptedTasks(), MemoryResponses()
        gateway = runner.run(stack.enter_async_context(stage(tasks, store)))
        try:

            @settings(max_examples=settings().max_examples // 4, suppress_health_check=list(HealthCheck))
            @given(cases().filter(lambda case: case.choices == 1), st.integers(1, 3))
            def one(case: Case, attempt: int) -> None:
                tasks.kept.clear()
                store.kept.clear()
                runner.run(submitted(gateway, tasks, case, attempt))
                runner.run(check(gateway, tasks, case))

            one()
        finally:
            runner.run(stack.aclose())


async def submitted(gateway: RunningGateway, tasks: ScriptedTasks, case: Case, attempt: int) -> None:
    """A response whose attempts before the last were lost."""
    options = OPTIONS[attempt % len(OPTIONS)]
    asked = gateway.post(PATH, asking(stream=True, **options))
    async with gateway.connection() as (reader, writer):
        writer.write(asked)
        await reader.readuntil(b"response.queued")
    for _ in range(attempt - 1):
        tasks.begin()
        tasks.lose()
    tasks.begin()
    for frame in case.frames[: case.fails_at]:
        kept = [event for event in frame if event.WhichOneof("event") not in _UNKEPT]
        if kept:
            tasks.say(output(kept))
    if case.is_complete:
        tasks.complete()
    else:
        tasks.fail(Reason.WORKER_LOST, "the worker\nis gone")


def id_of(tasks: ScriptedTasks) -> str:
    return tasks.one.task.id.replace("task-", "resp_")


async def the_client_reads_it_again(gateway: RunningGateway, tasks: ScriptedTasks, case: Case) -> None:
    whole = events_in((await followed(gateway, id_of(tasks))).body)
    numbers = [event["sequence_number"] for event in whole]
    assert numbers == sorted(set(numbers))
    answer = await found(gateway, id_of(tasks))
    for place, number in enumerate(numbers):
        assert events_in((await followed(gateway, id_of(tasks), number)).body) == whole[place + 1 :]
    async with gateway.sdk.responses.stream(response_id=id_of(tasks)) as stream:
        if not case.is_complete:
            with pytest.raises(openai.APIError):
                await stream.until_done()
            assert whole[-2]["response"] == answer
            assert answer["status"] == "failed"
            return
        told = [event async for event in stream]
    assert [event.sequence_number for event in told] == numbers
    assert whole[-1]["response"] == answer
    if answer["status"] == "completed":
        assert stream._state._completed_response.output_text == text_of(answer)  # type: ignore[union-attr]


def text_of(answer: dict[str, Any]) -> str:
    parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts if part["type"] == "output_text")


def test_every_answer_is_read_again_from_every_event_on() -> None:
    check_all(the_client_reads_it_again)


async def it_does_not_depend_on_how_it_was_cut(gateway: RunningGateway, tasks: ScriptedTasks, case: Case) -> None:  # noqa: ARG001 - a check has these
    once = (await followed(gateway, id_of(tasks))).body
    kept, last = tasks.one, tasks.one.task.last_event
    events = [event for piece in kept.pieces for event in piece.output.events]
    kept.pieces.clear()
    if events:
        tasks.one.task = kept.task
        tasks.say(output(events))
    assert tasks.one.task.last_event == last
    assert without_request_ids((await followed(gateway, id_of(tasks))).body) == without_request_ids(once)


def without_request_ids(raw: bytes) -> list[str]:
    return [json.dumps({**event, "request_id": None}) for event in events_in(raw)]


def test_no_event_depends_on_how_the_answer_was_cut() -> None:
    check_all(it_does_not_depend_on_how_it_was_cut)


def test_ids_at_random_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_output, "output_item_id", lambda *_: new_id("msg"))
    with pytest.raises(AssertionError):
        check_all(the_client_reads_it_again)
