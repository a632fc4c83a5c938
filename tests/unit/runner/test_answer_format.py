"""Formats that requests ask for: answers without them are errors with `strict`, and give a warning otherwise."""

import asyncio
import json
import time
from typing import Any

import pytest
from chat_stage import (
    LENGTH,
    TOOL_CALLS,
    Event,
    ScriptedWork,
    answer,
    call,
    end,
    events_of,
    finish_reasons,
    message,
    receipt,
    request,
    setup,
    text,
    user,
    warnings,
)
from kit.failures import fails

from runner_svc.chat import constraint
from runner_svc.chat.tool_loop import converse
from weft.api.common.v1 import chat_pb2, completion_pb2, event_pb2, warning_pb2
from weft.kernel.errors.error_tree import COMPLETION_TOKENS, PROMPT_ESTIMATED, PROMPT_TOKENS
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.value_check import UncheckedError, ValueCheck
from weft.kernel.text.json_objects import to_json_object

NOT_MET = warning_pb2.WARNING_CODE_CONSTRAINT_NOT_MET
NOT_CHECKED = warning_pb2.WARNING_CODE_CONSTRAINT_NOT_CHECKED
SHARE = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
SCHEMA = {"type": "object", "properties": {"a": SHARE}, "required": ["a"]}


def wants(schema: dict[str, Any] | None, *, strict: bool = False, **fields: Any) -> chat_pb2.ChatPayload:
    wanted = chat_pb2.ResponseFormat(json_object=True)
    if schema is not None:
        wanted.json_schema.schema.CopyFrom(to_json_object(schema, "schema"))
        wanted.json_schema.strict = strict
    return chat_pb2.ChatPayload(messages=fields.pop("messages", [user()]), response_format=wanted, **fields)


def extra(**fields: Any) -> chat_pb2.ChatPayload:
    return chat_pb2.ChatPayload(messages=[user()], extra_parameters=to_json_object(fields, "extra_parameters"))


async def played(payload: Any, *pieces: str, finish: Any = event_pb2.FINISH_REASON_STOP, **asked: Any) -> list[Event]:
    return await events_of(
        ScriptedWork([*map(text, pieces), *end(finish)]), request(payload, **asked), setup(repetition="off")
    )


async def test_strict_schema_that_is_not_kept_is_an_error_after_the_text_with_its_usage() -> None:
    seen: list[Event] = []
    with fails(Reason.CONSTRAINT_NOT_MET, "$.a", "123", "maximum of 1") as caught:
        async for frame in converse(
            ScriptedWork([text('{"a":'), text(" 123}"), *end()]), request(wants(SCHEMA, strict=True)), setup()
        ):
            seen += frame
    assert answer(seen) == '{"a": 123}'
    assert finish_reasons(seen) == []
    assert seen[-1].usage.completion_tokens == 5
    assert (caught.value.metadata[PROMPT_TOKENS], caught.value.metadata[COMPLETION_TOKENS]) == ("10", "5")


async def test_counts_of_an_answer_that_fails_before_its_end_are_not_held_back() -> None:
    """A loop in an answer with a format was billed by an estimate: the event with the counts got lost."""
    seen: list[Event] = []
    line = "I will look at the file again, and again.\n"
    with fails(Reason.REPEATED_LINE_LOOP):
        async for frame in converse(
            ScriptedWork([text(line) for _ in range(200)]), request(wants(None)), setup(repetition="kill")
        ):
            seen += frame
    assert seen[-1].usage.completion_tokens > 0


async def test_estimated_prompt_is_marked_in_the_error_too() -> None:
    ends = end()
    for event in ends[-1]:
        if event.HasField("finished"):
            event.finished.receipt.usage.prompt_estimated = True
    with fails(Reason.CONSTRAINT_NOT_MET) as caught:
        await events_of(ScriptedWork([text("{}"), *ends]), request(wants(SCHEMA, strict=True)), setup())
    assert caught.value.metadata[PROMPT_ESTIMATED] == "true"


