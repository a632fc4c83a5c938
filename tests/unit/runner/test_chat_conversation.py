"""The platform prompt, repetition in answers, and plain requests."""

from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from chat_stage import (
    STOP,
    TOOL_CALLS,
    Event,
    ScriptedWork,
    answer,
    call,
    end,
    events_of,
    finish_reasons,
    kinds,
    message,
    receipt,
    request,
    setup,
    system_texts,
    text,
    thought,
    user,
    warnings,
)
from kit.failures import fails

from runner_svc.backend.port import CallInfo
from runner_svc.chat.tool_loop import converse
from weft.api.common.v1 import agent_behaviour_pb2, chat_pb2, completion_pb2, event_pb2, sampling_pb2, warning_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.error_tree import COMPLETION_TOKENS, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_objects import to_json_object
from weft_testing.fake_clock import FakeClock

SYSTEM = message(chat_pb2.ROLE_SYSTEM, "Be brief.")
DEVELOPER = message(chat_pb2.ROLE_DEVELOPER, "Be kind.")
LOOP = "I will now look at the file again.\n"


def _payload(*messages: chat_pb2.ChatMessage, **fields: Any) -> chat_pb2.ChatPayload:
    return chat_pb2.ChatPayload(messages=[*messages, user()], **fields)


def _work() -> ScriptedWork:
    return ScriptedWork([text("Hi."), *end()])


async def test_plain_request_reaches_the_engine_unchanged() -> None:
    payload, work = _payload(SYSTEM), _work()
    events = await events_of(work, request(payload), setup(repetition="off"))
    assert work.payloads[0] is payload
    assert answer(events) == "Hi."
    assert kinds(events) == ["usage", "finished"]


async def test_platform_prompt_precedes_agent_and_caller_prompts() -> None:
    work = _work()
    asked = request(_payload(SYSTEM, DEVELOPER), agent="clerk", platform_prompt=True)
    await events_of(work, asked, setup(platform_context="An office."))
    spoken = work.payloads[0].messages
    assert [part.role for part in spoken] == [1, 3]
    platform, _, others = spoken[0].content[0].text.partition("Be brief.")
    assert "the agent clerk" in platform
    assert "An office." in platform
    assert others


@pytest.mark.parametrize("asks", [True, False], ids=["agent", "no_agent"])
async def test_model_platform_prompt_occurs_once_before_agent_and_caller_prompts(asks: bool) -> None:
    work = _work()
    asked = request(_payload(SYSTEM, DEVELOPER), platform_prompt=asks)
    await events_of(work, asked, setup(platform_prompt=True, platform_context="An office."))
    (told,) = system_texts(work.payloads[0])
    assert told.count("An office.") == 1
    assert told.index("An office.") < told.index("Be brief.") < told.index("Be kind.")


async def test_translation_gets_no_platform_prompt_of_its_model() -> None:
    work = _work()
    payload = _payload(extra_parameters=to_json_object({"target_lang_code": "nl"}, "extra_parameters"))
    await events_of(work, request(payload), setup(platform_prompt=True))
    assert system_texts(work.payloads[0]) == []


async def test_text_completion_gets_no_platform_prompt() -> None:
    payload, work = completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text="Once")]), _work()
    await events_of(work, request(payload), setup(platform_prompt=True))
    assert work.payloads == [payload]


async def test_several_system_prompts_are_joined_with_delimiters() -> None:
    work = _work()
    await events_of(work, request(_payload(SYSTEM, DEVELOPER)))
    assert system_texts(work.payloads[0]) == ["Be brief.\n\n---\n\nBe kind."]


async def test_mid_conversation_system_message_keeps_its_position() -> None:
    work = _work()
    late = message(chat_pb2.ROLE_SYSTEM, "Now in French.")
    await events_of(work, request(_payload(SYSTEM, DEVELOPER, user("One."), late)))
    assert [part.role for part in work.payloads[0].messages] == [1, 3, 1, 3]


async def test_system_message_with_more_than_text_is_not_joined() -> None:
    work = _work()
    picture = chat_pb2.ChatMessage(
        role=chat_pb2.ROLE_SYSTEM, content=[chat_pb2.ContentPart(image=chat_pb2.MediaPart(data=b"x"))]
    )
    await events_of(work, request(_payload(SYSTEM, picture)))
    assert len(work.payloads[0].messages) == 3


