"""Messages whose requests edit or compact their conversation, complete and streamed."""

from typing import Any

import pytest
from gateway_script import RunningGateway, delta, finished, serving, started, usage
from messages_script import MESSAGES_PATH, CountingDispatcher, anthropic_of, claude_code_request, events_of, names_of
from test_compaction_http import texts_of
from test_long_conversations import SummarizingDispatcher

from weft.api.common.v1 import tokenize_pb2
from weft.dispatch.call import Call
from weft.kernel.requests.request_values import Operation

LONG = "print(1) " * 300
CLEARED = "[This old tool result was cleared to save context.]"


def turns(count: int = 5) -> list[dict[str, Any]]:
    """A task with calls of a tool, each with a long result."""
    said: list[dict[str, Any]] = [{"role": "user", "content": "Read the files"}]
    for index in range(count):
        use = {"type": "tool_use", "id": f"t{index}", "name": "Read", "input": {"path": f"{index}.py"}}
        thought = {"type": "thinking", "thinking": f"look {index}", "signature": ""}
        said.append({"role": "assistant", "content": [thought, use]})
        said.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{index}", "content": LONG}]})
    return said


def body(*edits: dict[str, Any], **fields: Any) -> dict[str, Any]:
    tool = {"name": "Read", "input_schema": {"type": "object"}}
    given = {"model": "tiny", "max_tokens": 50, "system": "Be terse.", "messages": turns(), "tools": [tool]}
    return given | ({"context_management": {"edits": list(edits)}} if edits else {}) | fields


