"""Requests for a web search and other tools of servers, over HTTP: the tool fails, and no model answers."""

import json
from typing import Any

import pytest
from gateway_script import FixedFleet, ScriptedDispatcher, model, serving
from messages_script import anthropic_of
from openai.types.responses import Response
from response_script import MemoryResponses
from task_script import ScriptedTasks

# As Claude Code sends it to search.
ASKED = [{"role": "user", "content": [{"type": "text", "text": "Perform a web search for the query: weft mesh"}]}]
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
FETCH = {"type": "web_fetch_20250910", "name": "web_fetch"}
CODE = {"type": "code_execution_20250825", "name": "code_execution"}
TOOLS = {"type": "mcp_toolset", "mcp_server_name": "x"}


async def message_of(tool: dict[str, Any], *, stream: bool) -> Any:
    dispatcher = ScriptedDispatcher()
    async with serving(dispatcher) as gateway, anthropic_of(gateway) as client:
        wanted: Any = {"model": "tiny", "max_tokens": 50, "messages": ASKED, "tools": [tool]}
        if stream:
            async with client.messages.stream(**wanted) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**wanted)
    assert dispatcher.payloads == []
    return json.loads(answer.model_dump_json(exclude_none=True))


@pytest.mark.parametrize("stream", [False, True])
async def test_search_alone_in_a_message_is_unavailable(stream: bool) -> None:
    answer = await message_of(SEARCH, stream=stream)
    use, result = answer["content"]
    assert (use["type"], use["name"]) == ("server_tool_use", "web_search")
    assert use["input"] == {"query": "Perform a web search for the query: weft mesh"}
    assert result == {
        "type": "web_search_tool_result",
        "tool_use_id": use["id"],
        "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"},
    }
    assert answer["stop_reason"] == "end_turn"
    assert answer["usage"]["server_tool_use"] == {"web_search_requests": 0, "web_fetch_requests": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tool", "kind"), [(FETCH, "web_fetch"), (CODE, "code_execution")])
async def test_other_server_tools_alone_in_a_message_are_unavailable(
    tool: dict[str, Any], kind: str, stream: bool
) -> None:
    use, result = (await message_of(tool, stream=stream))["content"]
    assert (use["name"], use["input"]) == (kind, {})
    assert result["type"] == f"{kind}_tool_result"
    assert result["content"] == {"type": f"{kind}_tool_result_error", "error_code": "unavailable"}


@pytest.mark.parametrize("stream", [False, True])
async def test_server_tool_without_a_call_block_is_refused_in_words(stream: bool) -> None:
    answer = await message_of(TOOLS, stream=stream)
    (block,) = answer["content"]
    assert (block["type"], answer["stop_reason"]) == ("text", "refusal")
    assert "mcp_toolset" in block["text"]


async def test_failed_call_returns_in_the_history_as_text() -> None:
    answer = await message_of(SEARCH, stream=False)
    dispatcher = ScriptedDispatcher()
    async with serving(dispatcher) as gateway, anthropic_of(gateway) as client:
        history: Any = [*ASKED, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "So?"}]
        await client.messages.create(model="tiny", max_tokens=50, messages=history)
    said = dispatcher.payloads[0].messages[1].content
    assert [part.text for part in said] == [
        '[web_search was called with {"query":"Perform a web search for the query: weft mesh"}]',
        "unavailable",
    ]


async def test_unknown_model_is_not_found_although_the_tool_fails() -> None:
    async with serving(fleet=FixedFleet.of(model("tiny"))) as gateway:
        body = {"model": "nope", "max_tokens": 9, "messages": ASKED, "tools": [SEARCH]}
        answer = await gateway.request("POST", "/v1/messages", json.dumps(body).encode())
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def response_of(**fields: object) -> Any:
    dispatcher = ScriptedDispatcher()
    async with serving(dispatcher, responses=MemoryResponses()) as gateway:
        body = {"model": "tiny", "input": "News of today?", **fields}
        answer = await gateway.request("POST", "/v1/responses", json.dumps(body).encode())
        assert dispatcher.payloads == []
        if not fields.get("stream"):
            kept = await gateway.request("GET", f"/v1/responses/{answer.json['id']}")
            assert kept.json["output"] == answer.json["output"]
            return answer.json
    events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == items
    return events[-1]["response"]


@pytest.mark.parametrize("stream", [False, True])
async def test_search_alone_in_a_response_is_a_failed_call_and_a_refusal(stream: bool) -> None:
    answer = await response_of(tools=[{"type": "web_search"}], stream=stream)
    Response.model_validate(answer)
    call, message = answer["output"]
    assert (call["type"], call["status"], call["id"][:3]) == ("web_search_call", "failed", "ws_")
    assert call["action"] == {"type": "search", "query": "News of today?", "queries": ["News of today?"]}
    (part,) = message["content"]
    assert (part["type"], answer["status"]) == ("refusal", "completed")
    assert "web_search" in part["refusal"]


@pytest.mark.parametrize(
    ("tool", "kind"),
    [
        ({"type": "file_search", "vector_store_ids": ["v"]}, "file_search_call"),
        ({"type": "code_interpreter", "container": {"type": "auto"}}, "code_interpreter_call"),
        ({"type": "image_generation"}, "image_generation_call"),
        ({"type": "mcp", "server_label": "files", "server_url": "https://x"}, "mcp_list_tools"),
    ],
)
async def test_other_hosted_tools_alone_in_a_response_fail(tool: dict[str, Any], kind: str) -> None:
    answer = await response_of(tools=[tool])
    Response.model_validate(answer)
    assert [item["type"] for item in answer["output"]] == [kind, "message"]


async def test_tool_that_fails_is_no_background_response_and_no_task() -> None:
    async with serving(tasks=ScriptedTasks(), responses=MemoryResponses()) as gateway:
        body: dict[str, Any] = {"model": "tiny", "input": "Hi", "tools": [{"type": "web_search"}]}
        answer = await gateway.request("POST", "/v1/responses", json.dumps(body | {"background": True}).encode())
        assert (answer.status, answer.error["param"]) == (400, "tools[0]")
        task = json.dumps({"endpoint": "/v1/responses", "body": body}).encode()
        answer = await gateway.request("POST", "/api/v1/inference-tasks", task)
        assert (answer.status, answer.error["param"]) == (400, "body.tools[0]")
