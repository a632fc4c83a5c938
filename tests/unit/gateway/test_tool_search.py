"""The client's search for tools in the Responses API: what is hidden, found, called and sent back."""

import json
from typing import Any

import pytest

from gateway.gateway_config import MediaConfig, RequestLimits
from gateway.intake.json_guard import parse
from gateway.media import RequestMedia
from gateway.responses.payload import Conversation, own_items, to_response_request
from gateway.responses.schema import ResponsesRequest
from gateway.responses.tool_search import with_known_tools

SCHEMA = {"type": "object", "properties": {}}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools", "parameters": SCHEMA}
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CALL = {"type": "tool_search_call", "call_id": "s1", "execution": "client", "arguments": {"query": "files"}}


def function(name: str | None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA, **fields}


def space(name: str, *names: str, **fields: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": [function(each, **fields) for each in names]}


def output(*tools: Any) -> dict[str, Any]:
    return {"type": "tool_search_output", "call_id": "s1", "execution": "client", "tools": list(tools)}


def made(tools: list[dict[str, Any]], *found: Any, calls: bool = True) -> Any:
    items = [USER, *([CALL, output(*found)] if calls else []), USER]
    body = {"model": "m", "input": items, "tools": tools}
    request = parse(ResponsesRequest, json.dumps(body).encode(), max_depth=64)
    known = with_known_tools(request, own_items(request))
    conversation = Conversation(own_items(known))
    return to_response_request(known, conversation, RequestMedia(MediaConfig()), RequestLimits())


def names(tools: list[dict[str, Any]], *found: Any) -> list[str]:
    return [tool.function.name for tool in made(tools, *found).payload.tools]


def test_search_is_offered_as_a_function_and_deferred_tools_are_hidden() -> None:
    tools = [function("ls"), function("late", defer_loading=True), space("mcp", "a", defer_loading=True), SEARCH]
    asked = made(tools, calls=False)
    assert [tool.function.name for tool in asked.payload.tools] == ["ls", "tool_search"]
    assert asked.payload.tools[1].function.description == "Finds tools"
    assert asked.warnings == []


def test_found_tools_join_behind_the_others_once() -> None:
    tools = [SEARCH, function("late", defer_loading=True), function("ls")]
    found = [space("mcp__files", "read", "write"), function("late"), function("ls"), space("mcp__files", "read")]
    assert names(tools, *found) == ["tool_search", "ls", "mcp__files__read", "mcp__files__write", "late"]


@pytest.mark.parametrize(
    "bad", [None, 5, {}, {"type": 5}, {"type": "web_search"}, function(None), function("a b"), function("x" * 200)]
)
def test_malformed_found_tools_do_not_fail_the_conversation(bad: Any) -> None:
    assert names([SEARCH], bad, function("good")) == ["tool_search", "good"]


def test_search_and_its_result_are_a_call_and_the_names_found_without_warnings() -> None:
    asked = made([SEARCH], space("mcp", "read"), function("late"))
    _, called, result, _ = asked.payload.messages
    assert [(call.name, call.arguments_text) for call in called.tool_calls] == [("tool_search", '{"query":"files"}')]
    assert result.content[0].text == "Found tools: mcp read, late"
    assert made([SEARCH]).payload.messages[2].content[0].text == "No tools were found."
    assert asked.warnings == []


@pytest.mark.parametrize("search", [{"type": "tool_search", "execution": "server"}, {"type": "tool_search"}])
def test_nothing_is_hidden_if_a_server_would_have_to_search(search: dict[str, Any]) -> None:
    asked = made([function("late", defer_loading=True), search], calls=False)
    assert [tool.function.name for tool in asked.payload.tools] == ["late"]
    assert [warning.field for warning in asked.warnings] == ["tools[1]"]


def test_function_with_the_name_of_the_search_takes_its_place() -> None:
    asked = made([SEARCH, function("tool_search")], calls=False)
    assert len(asked.payload.tools) == 1
