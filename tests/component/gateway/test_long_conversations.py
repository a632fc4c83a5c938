"""Conversations that are compacted before their answer: above a threshold, or beyond the context of the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from background_script import events_in, hello_pieces, made_whole
from gateway_script import (
    FixedFleet,
    ScriptedDispatcher,
    delta,
    finished,
    hello,
    model,
    queued,
    serving,
    started,
    usage,
)
from response_script import PATH, MemoryResponses
from task_script import ScriptedTasks
from test_compaction_http import KEY, TOOL, TURNS, summary, texts_of

from weft.dispatch.call import Call
from weft.dispatch.payload_description import estimated_prompt_tokens
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

LONG: list[dict[str, Any]] = [
    *TURNS,
    {"role": "user", "content": "And what is in a.py?"},
    {"type": "function_call", "call_id": "c2", "name": "ls", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c2", "output": "print(1) " * 500},
]
ABOVE_500 = [{"type": "compaction", "compact_threshold": 500}]


@dataclass
class SummarizingDispatcher(ScriptedDispatcher):
    """Writes a summary for each request for one, and refuses prompts of more than `context` estimated tokens."""

    context: int = 1_000_000
    summary_steps: list[Any] = field(default_factory=summary)

    def script_of(self, call: Call[Any]) -> Sequence[Any]:
        if estimated_prompt_tokens(call.payload) > self.context:
            return [WeftError(Reason.CONTEXT_LENGTH_EXCEEDED, "the prompt is too long")]
        is_summary = "summary that replaces it" in texts_of(call.payload)[-1][1]
        return self.summary_steps if is_summary else super().script_of(call)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": LONG, "tools": [TOOL], "context_management": ABOVE_500, **fields}


async def test_long_conversation_is_compacted_and_then_answered() -> None:
    dispatcher = SummarizingDispatcher()
    async with serving(dispatcher, result_key=KEY, responses=MemoryResponses()) as gateway:
        answer = (await gateway.request("POST", PATH, body())).of(200)
        asked, final = dispatcher.payloads
        assert [item["type"] for item in answer["output"]] == ["compaction", "message"]
        assert "warnings" not in answer
        assert [role for role, _ in texts_of(final)] == ["DEVELOPER", "USER"]
        words = texts_of(final)[1][1]
        assert "Listed: a.py." in words
        assert "And what is in a.py?" in words
        assert words.endswith("Continue it.]")
        assert list(asked.messages[:-1])[-1].tool_call_id == "c2"
        assert (asked.tools, asked.tool_choice.mode) == (final.tools, 1)
        # The next turn begins with the same prompt, whether the client drops what came before or not.
        turn = [{"role": "user", "content": "Thanks"}]
        for kept in (LONG, LONG[:1]):
            await gateway.request("POST", PATH, body(input=[*kept, *answer["output"], *turn]))
            assert list(dispatcher.payloads[-1].messages[:2]) == list(final.messages)
            assert [role for role, _ in texts_of(dispatcher.payloads[-1])[2:]] == ["ASSISTANT", "USER"]
        await gateway.request("POST", PATH, body(input=turn, previous_response_id=answer["id"]))
        assert list(dispatcher.payloads[-1].messages[:2]) == list(final.messages)


async def test_receipts_and_usage_count_the_summary_as_work_of_the_request() -> None:
    async with serving(SummarizingDispatcher(), result_key=KEY) as gateway:
        answer = (await gateway.request("POST", PATH, body(), {"X-Request-Id": "r1"})).of(200)
        first, second = gateway.dispatcher.contexts
    assert answer["usage"]["total_tokens"] == 20
    assert {first.request_id, second.request_id} == {"r1"}
    assert (first.compaction.pass_count, second.compaction.pass_count) == (0, 1)  # type: ignore[union-attr]
    assert second.compaction.usage.prompt_tokens == 7  # type: ignore[union-attr]


async def test_stream_waits_for_the_summary_and_begins_with_it() -> None:
    steps = [[queued()], *summary()]
    async with serving(SummarizingDispatcher(summary_steps=steps), result_key=KEY) as gateway:
        answer = await gateway.request("POST", PATH, body(stream=True))
    assert b": queued position=3" in answer.body
    events = events_in(answer.body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2:5] == ["output_item.added", "compaction.compacting", "output_item.done"]
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["compaction", "message"]
    assert events[4]["item"] == events[-1]["response"]["output"][0]
    assert "Listed" not in answer.body.decode()


@pytest.mark.parametrize(
    "edits",
    [None, [], [{"type": "compaction"}], [{"type": "compaction", "compact_threshold": 5_000}], [{"type": "other"}]],
)
async def test_short_conversation_is_answered_at_once(edits: list[Any] | None) -> None:
    async with serving(SummarizingDispatcher(), result_key=KEY) as gateway:
        answer = (await gateway.request("POST", PATH, body(context_management=edits))).of(200)
        assert len(gateway.dispatcher.calls) == 1
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert ("warnings" in answer) == (edits == [{"type": "other"}])


async def test_long_tools_alone_are_no_reason_to_compact() -> None:
    tool = TOOL | {"description": "x" * 8_000}
    async with serving(SummarizingDispatcher(), result_key=KEY) as gateway:
        answer = (await gateway.request("POST", PATH, body(tools=[tool], input=TURNS))).of(200)
    assert [item["type"] for item in answer["output"]] == ["message"]


@pytest.mark.parametrize("context_tokens", [0, 900])
async def test_conversation_beyond_the_context_is_summarized_in_parts(context_tokens: int) -> None:
    dispatcher = SummarizingDispatcher(context=900)
    fleet = FixedFleet.of(model("tiny", context_tokens=context_tokens))
    async with serving(dispatcher, fleet=fleet, result_key=KEY) as gateway:
        answer = (await gateway.request("POST", PATH, body(context_management=[{"type": "compaction"}]))).of(200)
        refused = await gateway.request("POST", PATH, body(context_management=None))
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert [item["type"] for item in answer["output"]] == ["compaction", "message"]
    summaries = [chat for chat in dispatcher.payloads if "summary that replaces it" in texts_of(chat)[-1][1]]
    final = dispatcher.payloads[-2]
    assert 1 < len(summaries) <= 8
    said = "".join(text for chat in summaries for _, text in texts_of(chat)[:-1])
    assert said.count("print(1)") > 490
    assert "Listed: a.py." in texts_of(summaries[1])[-1][1]
    assert "And what is in a.py?" in texts_of(final)[-1][1]
    assert len(texts_of(final)) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_summary_on_request_is_made_in_parts_if_the_conversation_does_not_fit(stream: bool) -> None:
    fleet = FixedFleet.of(model("tiny", context_tokens=900))
    async with serving(SummarizingDispatcher(context=900), fleet=fleet, result_key=KEY) as gateway:
        request = body(context_management=None, input=[*LONG, {"type": "compaction_trigger"}], stream=stream)
        answer = await gateway.request("POST", PATH, request)
        made = events_in(answer.body)[-1]["response"] if stream else answer.of(200)
        (item,) = made["output"]
        count = len(gateway.dispatcher.calls) - 1
        assert (item["type"], made["status"], made["usage"]["total_tokens"]) == ("compaction", "completed", count * 10)
        await gateway.request("POST", PATH, body(input=[item, {"role": "user", "content": "And now?"}]))
    assert texts_of(gateway.dispatcher.payloads[-1])[0][1].count("Listed: a.py.") == 1
    assert count > 1


async def test_conversation_that_cannot_be_compacted_fails_as_too_long() -> None:
    edits = [{"type": "compaction"}]
    async with serving(SummarizingDispatcher(context=900), result_key=KEY) as gateway:
        tool = TOOL | {"description": "x" * 8_000}
        answer = await gateway.request("POST", PATH, body(context_management=edits, tools=[tool]))
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        gateway.dispatcher.summary_steps = [[started()], [delta(finish="STOP"), finished()]]  # type: ignore[attr-defined]
        answer = await gateway.request("POST", PATH, body(context_management=edits))
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_conversation_whose_summary_fails_is_answered_as_it_is_with_a_warning() -> None:
    failures: list[list[Any]] = [
        [[started()], [delta(finish="STOP"), usage(), finished()]],
        [WeftError(Reason.QUEUE_TIMEOUT, "the queue is full")],
    ]
    for steps in failures:
        async with serving(SummarizingDispatcher(summary_steps=steps), result_key=KEY) as gateway:
            answer = (await gateway.request("POST", PATH, body())).of(200)
        assert [item["type"] for item in answer["output"]] == ["message"]
        assert [warning["field"] for warning in answer["warnings"]] == ["context_management"]


async def test_error_after_the_first_content_is_not_compacted_away() -> None:
    late = [*hello()[:2], WeftError(Reason.CONTEXT_LENGTH_EXCEEDED, "the context is full")]
    async with serving(SummarizingDispatcher(steps=late), result_key=KEY) as gateway:
        answer = await gateway.request("POST", PATH, body(context_management=[{"type": "compaction"}], stream=True))
        assert len(gateway.dispatcher.calls) == 1
    assert events_in(answer.body)[-1]["code"] == "context_length_exceeded"


async def test_background_keyed_and_task_responses_say_that_they_are_not_compacted() -> None:
    task = {"endpoint": "/v1/responses", "body": body()}
    tasks = ScriptedTasks(at_once=hello_pieces())
    async with serving(result_key=KEY, responses=MemoryResponses(), tasks=tasks) as gateway:
        in_background = await made_whole(gateway, **body())
        keyed = await gateway.request("POST", PATH, body(durable="wait"), {"Idempotency-Key": "k"})
        of_task = (await gateway.request("POST", "/api/v1/inference-tasks", task)).json
        (result,) = [(await gateway.read(f"/api/v1/inference-tasks/{of_task['id']}"))["result"]]
    for answer in (in_background, keyed.of(200), result):
        assert [item["type"] for item in answer["output"]] == ["message"]
        assert [warning["field"].partition("[")[0] for warning in answer["warnings"]] == ["context_management"]


@pytest.mark.parametrize(
    ("edits", "at"),
    [
        ({"type": "compaction"}, "context_management"),
        ([{"type": "compaction", "compact_threshold": 0}], "context_management[0].compact_threshold"),
        ([{"compact_threshold": 9}], "context_management[0].type"),
        ([{"type": "compaction"}] * 17, "context_management"),
    ],
)
async def test_malformed_context_management_is_refused_by_its_field(edits: Any, at: str) -> None:
    async with serving(result_key=KEY) as gateway:
        answer = await gateway.request("POST", PATH, body(context_management=edits))
    assert answer.refusal == (400, "invalid_argument", at)
