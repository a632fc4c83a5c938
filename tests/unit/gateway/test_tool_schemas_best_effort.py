"""Schemas and names of tools, which servers of others wrote: one of them must not refuse a request."""

import pytest

from gateway.gateway_config import RequestLimits
from gateway.openai.chat import to_chat
from gateway.openai.chat_schema import ChatRequest


def _request(schema: object, name: str = "look") -> ChatRequest:
    tools = [
        {"type": "function", "function": {"name": "first", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": name, "parameters": {"properties": {"a": schema, "b": {}}}}},
    ]
    return ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools}, strict=True
    )


def test_unsafe_part_of_a_tool_schema_is_dropped_with_a_warning() -> None:
    payload, warnings = to_chat(_request({"$ref": "https://example.com/s.json"}), RequestLimits())
    assert [tool.function.name for tool in payload.tools] == ["first", "look"]
    (warning,) = warnings
    assert warning.field == "tools[1].function.parameters.properties.a.$ref"
    assert "left out" in warning.message


@pytest.mark.parametrize("name", ["files.read", "files/read", "server:files/read", "x" * 128])
def test_tool_name_may_be_any_mcp_server_name(name: str) -> None:
    payload, warnings = to_chat(_request({}, name=name), RequestLimits())
    assert payload.tools[1].function.name == name
    assert not warnings