async def test_platform_prompt_is_rebuilt_before_each_turn() -> None:
    clock = FakeClock(utc=datetime(2026, 3, 4, 22, 59, tzinfo=UTC))

    class Slow(ScriptedWork):
        async def generate(self, payload: Any, call: Any) -> Any:
            async for frame in super().generate(payload, call):
                yield frame
            await clock.advance(60.0)

    work = Slow([*call("search", '{"q": "x"}'), *end(TOOL_CALLS)], [text("Done."), *end()])
    asked = request(_payload(SYSTEM), platform_prompt=True, tools=["search"], max_tool_iterations=2)
    await events_of(work, asked, setup(clock=clock, zone=ZoneInfo("Europe/Berlin")))
    first, second = (system_texts(payload)[0] for payload in work.payloads)
    assert "2026-03-04 23:59, Europe/Berlin (UTC+01:00)" in first
    assert "Tool rounds left: 2" in first
    assert "2026-03-05 00:00, Europe/Berlin" in second
    assert "Tool rounds left: 1" in second
    assert first.endswith("\n\n---\n\nBe brief.")


async def test_platform_prompt_keeps_the_choice_count() -> None:
    work = _work()
    await events_of(work, request(_payload(choice_count=2), platform_prompt=True))
    assert work.payloads[0].choice_count == 2


async def test_loop_is_warned_about_once_and_continues() -> None:
    work = ScriptedWork([*[text(LOOP)] * 200, *end()])
    events = await events_of(work, request(), setup(repetition="warn"))
    assert warnings(events) == [warning_pb2.WARNING_CODE_REPETITION]
    assert [warning.code for warning in receipt(events).warnings] == [warning_pb2.WARNING_CODE_REPETITION]
    assert "look at the file" in receipt(events).warnings[0].message
    assert answer(events) == LOOP * 200
    assert finish_reasons(events) == [STOP]


@pytest.mark.parametrize("piece", [text, thought])
@pytest.mark.parametrize("tools", [(), ("search",)])
async def test_loop_is_stopped_if_the_agent_policy_requires_it(piece: Any, tools: tuple[str, ...]) -> None:
    work = ScriptedWork([*[piece(LOOP)] * 200, *end()])
    asked = request(repetition_policy=agent_behaviour_pb2.REPETITION_POLICY_KILL, tools=tools)
    with fails(Reason.REPEATED_LINE_LOOP, match="look at the file") as raised:
        await events_of(work, asked)
    assert int(raised.value.metadata["count"]) >= 16
    assert work.closed_early == 1


@pytest.mark.parametrize("tools", [(), ("search",)])
async def test_stopped_answer_reports_its_usage_before_its_end(tools: tuple[str, ...]) -> None:
    progress = [Event(progress=event_pb2.Progress(prompt_tokens=21, processed_tokens=21, cached_tokens=4))]
    work = ScriptedWork([progress, *[text(LOOP)] * 200, *end()])
    heard: list[Event] = []

    async def hear() -> None:
        async for frame in converse(work, request(tools=tools), setup()):
            heard.extend(frame)

    with pytest.raises(WeftError) as raised:
        await hear()
    usage = heard[-1].usage
    assert (usage.prompt_tokens, usage.cached_prompt_tokens) == (21, 4)
    assert 16 <= usage.completion_tokens <= 32
    assert raised.value.metadata["prompt_tokens"] == "21"
    assert raised.value.metadata["completion_tokens"] == str(usage.completion_tokens)
    assert work.closed_early == 1


async def test_uncounted_prompt_is_estimated_in_the_usage_of_a_stopped_answer() -> None:
    work, payload = ScriptedWork([*[text(LOOP)] * 200, *end()]), chat_pb2.ChatPayload(messages=[user("x" * 400)])
    with pytest.raises(WeftError) as raised:
        await events_of(work, request(payload))
    assert 100 <= int(raised.value.metadata["prompt_tokens"]) <= 120