def clearing(trigger: int = 1_000) -> dict[str, Any]:
    return {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": trigger}}


def compacting(trigger: int = 1_000, **fields: Any) -> dict[str, Any]:
    return {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": trigger}, **fields}


async def answer_of(gateway: RunningGateway, request: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """The message, from a stream by its events."""
    answer = await gateway.request("POST", MESSAGES_PATH, request | {"stream": stream})
    if not stream:
        complete: dict[str, Any] = answer.of(200)
        return complete
    assert answer.status == 200
    message: dict[str, Any] = {}
    for name, event in events_of(answer):
        match name:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, piece = message["content"][event["index"]], event["delta"]
                member = {"text_delta": "text", "thinking_delta": "thinking"}.get(piece["type"])
                if piece["type"] == "compaction_delta":
                    block["content"] = piece["content"]
                elif member is not None:
                    block[member] += piece[member]
            case "message_delta":
                message |= event["delta"] | {key: event[key] for key in event.keys() - {"type", "delta"}}
    return message


@pytest.mark.parametrize("stream", [False, True])
async def test_edits_change_what_the_model_reads_and_the_answer_lists_them(stream: bool) -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}, clearing()]
    async with serving() as gateway:
        answer = await answer_of(gateway, body(*edits), stream=stream)
        (chat,) = gateway.dispatcher.payloads
    results = [text for role, text in texts_of(chat) if role == "TOOL"]
    assert results == [CLEARED, CLEARED, LONG, LONG, LONG]
    (applied,) = answer["context_management"]["applied_edits"]
    assert (applied["type"], applied["cleared_tool_uses"]) == ("clear_tool_uses_20250919", 2)
    assert 1_200 < applied["cleared_input_tokens"] < 1_400
    assert (answer["stop_reason"], answer["usage"]["input_tokens"]) == ("end_turn", 2)
    assert "warnings" not in answer


@pytest.mark.parametrize("stream", [False, True])
async def test_request_of_claude_code_is_unchanged_and_says_that_nothing_was_edited(stream: bool) -> None:
    request = claude_code_request() | {"stream": stream}
    plain = {name: value for name, value in request.items() if name != "context_management"}
    async with serving() as gateway:
        answer = await answer_of(gateway, request, stream=stream)
        without = await answer_of(gateway, plain, stream=stream)
        first, second = gateway.dispatcher.payloads
    assert first == second
    assert answer["context_management"] == {"applied_edits": []}
    assert "context_management" not in without


@pytest.mark.parametrize("stream", [False, True])
async def test_long_conversation_begins_its_answer_with_a_summary(stream: bool) -> None:
    async with serving(SummarizingDispatcher()) as gateway:
        answer = await answer_of(gateway, body(compacting(instructions="Keep paths.")), stream=stream)
        asked, final = gateway.dispatcher.payloads
        block, said = answer["content"]
        assert (block["type"], said["text"]) == ("compaction", "Hello, world")
        assert texts_of(final) == [("SYSTEM", "Be terse."), ("USER", block["content"])]
        assert "Listed: a.py." in block["content"]
        assert "Read the files" in block["content"]
        assert "Keep paths." in texts_of(asked)[-1][1]
        assert (answer["stop_reason"], answer["context_management"]) == ("end_turn", {"applied_edits": []})
        assert [each["type"] for each in answer["usage"]["iterations"]] == ["compaction", "message"]
        assert answer["usage"]["output_tokens"] == 3
        # The client sends everything back; what precedes the block is ignored, and the prompt begins as before.
        said_back = {"role": "assistant", "content": answer["content"]}
        later = [*turns(), said_back, {"role": "user", "content": "Thanks"}]
        await answer_of(gateway, body(compacting(), messages=later), stream=stream)
    third = gateway.dispatcher.payloads[2]
    assert list(third.messages[:2]) == list(final.messages)
    assert texts_of(third)[2:] == [("ASSISTANT", "Hello, world"), ("USER", "Thanks")]


@pytest.mark.parametrize("stream", [False, True])
async def test_paused_compaction_ends_after_the_summary(stream: bool) -> None:
    async with serving(SummarizingDispatcher()) as gateway:
        answer = await answer_of(gateway, body(compacting(pause_after_compaction=True)), stream=stream)
        assert len(gateway.dispatcher.calls) == 1
        short = await answer_of(gateway, body(compacting(10**6, pause_after_compaction=True)), stream=stream)
    assert [block["type"] for block in answer["content"]] == ["compaction"]
    assert answer["stop_reason"] == "compaction"
    assert [each["type"] for each in answer["usage"]["iterations"]] == ["compaction"]
    assert (short["stop_reason"], [block["type"] for block in short["content"]]) == ("end_turn", ["text"])


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_compaction_is_an_empty_block_that_changes_nothing(stream: bool) -> None:
    steps = [[started()], [delta(finish="STOP"), usage(), finished()]]
    async with serving(SummarizingDispatcher(summary_steps=steps)) as gateway:
        answer = await answer_of(gateway, body(compacting()), stream=stream)
        assert answer["content"][0] == {"type": "compaction", "content": None}
        assert answer["content"][1]["text"] == "Hello, world"
        said_back = {"role": "assistant", "content": answer["content"]}
        later = [*turns(), said_back, {"role": "user", "content": "Thanks"}]
        await answer_of(gateway, body(messages=later), stream=stream)
    _, uncompacted, third = gateway.dispatcher.payloads
    assert list(third.messages[: len(uncompacted.messages)]) == list(uncompacted.messages)


async def test_conversation_beyond_the_context_is_compacted_where_the_request_allows_it() -> None:
    async with serving(SummarizingDispatcher(context=2_000)) as gateway:
        refused = await gateway.request("POST", MESSAGES_PATH, body(clearing(10**6)))
        answer = await answer_of(gateway, body(compacting(10**6)), stream=False)
    assert refused.status == 400
    assert [block["type"] for block in answer["content"]] == ["compaction", "text"]


@pytest.mark.parametrize("stream", [False, True])
async def test_summary_on_request_is_the_only_block_and_then_stands_first(stream: bool) -> None:
    async with serving(SummarizingDispatcher()) as gateway:
        answer = await answer_of(gateway, body(compaction={"type": "summarize"}), stream=stream)
        (block,) = answer["content"]
        assert (block["type"], answer["stop_reason"]) == ("compaction", "compaction")
        assert block["content"].endswith("\n\nListed: a.py.")
        (context,) = gateway.dispatcher.contexts
        assert context.compaction is not None
        then = [{"role": "assistant", "content": [block]}, {"role": "user", "content": "And now?"}]
        await answer_of(gateway, body(messages=then), stream=stream)
        said = texts_of(gateway.dispatcher.payloads[1])
        assert [role for role, _ in said] == ["SYSTEM", "USER"]
        assert said[1][1] == block["content"] + "And now?"
        own = {"type": "summarize", "instructions": "List the paths in a summary that replaces it."}
        await answer_of(gateway, body(compaction=own), stream=stream)
        assert texts_of(gateway.dispatcher.payloads[2])[-1] == ("USER", own["instructions"])


@pytest.mark.parametrize("stream", [False, True])
async def test_summary_of_a_conversation_beyond_the_context_is_made_in_parts(stream: bool) -> None:
    async with serving(SummarizingDispatcher(context=2_000)) as gateway:
        answer = await answer_of(gateway, body(compaction={"type": "summarize"}), stream=stream)
        assert len(gateway.dispatcher.calls) > 2
    assert [block["type"] for block in answer["content"]] == ["compaction"]
    assert (answer["stop_reason"], answer["content"][0]["content"].count("Listed")) == ("compaction", 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_summary_without_words_is_an_error(stream: bool) -> None:
    steps = [[started()], [delta(reasoning="hm")], [delta(finish="STOP"), usage(), finished()]]
    async with serving(SummarizingDispatcher(summary_steps=steps)) as gateway:
        request = body(compaction={"type": "summarize"}, stream=stream)
        answer = await gateway.request("POST", MESSAGES_PATH, request)
    if stream:
        assert names_of(events_of(answer))[-1] == "error"
    else:
        assert (answer.status, answer.error["code"]) == (502, "backend_protocol_error")


async def test_streamed_compaction_is_understood_by_the_sdk() -> None:
    async with serving(SummarizingDispatcher()) as gateway, anthropic_of(gateway) as client:
        request = body(compacting())
        async with client.beta.messages.stream(**request) as stream:
            message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["compaction", "text"]
    assert message.context_management is not None


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        ({"compaction": {"type": "summarize"}, "context_management": {"edits": []}}, "compaction"),
        ({"compaction": {"type": "other"}}, "compaction.type"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "trigger": 5}]}}, "trigger"),
        ({"messages": [{"role": "assistant", "content": [{"type": "compaction", "content": ""}]}]}, "content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "compaction", "content": 5}]}]}, "content"),
    ],
)
async def test_wrong_request_is_refused_by_its_field(fields: dict[str, Any], at: str) -> None:
    async with serving() as gateway:
        answer = await gateway.request("POST", MESSAGES_PATH, body(**fields))
        assert gateway.dispatcher.calls == []
    assert (answer.status, at in answer.error["param"]) == (400, True)


