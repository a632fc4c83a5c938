"""Tools that a model learns of once the client's search has found them."""

import json
from typing import Any

import pytest

from gateway.anthropic.messages import to_payload
from gateway.anthropic.schema import MessagesRequest
from gateway.gateway_config import MediaConfig, RequestLimits
from gateway.intake.json_guard import parse
from gateway.media import RequestMedia

SEARCH: dict[str, Any] = {"name": "ToolSearch"}
DEFERRED: list[dict[str, Any]] = [{"name": name, "defer_loading": True} for name in ("WebFetch", "WebSearch", "Write")]


def names(tools: list[dict[str, Any]], *found: str, **fields: Any) -> list[str]:
    """The offered tools, after results that refer to tools."""
    references = [{"type": "tool_reference", "tool_name": name} for name in found]
    use = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": references}]},
    ]
    given = [tool if "type" in tool else tool | {"input_schema": {"type": "object"}} for tool in tools]
    body = {"model": "m", "max_tokens": 9, "messages": messages, "tools": given, **fields}
    request = parse(MessagesRequest, json.dumps(body).encode(), max_depth=64)
    made = to_payload(request, RequestLimits(), RequestMedia(MediaConfig()))
    assert not [warning for warning in made.warnings if "defer" in warning.field]
    return [tool.function.name for tool in made.payload.tools]


def test_deferred_tools_are_hidden_until_a_result_refers_to_them() -> None:
    tools = [DEFERRED[0], SEARCH, *DEFERRED[1:], {"name": "Read"}]
    assert names(tools) == ["ToolSearch", "Read"]
    assert names(tools, "WebSearch") == ["ToolSearch", "Read", "WebSearch"]


def test_found_tools_stand_behind_the_others_in_the_order_they_were_found() -> None:
    assert names([*DEFERRED, SEARCH], "Write", "WebFetch", "Write", "Lost") == ["ToolSearch", "Write", "WebFetch"]


def test_tool_that_must_be_called_is_offered() -> None:
    choice = {"type": "tool", "name": "Write"}
    assert names([SEARCH, *DEFERRED], tool_choice=choice) == ["ToolSearch", "Write"]


@pytest.mark.parametrize("other", [[], [{"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}]])
def test_nothing_is_deferred_if_no_search_of_the_client_could_find_it(other: list[dict[str, Any]]) -> None:
    assert names([*other, *DEFERRED]) == ["WebFetch", "WebSearch", "Write"]
    assert names([SEARCH | {"defer_loading": False}, {"name": "Write", "defer_loading": None}]) == [
        "ToolSearch",
        "Write",
    ]