async def test_checks_of_all_choices_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice and each call could take a second of the processor."""
    monkeypatch.setattr(constraint, "MAX_ANSWER_CPU_SECONDS", -1.0)
    choices = [[Event(delta=event_pb2.Delta(index=index, text="no JSON"))] for index in range(3)]
    events = await events_of(ScriptedWork([*choices, *end()]), request(wants(SCHEMA, choice_count=3)), setup())
    assert warnings(events) == [NOT_CHECKED]


async def test_kept_schema_changes_nothing() -> None:
    events = await played(wants(SCHEMA, strict=True), '{"a":', " 0.5}")
    assert (answer(events), finish_reasons(events), warnings(events)) == ('{"a": 0.5}', [1], [])
    assert [event.WhichOneof("event") for event in events[-3:]] == ["delta", "usage", "finished"]


async def test_schema_without_strict_that_is_not_kept_is_a_warning_in_answer_and_receipt() -> None:
    events = await played(wants(SCHEMA), '{"a": 123}')
    assert (warnings(events), finish_reasons(events)) == ([NOT_MET], [1])
    assert [warning.code for warning in receipt(events).warnings] == [NOT_MET]


@pytest.mark.parametrize(
    ("payload", "said", "is_met"),
    [
        (wants(None), '{"a": 1}', True),
        (wants(None), " \n{}", True),
        (wants(None), "[1]", False),
        (wants(None), '```json\n{"a": 1}\n```', False),
        (wants(None), '{"a": NaN}', False),
        (wants({"pattern": r"^\d{3}-\w+$"}), '"123-ab"', True),
        (wants({"pattern": r"^\d{3}-\w+$"}), '"Hello, World!"', False),
        (wants({"pattern": r"^\p{L}$"}), '"é"', True),
        (wants({"prefixItems": [{"type": "integer"}, {"enum": ["x"]}], "items": False}), '[1, "x", 2]', False),
        (wants({"items": [{"type": "integer"}], "additionalItems": False}), "[1, 2]", False),
        (wants({"not": {"type": "string"}}), '"a"', False),
        (wants({"if": {"minimum": 5}, "then": {"multipleOf": 5}}), "7", False),
        (wants({"multipleOf": 0.1}), "0.3", True),
        (wants({"uniqueItems": True}), "[1, 2, 1]", False),
        (wants({"patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": False}), '{"n1": 1}', True),
        (wants({"patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": False}), '{"m": 1}', False),
        (wants({"minimum": 5, "exclusiveMinimum": True}), "5", False),
        (wants({"format": "date"}), '"2026-02-30"', False),
        (wants({"format": "date-time"}), '"2026-02-28t10:00:00z"', True),
        (wants({"format": "date-time"}), '"2026-02-28T10:00:00"', False),
        (wants({"format": "date-time"}), '"soon"', False),
        (wants({"format": "email"}), '"Hello"', False),
        (wants({"format": "color"}), '"Hello"', True),
        (extra(guided_regex="[ab]+"), "abba", True),
        (extra(guided_regex="[ab]+"), "abbc", False),
        (extra(guided_choice=["yes", "no"]), "no", True),
        (extra(guided_choice=["yes", "no"]), "No.", False),
        (extra(json_schema=SCHEMA), '{"a": 2}', False),
        (extra(guided_json=json.dumps(SCHEMA)), '{"a": 2}', False),
        (extra(structured_outputs={"choice": ["a"]}), "b", False),
        (extra(grammar='root ::= "a"'), "b", True),
    ],
)
async def test_formats_that_are_not_kept_are_found(payload: Any, said: str, is_met: bool) -> None:
    assert warnings(await played(payload, said)) == ([] if is_met else [NOT_MET])


@pytest.mark.parametrize("finish", [LENGTH, event_pb2.FINISH_REASON_CONTENT_FILTER])
async def test_cut_answer_says_so_by_its_finish_reason_and_breaks_no_format(finish: Any) -> None:
    events = await played(wants(SCHEMA, strict=True), '{"a":', finish=finish)
    assert (finish_reasons(events), warnings(events)) == ([finish], [])


async def test_refusal_breaks_no_format() -> None:
    refused = [Event(delta=event_pb2.Delta(refusal="I cannot."))]
    assert warnings(await events_of(ScriptedWork([refused, *end()]), request(wants(SCHEMA, strict=True)))) == []


async def test_stop_string_of_the_caller_may_end_a_strict_answer_early_with_a_warning() -> None:
    payload = wants(SCHEMA, strict=True)
    payload.sampling.stop.append("}")
    assert warnings(await played(payload, '{"a": 0.5')) == [NOT_MET]
    with fails(Reason.CONSTRAINT_NOT_MET):
        await played(payload, '{"a": 5}')


async def test_answer_that_continues_a_model_turn_may_keep_the_format_with_it() -> None:
    begun = wants(SCHEMA, strict=True, messages=[user(), message(chat_pb2.ROLE_ASSISTANT, '{"a"')])
    assert warnings(await played(begun, ": 1}")) == []


async def test_each_choice_keeps_the_format() -> None:
    deltas = [event_pb2.Delta(index=index, text=said) for index, said in ((0, '{"a": 1}'), (1, "no"))]
    ends = [event_pb2.Delta(index=index, finish_reason=event_pb2.FINISH_REASON_STOP) for index in (1, 0)]
    frames = [[Event(delta=each)] for each in (*deltas, *ends)]
    work = ScriptedWork([*frames, *end()[1:]])
    assert warnings(await events_of(work, request(wants(SCHEMA, choice_count=2)))) == [NOT_MET]


def strict_function() -> chat_pb2.Tool:
    tool = chat_pb2.Tool(function=chat_pb2.FunctionTool(name="f", strict=True))
    tool.function.parameters.CopyFrom(to_json_object(SCHEMA, "parameters"))
    return tool


async def test_arguments_of_a_strict_function_that_break_its_schema_are_an_error() -> None:
    payload = wants(SCHEMA, strict=True, tools=[strict_function()])
    good = await events_of(ScriptedWork([*call("f", '{"a": 1}'), *end(TOOL_CALLS)]), request(payload))
    assert (warnings(good), finish_reasons(good)) == ([], [TOOL_CALLS])
    with fails(Reason.CONSTRAINT_NOT_MET, "arguments of f", "greater than"):
        await events_of(ScriptedWork([*call("f", '{"a": 9}'), *end(TOOL_CALLS)]), request(payload))


async def test_only_the_final_answer_of_an_agent_must_keep_the_format() -> None:
    turns = [[text("Let me look. "), *call("search", '{"q": "x"}'), *end(TOOL_CALLS)], [text('{"a": 1}'), *end()]]
    asked = request(wants(SCHEMA, strict=True), tools=["search"])
    assert warnings(await events_of(ScriptedWork(*turns), asked)) == []


async def test_completion_keeps_the_schema_of_its_engine_parameter() -> None:
    fields = to_json_object({"json_schema": SCHEMA}, "extra_parameters")
    prompt = completion_pb2.PromptInput(text="x")
    payload = completion_pb2.CompletionPayload(prompts=[prompt], extra_parameters=fields)
    assert warnings(await played(payload, '{"a": 7}')) == [NOT_MET]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"unevaluatedProperties": False}, '{"a": 1}'),
        ({"pattern": "(?=a)b"}, '"b"'),
        ({"$ref": "https://example.org/schema"}, "1"),
        ({"type": "array", "items": {"$ref": "#"}}, "[" * 5000 + "]" * 5000),
        ({"type": "string"}, '"' + "a" * 2_000_000 + '"'),
    ],
)
async def test_what_cannot_be_checked_is_said_and_never_passes_in_silence(schema: dict[str, Any], said: str) -> None:
    assert warnings(await played(wants(schema, strict=True), said)) == [NOT_CHECKED]


def multiplying(depth: int) -> tuple[dict[str, Any], Any]:
    """Returns a schema whose alternatives double the work with each level of a value, and such a value."""
    way = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return {"$defs": {"n": {"oneOf": [way, way | {"title": "t"}]}}, "$ref": "#/$defs/n"}, value


def test_check_of_a_schema_that_multiplies_ends_at_its_limit() -> None:
    schema, value = multiplying(25)
    began = time.thread_time()
    with pytest.raises(UncheckedError, match="too many steps"):
        ValueCheck(schema, max_cpu_seconds=0.05).problem(value)
    assert time.thread_time() - began < 0.5


async def test_expensive_check_leaves_the_event_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint, "MAX_CPU_SECONDS", 0.2)
    schema, value = multiplying(25)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    beside = asyncio.create_task(others())
    try:
        events = await played(wants(schema, strict=True), json.dumps(value))
    finally:
        beside.cancel()
        await asyncio.wait([beside])
    assert warnings(events) == [NOT_CHECKED]
    assert turns >= 5