async def test_unknown_edit_is_left_out_with_a_warning() -> None:
    async with serving() as gateway:
        answer = await answer_of(gateway, body({"type": "of_next_year_20270101"}), stream=False)
    assert [warning["field"] for warning in answer["warnings"]] == ["context_management.edits[0]"]


class LengthDispatcher(CountingDispatcher):
    """Counts the characters of a prompt."""

    def script_of(self, call: Call[Any]) -> list[Any]:
        assert call.spec.operation is Operation.TOKENIZE
        return [tokenize_pb2.TokenizeResult(count=sum(len(text) for _, text in texts_of(call.payload.chat)))]


async def test_tokens_are_counted_after_edits_and_before() -> None:
    path = f"{MESSAGES_PATH}/count_tokens"
    async with serving(LengthDispatcher()) as gateway:
        plain = (await gateway.request("POST", path, body())).of(200)
        counted = (await gateway.request("POST", path, body(clearing()))).of(200)
        unedited = (await gateway.request("POST", path, body(clearing(10**6)))).of(200)
        ignored = (await gateway.request("POST", path, body(compaction={"type": "summarize"}))).of(200)
    tokens = plain["input_tokens"]
    assert counted["context_management"] == {"original_input_tokens": tokens}
    assert counted["input_tokens"] == tokens - 2 * (len(LONG) - len(CLEARED))
    assert (unedited["input_tokens"], unedited["context_management"]) == (tokens, {"original_input_tokens": tokens})
    assert (ignored, "context_management" in plain) == (plain, False)
