"""Server tools, such as a web search: when a request is answered with their failure instead of by the model."""

import json
from typing import Any

import pytest

from gateway.anthropic.messages import to_payload
from gateway.anthropic.schema import MessagesRequest
from gateway.gateway_config import MediaConfig, RequestLimits
from gateway.intake.json_guard import parse
from gateway.media import RequestMedia
from gateway.openai.chat import to_chat
from gateway.openai.chat_schema import ChatRequest
from gateway.responses.payload import Conversation, own_items, to_response_request
from gateway.responses.schema import ResponsesRequest
from runner_svc.policy.parameters import EngineParameters, ParameterProfile, admit
from weft.kernel.errors.error_tree import FieldError, WeftError

SEARCH = {"type": "web_search_20260318", "name": "web_search"}
FETCH = {"type": "web_fetch_20250910", "name": "web_fetch"}
BASH = {"type": "bash_20250124", "name": "bash"}
WEATHER = {"name": "weather", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
HOSTED = {"type": "web_search_2025_08_26"}
FORCED = {"type": "tool", "name": "web_search"}
FILES = {"type": "file_search", "vector_store_ids": ["v"]}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
LIMITS = RequestLimits()


def failing_message(tools: list[Any], choice: object) -> str:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    if choice is not None:
        body["tool_choice"] = choice
    made = to_payload(
        parse(MessagesRequest, json.dumps(body).encode(), max_depth=64), LIMITS, RequestMedia(MediaConfig())
    )
    assert {tool.function.name for tool in made.payload.tools} <= {
        tool["name"] for tool in tools if "input_schema" in tool
    }
    return "" if made.failing is None else made.failing.name


@pytest.mark.parametrize(
    ("tools", "choice", "name"),
    [
        ([SEARCH], None, "web_search"),
        ([SEARCH], {"type": "auto"}, "web_search"),
        ([SEARCH], {"type": "any"}, "web_search"),
        ([SEARCH], FORCED, "web_search"),
        ([WEATHER, SEARCH], FORCED, "web_search"),
        ([FETCH, SEARCH], {"type": "auto"}, "web_fetch"),
        ([BASH, SEARCH], {"type": "auto"}, "web_search"),
        ([{"type": "unheard_of_20270101"}], None, "unheard_of_20270101"),
        ([{"type": "mcp_toolset", "mcp_server_name": "x"}], None, "mcp_toolset"),
        ([SEARCH], {"type": "none"}, ""),
        ([WEATHER, SEARCH], {"type": "auto"}, ""),
        ([WEATHER, SEARCH], {"type": "any"}, ""),
        ([WEATHER | {"name": "web_search"}, SEARCH], FORCED, ""),
        ([BASH], None, ""),
        ([], None, ""),
    ],
)  # fmt: skip
def test_message_fails_as_a_server_tool_that_is_forced_or_alone(tools: list[Any], choice: object, name: str) -> None:
    assert failing_message(tools, choice) == name


def failing_response(tools: list[Any], choice: object) -> str:
    body = {"model": "m", "input": "Hi", "tools": tools} | ({} if choice is None else {"tool_choice": choice})
    asked = parse(ResponsesRequest, json.dumps(body).encode(), max_depth=64)
    made = to_response_request(asked, Conversation(own_items(asked)), RequestMedia(MediaConfig()), LIMITS)
    return "" if made.failing is None else made.failing.type


@pytest.mark.parametrize(
    ("tools", "choice", "kind"),
    [
        ([HOSTED], None, HOSTED["type"]),
        ([HOSTED], "required", HOSTED["type"]),
        ([FUNCTION, HOSTED], {"type": "web_search_preview"}, HOSTED["type"]),
        ([FUNCTION, FILES, HOSTED], {"type": "web_search"}, HOSTED["type"]),
        ([FUNCTION, HOSTED], ALLOWED, HOSTED["type"]),
        ([FILES], "auto", "file_search"),
        ([HOSTED], "none", ""),
        # Codex sends it so with every request.
        ([FUNCTION, {"type": "web_search", "external_web_access": False}], "auto", ""),
        ([FUNCTION, HOSTED], "required", ""),
        ([FUNCTION, HOSTED], {"type": "function", "name": "f"}, ""),
        ([{"type": "custom", "name": "apply_patch"}, {"type": "local_shell"}], "auto", ""),
        ([{"type": "tool_search", "execution": "client"}], None, ""),
    ],
)  # fmt: skip
def test_response_fails_as_a_hosted_tool_that_is_forced_or_alone(tools: list[Any], choice: object, kind: str) -> None:
    assert failing_response(tools, choice) == kind


def test_chat_with_no_tool_but_a_servers_is_refused() -> None:
    def asked(**fields: object) -> ChatRequest:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
        return parse(ChatRequest, json.dumps(body).encode(), max_depth=64)

    with pytest.raises(FieldError, match="cannot run the tool") as caught:
        to_chat(asked(tools=[{"type": "custom"}, {"type": "web_search"}]), LIMITS)
    assert caught.value.field == "tools[1].type"
    function = {"type": "function", "function": {"name": "f"}}
    to_chat(asked(tools=[function, {"type": "web_search"}]), LIMITS)
    to_chat(asked(tools=[{"type": "web_search"}], tool_choice="none"), LIMITS)


def test_engine_without_a_search_refuses_search_options_instead_of_answering_from_memory() -> None:
    profile = ParameterProfile(engine=EngineParameters(engine="an engine"))
    with pytest.raises(WeftError, match="cannot search the web"):
        admit({"web_search_options": {}}, profile)
    assert admit({"enable_search": False}, profile).send == {}
    assert admit({"web_search_options": {}}, ParameterProfile(engine=profile.engine, passthrough=True)).send


@pytest.mark.parametrize(
    ("name", "value", "is_warned"),
    [
        ("speed", "fast", True),
        ("speed", "standard", False),
    ],
)  # fmt: skip
def test_speed_that_messages_ask_for_in_vain_is_warned_about(name: str, value: object, is_warned: bool) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], name: value}
    made = to_payload(
        parse(MessagesRequest, json.dumps(body).encode(), max_depth=64), LIMITS, RequestMedia(MediaConfig())
    )
    assert [warning.field for warning in made.warnings] == [name] * is_warned