async def test_repetition_requested_by_the_caller_is_warned_about_and_not_stopped() -> None:
    work = ScriptedWork([*[text("I will not talk in class.\n")] * 100, *end()])
    asked = request(chat_pb2.ChatPayload(messages=[user('Write "I will not talk in class" a hundred times!')]))
    assert warnings(await events_of(work, asked)) == [warning_pb2.WARNING_CODE_REPETITION]


@pytest.mark.parametrize(("named", "sent"), [(None, 512), (7, 7), (9_999, 9_999)])
@pytest.mark.parametrize("tools", [(), ("search",)])
async def test_model_default_max_tokens_applies_if_the_request_sets_none(
    named: int | None, sent: int, tools: tuple[str, ...]
) -> None:
    payload, work = _payload(), _work()
    if named is not None:
        payload.sampling.max_tokens = named
    await events_of(work, request(payload, tools=tools), setup(default_max_tokens=512))
    assert work.payloads[0].sampling.max_tokens == sent


async def test_model_sampling_defaults_apply_if_the_request_sets_none() -> None:
    payload, work = _payload(), _work()
    payload.sampling.temperature = 0.0
    defaults = sampling_pb2.SamplingParams(temperature=0.7, top_p=0.9, stop=["END"])
    await events_of(work, request(payload), setup(default_params=defaults, default_max_tokens=5))
    sent = work.payloads[0].sampling
    assert (sent.temperature, sent.top_p, list(sent.stop), sent.max_tokens) == (0.0, 0.9, ["END"], 5)
    assert not payload.sampling.HasField("top_p"), "the request itself stays as it is"


async def test_completion_has_the_model_maximum_and_none_is_sent_without_one() -> None:
    payload = completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text="Count.")])
    work, unbounded = _work(), _work()
    await events_of(work, request(payload), setup(default_max_tokens=512))
    assert work.payloads[0].sampling.max_tokens == 512
    assert not payload.sampling.HasField("max_tokens")
    await events_of(unbounded, request(payload), setup())
    assert not unbounded.payloads[0].sampling.HasField("max_tokens")


async def test_loop_in_tool_call_arguments_is_stopped_too() -> None:
    pieces = [
        event_pb2.ToolCallDelta(name="search", arguments_text='{"q": "'),
        event_pb2.ToolCallDelta(arguments_text=LOOP),
    ]
    first, again = ([Event(delta=event_pb2.Delta(tool_calls=[piece]))] for piece in pieces)
    work = ScriptedWork([first, *[again] * 400, *end(TOOL_CALLS)])
    with fails(Reason.REPEATED_LINE_LOOP):
        await events_of(work, request(tools=["search"]), setup(repetition="kill"))


class _DetectingWork(ScriptedWork):
    """An engine that detects a loop itself, and ends the answer where it is told to."""

    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        yield text("again ")
        yield text("again ")
        if call.ends_loops:
            raise WeftError(Reason.REPEATED_LINE_LOOP, "the model repeats itself")
        for frame in end():
            yield frame


@pytest.mark.parametrize("tools", [(), ("search",)])
async def test_loop_ended_by_the_engine_is_reported_with_the_counts_so_far(tools: tuple[str, ...]) -> None:
    told: list[Event] = []

    async def read() -> None:
        async for frame in converse(_DetectingWork(), request(tools=tools), setup(repetition="kill")):
            told.extend(frame)

    with fails(Reason.REPEATED_LINE_LOOP) as raised:
        await read()
    assert raised.value.metadata[COMPLETION_TOKENS] == "2"
    assert told[-1].usage.completion_tokens == 2
    for policy in ("warn", "off"):
        events = await events_of(_DetectingWork(), request(tools=tools), setup(repetition=policy))
        assert answer(events) == "again again "


async def test_agent_policy_takes_precedence_over_the_model_policy() -> None:
    work = ScriptedWork([*[text(LOOP)] * 200, *end()])
    asked = request(repetition_policy=agent_behaviour_pb2.REPETITION_POLICY_OFF)
    assert not warnings(await events_of(work, asked, setup(repetition="kill")))


