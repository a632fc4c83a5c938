"""The openai client reads any answer to its end or raises an APIError, wherever it fails."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
from gateway_script import Frame, RunningGateway, ScriptedDispatcher, delta, finished, serving, started, usage
from hypothesis import HealthCheck, given, settings
from openai import APIError
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from sdk_cases import Case, cases

from weft.api.common.v1 import event_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

pytestmark = pytest.mark.slow("streams each example through a real gateway")

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
Check = Callable[[RunningGateway, Case, dict[str, Any]], Coroutine[Any, Any, None]]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"logprobs": True, "stream_options": {"include_usage": True, "include_obfuscation": True}},
    {"extra_body": {"stream_options": {"include_weft_events": True, "include_usage": True}}},
]


def check_all(check: Check, options: dict[str, Any]) -> None:
    """One gateway, many answers."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        gateway = runner.run(stack.enter_async_context(serving(ScriptedDispatcher())))
        try:

            @settings(max_examples=settings().max_examples // 4, suppress_health_check=list(HealthCheck))
            @given(cases())
            def one(case: Case) -> None:
                gateway.dispatcher.steps = case.steps
                runner.run(check(gateway, case, options))

            one()
        finally:
            runner.run(stack.aclose())


async def accumulate(gateway: RunningGateway, case: Case, options: dict[str, Any]) -> Any:
    async with gateway.sdk.chat.completions.stream(
        model="chat", messages=MESSAGES, n=case.choices, **options
    ) as stream:
        async for _ in stream:
            pass
        if {"length", "content_filter"}.isdisjoint(case.finish_reasons.values()):
            return await stream.get_final_completion()
        # The client raises errors of its own for these, once the answer is complete.
        return stream.current_completion_snapshot


async def the_helper_reads_it(gateway: RunningGateway, case: Case, options: dict[str, Any]) -> None:
    if not case.is_complete:
        with pytest.raises(APIError):
            await accumulate(gateway, case, options)
        return
    streamed = await accumulate(gateway, case, options)
    whole = await gateway.sdk.chat.completions.create(
        model="chat", messages=MESSAGES, n=case.choices, logprobs=options.get("logprobs")
    )
    assert isinstance(whole, ChatCompletion)
    assert [choice.index for choice in streamed.choices] == list(range(case.choices))
    for mine, theirs in zip(streamed.choices, whole.choices, strict=True):
        assert mine.finish_reason == theirs.finish_reason == case.finish_reasons[mine.index]
        assert facts(mine) == facts(theirs)
        assert mine.message.role == "assistant"
    if options:
        assert streamed.usage == whole.usage


def facts(choice: Any) -> dict[str, Any]:
    message = choice.message
    return {
        "content": message.content or "",
        "refusal": message.refusal,
        "reasoning": getattr(message, "reasoning_content", None),
        "calls": [
            (call.id, call.type, call.function.name, call.function.arguments) for call in message.tool_calls or []
        ],
        "logprobs": [entry.model_dump() for entry in (choice.logprobs and choice.logprobs.content) or []],
    }


@pytest.mark.parametrize("options", OPTIONS, ids=["bare", "usage", "logprobs", "events"])
def test_the_stream_helper_reads_every_answer_to_what_it_is_in_one_piece(options: dict[str, Any]) -> None:
    check_all(the_helper_reads_it, options)


async def the_bare_stream_ends_honestly(gateway: RunningGateway, case: Case, options: dict[str, Any]) -> None:
    reasons: dict[int, str] = {}
    roles: dict[int, list[str]] = {}
    first: dict[int, str | None] = {}
    failure: APIError | None = None
    try:
        async for chunk in await gateway.sdk.chat.completions.create(
            model="chat", messages=MESSAGES, n=case.choices, stream=True, **options
        ):
            for choice in chunk.choices:
                assert choice.index not in reasons, "nothing comes after the end of a choice"
                first.setdefault(choice.index, choice.delta.content)
                if choice.delta.role:
                    roles.setdefault(choice.index, []).append(choice.delta.role)
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
                for call in choice.delta.tool_calls or []:
                    assert isinstance(call.index, int)
                for entry in (choice.logprobs and choice.logprobs.content) or []:
                    assert isinstance(entry.top_logprobs, list)
    except APIError as error:
        failure = error
    assert (failure is None) == case.is_complete, "no tidy end without an end, no failure after one"
    assert all(told == ["assistant"] for told in roles.values())
    assert all(content == "" for content in first.values())
    if case.is_complete:
        assert reasons == case.finish_reasons


@pytest.mark.parametrize("options", OPTIONS, ids=["bare", "usage", "logprobs", "events"])
def test_a_bare_stream_ends_with_every_finish_reason_or_with_an_error(options: dict[str, Any]) -> None:
    check_all(the_bare_stream_ends_honestly, options)


async def the_text_stream_ends_honestly(gateway: RunningGateway, case: Case, options: dict[str, Any]) -> None:
    reasons: dict[int, str] = {}
    failure: APIError | None = None
    try:
        async for chunk in await gateway.sdk.completions.create(
            model="tiny", prompt="hi", n=case.choices, stream=True, **options
        ):
            reasons |= {choice.index: choice.finish_reason for choice in chunk.choices if choice.finish_reason}
    except APIError as error:
        failure = error
    assert (failure is None) == case.is_complete
    if case.is_complete:
        assert reasons == {index: told.replace("tool_calls", "stop") for index, told in case.finish_reasons.items()}


@pytest.mark.parametrize("options", [{}, {"logprobs": 2, "stream_options": {"include_usage": True}}], ids=str)
def test_a_stream_of_text_ends_with_every_finish_reason_or_with_an_error(options: dict[str, Any]) -> None:
    check_all(the_text_stream_ends_honestly, options)


def long_answer() -> list[Frame]:
    """Two choices with reasoning, text, calls and an end, one event per frame."""
    token = event_pb2.TokenLogprob(token="a", logprob=-0.1)
    call = event_pb2.ToolCallDelta(index=0, id="c1", name="f", arguments_text="{")
    rest = event_pb2.ToolCallDelta(index=0, arguments_text="}")
    events = [started(), delta(reasoning="hm"), delta("a", logprobs=[token]), delta("b", index=1), delta(refusal="no")]
    events += [delta(index=1, tool_calls=[call]), delta(index=1, tool_calls=[rest]), delta(finish="STOP")]
    events += [delta(index=1, finish="TOOL_CALLS"), usage(), finished()]
    return [[event] for event in events]


@pytest.mark.parametrize("surface", ["chat", "text"])
@pytest.mark.parametrize("failure", [None, WeftError(Reason.WORKER_LOST, "gone"), RuntimeError("a fault")], ids=repr)
async def test_a_failure_at_any_boundary_of_chunks_is_an_error_and_no_tidy_end(
    surface: str, failure: Exception | None
) -> None:
    frames = long_answer()
    async with serving(ScriptedDispatcher()) as gateway:
        for place in range(len(frames)):
            case = Case(2, frames, failure, place, failure is None, {})
            gateway.dispatcher.steps = case.steps
            check = the_bare_stream_ends_honestly if surface == "chat" else the_text_stream_ends_honestly
            await check(gateway, case, {"stream_options": {"include_usage": True}})
            if surface == "chat":
                await the_helper_reads_it(gateway, case, {})


def functions_answer() -> list[Frame]:
    def piece(index: int, text: str) -> Any:
        return delta(tool_calls=[event_pb2.ToolCallDelta(index=index, id="c", name="f", arguments_text=text)])

    return [
        [started()],
        [piece(0, "{"), piece(0, "}"), piece(1, "[]")],
        [delta(finish="TOOL_CALLS"), usage(), finished()],
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_of_the_older_form_are_answered_in_it(stream: bool) -> None:
    async with serving(ScriptedDispatcher(list(functions_answer()))) as gateway:
        asked: dict[str, Any] = {"model": "chat", "messages": MESSAGES, "functions": [{"name": "f"}]}
        if stream:
            async with gateway.sdk.chat.completions.stream(**asked) as events:
                answer: Any = await events.get_final_completion()
        else:
            answer = await gateway.sdk.chat.completions.create(**asked)
            assert [warning["code"] for warning in answer.warnings] == ["tool_call_not_run"]
    choice = answer.choices[0]
    assert choice.finish_reason == "function_call"
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == ("f", "{}")
    assert not choice.message.tool_calls