async def test_each_choice_is_monitored_separately() -> None:
    pieces = [
        [
            Event(
                delta=event_pb2.Delta(index=index, text=LOOP if index else f"Line number {count} is new, it says so.\n")
            )
        ]
        for count in range(200)
        for index in (0, 1)
    ]
    warns = setup(repetition="warn")
    events = await events_of(ScriptedWork([*pieces, *end()]), request(_payload(choice_count=2)), warns)
    assert warnings(events) == [warning_pb2.WARNING_CODE_REPETITION]


async def test_completion_is_monitored_too() -> None:
    payload = completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text="Count.")])
    work = ScriptedWork([*[text(LOOP)] * 200, *end()])
    with fails(Reason.REPEATED_LINE_LOOP):
        await events_of(work, request(payload), setup(repetition="kill"))


@pytest.mark.parametrize("tools", [(), ("search",)])
async def test_engine_warning_is_reported_once_and_is_on_the_receipt(tools: tuple[str, ...]) -> None:
    warning = warning_pb2.Warning(code=warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER, field="mirostat", message="no")
    first = [[Event(warning=warning)]]
    if tools:
        work = ScriptedWork([*first, *call("search", '{"q": "x"}'), *end(TOOL_CALLS)], [*first, text("Done."), *end()])
    else:
        work = ScriptedWork([*first, text("Hi."), *end()])
    events = await events_of(work, request(tools=tools))
    assert warnings(events) == [warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER]
    assert list(receipt(events).warnings) == [warning]


async def test_record_contains_the_output_sent_to_the_caller() -> None:
    work = ScriptedWork([thought("Hm."), text("Hi."), *end()])
    await events_of(work, request())
    assert work.record.output == "Hm.Hi."


def _with_tool(**choice: Any) -> chat_pb2.ChatPayload:
    tool = chat_pb2.Tool(function=chat_pb2.FunctionTool(name="add"))
    return _payload(tools=[tool], tool_choice=chat_pb2.ToolChoice(**choice))


@pytest.mark.parametrize("choice", [{"mode": chat_pb2.ToolChoice.MODE_REQUIRED}, {"function_name": "add"}])
async def test_missing_required_call_is_a_warning(choice: dict[str, Any]) -> None:
    """Observed: `tool_choice: "required"` was answered with free text, without a warning."""
    events = await events_of(_work(), request(_with_tool(**choice)))
    (told,) = receipt(events).warnings
    assert (told.code, told.field) == (warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER, "tool_choice")
    assert warnings(events) == [told.code]
    assert events[-1].HasField("finished")


@pytest.mark.parametrize(
    "payload",
    [_with_tool(mode=chat_pb2.ToolChoice.MODE_AUTO), _payload(), _with_tool(mode=chat_pb2.ToolChoice.MODE_NONE)],
)
async def test_missing_optional_call_is_not_a_warning(payload: chat_pb2.ChatPayload) -> None:
    assert warnings(await events_of(_work(), request(payload))) == []


async def test_fulfilled_required_call_is_not_a_warning() -> None:
    work = ScriptedWork([*call("add"), *end(TOOL_CALLS)])
    payload = _with_tool(mode=chat_pb2.ToolChoice.MODE_REQUIRED)
    assert warnings(await events_of(work, request(payload))) == []


@pytest.mark.parametrize("tools", [(), ("search",)])
@pytest.mark.parametrize(
    ("said", "counted", "is_dropped"),
    [
        ("word " * 6_000, 4_096, True),
        ("word " * 6_000, 6_100, False),
        ("word " * 6_000, 0, False),
        ("word " * 400, 20, False),
        ("    " * 50_000, 900, False),
        ("abcdefgh" * 5_000, 900, False),
        ("文字" * 5_000, 3_000, False),
    ],
    ids=["cut", "whole", "uncounted", "short", "white", "data", "chinese"],
)
async def test_prompt_truncated_by_the_engine_is_a_warning(
    said: str, counted: int, is_dropped: bool, tools: tuple[str, ...]
) -> None:
    work = ScriptedWork([text("Hi."), *end(prompt=counted)])
    events = await events_of(work, request(chat_pb2.ChatPayload(messages=[user(said)]), tools=tools))
    assert warnings(events) == [warning_pb2.WARNING_CODE_PROMPT_DROPPED] * is_dropped
    assert [each.code for each in receipt(events).warnings] == warnings(events)
