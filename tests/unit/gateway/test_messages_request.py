import base64
import json
from typing import Any

import pytest

from gateway.anthropic.messages import TOOL_FAILED, to_payload
from gateway.anthropic.schema import MessagesRequest
from gateway.gateway_config import MediaConfig, RequestLimits
from gateway.intake.json_guard import parse
from gateway.media import RequestMedia
from gateway.openai.chat_builder import ChatTranslation
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_objects import plain_object

PNG = base64.b64encode(
    base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
).decode()
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjQK"}}
USE = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}}
WEATHER = {"name": "weather", "input_schema": {"type": "object"}}
BASH = {"type": "bash_20250124", "name": "bash"}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


def translated(**fields: object) -> ChatTranslation:
    request = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]} | fields
    asked = parse(MessagesRequest, json.dumps(request).encode(), max_depth=64)
    media = RequestMedia(MediaConfig(allowed_hosts=("images.example.org",)), allow_remote=asked.allow_remote)
    return to_payload(asked, RequestLimits(max_stop=2, max_messages=20, max_tools=3), media)


def payload(**fields: object) -> chat_pb2.ChatPayload:
    return translated(**fields).payload


def turns(*messages: dict[str, Any], **fields: object) -> list[tuple[str, list[str]]]:
    found = payload(messages=list(messages), **fields)
    return [
        (
            chat_pb2.Role.Name(turn.role).removeprefix("ROLE_").lower(),
            [part.text or str(part.WhichOneof("kind")) for part in turn.content],
        )
        for turn in found.messages
    ]


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def test_a_limit_of_minus_one_token_is_none() -> None:
    """It was refused."""
    assert not payload(max_tokens=-1).sampling.HasField("max_tokens")
    assert payload(max_tokens=9).sampling.max_tokens == 9


def test_the_languages_of_a_translation_are_passed_on() -> None:
    """The engine asked for fields that this API did not have."""
    languages = {"source_lang_code": "de", "target_lang_code": "en"}
    assert plain_object(payload(**languages).extra_parameters) == languages


def test_text_is_a_string_or_blocks() -> None:
    assert turns({"role": "user", "content": "Hi"}) == [("user", ["Hi"])]
    assert turns(user(text("a"), text("b"))) == [("user", ["a", "b"])]


def test_system_prompt_is_the_first_turn_and_system_turns_keep_their_place() -> None:
    blocks = [text("one"), text("two"), text("")]
    assert turns(user(text("Hi")), {"role": "system", "content": "Now"}, user(text("Go")), system=blocks) == [
        ("system", ["one", "two"]),
        ("user", ["Hi"]),
        ("system", ["Now"]),
        ("user", ["Go"]),
    ]
    assert turns(user(text("Hi")), system="") == [("user", ["Hi"])]


def test_consecutive_turns_of_one_role_are_merged() -> None:
    assert turns(user(text("a")), user(text("b")), assistant(text("c")), assistant(text("d"))) == [
        ("user", ["a", "b"]),
        ("assistant", ["c", "d"]),
    ]


def test_tool_results_are_separate_turns_before_the_following_text() -> None:
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [text("4 degrees"), IMAGE]}
    found = payload(messages=[user(text("Weather?")), assistant(text("Let me see"), USE), user(result, text("So?"))])
    roles = [chat_pb2.Role.Name(turn.role) for turn in found.messages]
    assert roles == ["ROLE_USER", "ROLE_ASSISTANT", "ROLE_TOOL", "ROLE_USER"]
    call = found.messages[1].tool_calls[0]
    assert (call.id, call.name, json.loads(call.arguments_text)) == ("call_1", "weather", {"city": "Oslo"})
    assert found.messages[2].tool_call_id == "call_1"
    assert [part.WhichOneof("kind") for part in found.messages[2].content] == ["text", "image"]


@pytest.mark.parametrize("value", [10**30, -(2**63), 0.1, "\u00e9\u2028", [], {"b": 1, "a": None}])
def test_input_of_an_earlier_call_is_preserved(value: object) -> None:
    found = payload(messages=[assistant(USE | {"input": {"x": value}})])
    assert json.loads(found.messages[0].tool_calls[0].arguments_text) == {"x": value}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("no such city", [TOOL_FAILED + "no such city"]),
        (None, [TOOL_FAILED]),
        ([text("a"), text("b")], [TOOL_FAILED + "a", "b"]),
        ([IMAGE], [TOOL_FAILED, "image"]),
    ],
)
def test_failed_tool_is_reported_to_the_model(content: object, told: list[str]) -> None:
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": content, "is_error": True}
    assert turns(assistant(USE), user(result))[-1] == ("tool", told)


def test_result_without_content_is_empty() -> None:
    found = payload(messages=[assistant(USE), user({"type": "tool_result", "tool_use_id": "call_1"})])
    assert [part.text for part in found.messages[1].content] == [""]


def test_tool_reference_is_sent_to_the_model_by_name() -> None:
    reference = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [reference]}
    assert turns(assistant(USE), user(result))[-1] == ("tool", ["The tool weather is available."])


def test_client_chooses_how_thinking_is_shown() -> None:
    assert not payload(thinking={"type": "adaptive", "display": "updates"}).HasField("thinking")


def test_assistant_thinking_is_returned_to_the_model() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    found = payload(messages=[user(text("a")), assistant(thinking, text("b"), thinking)])
    assert found.messages[1].reasoning == "Hm.Hm."


def test_signed_and_redacted_thinking_is_kept_in_order_for_the_provider() -> None:
    signed = {"type": "thinking", "thinking": "Hm.", "signature": "s1"}
    found = payload(
        messages=[user(text("a")), assistant(signed, {"type": "redacted_thinking", "data": "xyz"}, text("b"))]
    )
    assert found.messages[1].reasoning == "Hm."
    assert list(found.messages[1].signed_reasoning) == [
        chat_pb2.SignedReasoning(text="Hm.", signature="s1"),
        chat_pb2.SignedReasoning(redacted="xyz"),
    ]


def test_redacted_thinking_is_omitted_with_a_warning() -> None:
    found = translated(messages=[user(text("a")), assistant({"type": "redacted_thinking", "data": "xyz"}, text("b"))])
    assert [part.text for part in found.payload.messages[1].content] == ["b"]
    assert [warning.field for warning in found.warnings] == ["messages[1].content[0]"]


def test_images_are_bytes_or_urls_of_allowed_hosts() -> None:
    address = {"type": "image", "source": {"type": "url", "url": "https://images.example.org/a.png"}}
    found = payload(messages=[user(IMAGE, address)])
    assert found.messages[0].content[0].image.media_type == "image/png"
    assert found.messages[0].content[1].image.data == b"https://images.example.org/a.png"


@pytest.mark.parametrize(
    ("message", "field", "part"),
    [
        (user(PDF), "content[0].type", "documents"),
        (user({"type": "container_upload", "file_id": "f"}), "content[0].type", "container_upload"),
        (user(USE), "content[0].type", "'tool_use' is not supported in a message of role 'user'"),
        (assistant(IMAGE), "content[0].type", "role 'assistant'"),
        ({"role": "system", "content": [IMAGE]}, "content[0].type", "role 'system'"),
        (user(), "content", "at least one block"),
        (
            user({"type": "image", "source": {"type": "file", "file_id": "f"}}),
            "content[0].source.type",
            "uploaded files",
        ),
        (
            user({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "%"}}),
            "content[0].source.data",
            "base64",
        ),
        (
            user({"type": "image", "source": {"type": "url", "url": "https://elsewhere.example/a.png"}}),
            "content[0].source.url",
            "",
        ),
        (user({"type": "tool_result", "tool_use_id": "nope"}), "content[0].tool_use_id", "does not match a tool_use"),
        (user({"type": "text"}), "content[0].text", "required"),
        (user({"no": "type"}), "content[0].type", "required"),
        ({"role": "robot", "content": "x"}, "role", "'user', 'assistant' or 'system'"),
        ({"role": "user", "content": None}, "content", "string or a list"),
    ],
)
def test_unsupported_message_part_error_names_it(message: dict[str, Any], field: str, part: str) -> None:
    with pytest.raises(FieldError) as caught:
        translated(messages=[message])
    assert caught.value.field == f"messages[0].{field}"
    assert part in caught.value.message


@pytest.mark.parametrize(
    "last",
    [
        [{"type": "tool_result", "tool_use_id": "call_1", "content": "read"}, PDF],
        [{"type": "tool_result", "tool_use_id": "call_1", "content": [PDF]}],
        [{"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "document"}]}],
        [{"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "audio", "source": {}}]}],
    ],
)
def test_file_read_by_a_tool_does_not_fail_the_conversation(last: list[dict[str, Any]]) -> None:
    found = translated(messages=[user(text("read")), assistant(USE), user(*last)])
    assert "left out" in found.payload.messages[-1].content[-1].text
    assert [warning.field.startswith("messages[2].content[") for warning in found.warnings] == [True]


def test_documents_and_search_results_with_text_are_read() -> None:
    plain = {
        "type": "document",
        "title": "notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "teal"},
    }
    parts = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "blue"}]}}
    encoded = {"type": "document", "source": {"type": "base64", "media_type": "text/markdown", "data": "cmVk"}}
    found = {
        "type": "search_result",
        "source": "http://a",
        "title": "b",
        "content": [{"type": "text", "text": "green"}],
    }
    read = translated(messages=[user(plain, parts, encoded, found)])
    assert [part.text for part in read.payload.messages[0].content] == [
        "notes\nteal",
        "blue",
        "red",
        "b\nhttp://a\ngreen",
    ]
    assert len(read.warnings) == 4


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            '[web_search was called with {"query":"x"}]',
        ),
        (
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [
                {"type": "web_search_result", "url": "http://a", "title": "b", "encrypted_content": "z"}]},
            "b\nhttp://a",
        ),
        ({"type": "bash_code_execution_tool_result", "content": {"stdout": "a.txt", "return_code": 0}}, "a.txt"),
        ({"type": "mcp_tool_use", "id": "m", "name": "find", "input": {}}, "[find was called with {}]"),
        ({"type": "container_upload", "file_id": "f"}, "left out"),
        ({"type": "of_next_year", "data": {"x": 1}}, "left out"),
    ],
)  # fmt: skip
def test_tool_blocks_of_another_provider_do_not_fail_the_conversation(block: dict[str, Any], words: str) -> None:
    found = translated(messages=[user(text("s")), assistant(block, text("found")), user(text("and now?"))])
    assert words in found.payload.messages[1].content[0].text
    assert [warning.field for warning in found.warnings] == ["messages[1].content[0].type"]


@pytest.mark.parametrize("given", ['{"q": "cut', "", None])
def test_non_object_tool_input_does_not_fail_the_conversation(given: object) -> None:
    found = payload(messages=[user(text("a")), assistant({**USE, "input": given}), user(text("go on"))])
    assert found.messages[1].tool_calls[0].arguments_text == (given if isinstance(given, str) else "{}")


def test_results_of_dropped_calls_do_not_fail_the_conversation() -> None:
    orphan = {"type": "tool_result", "tool_use_id": "gone", "content": "a.txt"}
    found = translated(messages=[user(orphan), assistant(text("ok")), user(text("go on"))])
    assert found.payload.messages[0].role == chat_pb2.ROLE_USER
    assert found.payload.messages[0].content[-1].text == "a.txt"


def test_broken_images_of_earlier_turns_do_not_fail_the_conversation() -> None:
    broken = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "%"}}
    uploaded = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    found = translated(messages=[user(broken, uploaded), assistant(text("ok")), user(text("go on"))])
    assert ["left out" in part.text for part in found.payload.messages[0].content] == [True, True]


@pytest.mark.parametrize("ttl", [["5m"], {"for": "5m"}, 5, None, "2h"])
def test_cache_mark_with_an_unknown_ttl_has_none(ttl: object) -> None:
    control = {"type": "ephemeral", "ttl": ttl}
    mark = payload(tools=[{**WEATHER, "cache_control": control}]).tools[0].function.cache_mark
    assert mark.ttl == ""


def test_tools_are_functions_and_others_are_dropped_with_a_warning() -> None:
    custom = {"type": "custom", "description": "Tells", "strict": True, "cache_control": None, **WEATHER}
    found = translated(tools=[custom, SEARCH], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    (tool,) = found.payload.tools
    assert (tool.function.name, tool.function.description, tool.function.strict) == ("weather", "Tells", True)
    assert plain_object(tool.function.parameters) == {"type": "object"}
    assert found.payload.tool_choice.mode == chat_pb2.ToolChoice.MODE_AUTO
    assert found.payload.HasField("parallel_tool_calls")
    assert not found.payload.parallel_tool_calls
    assert [(warning.field, "web_search_20250305" in warning.message) for warning in found.warnings] == [
        ("tools[1]", True)
    ]


@pytest.mark.parametrize(("choice", "mode"), [("none", "MODE_NONE"), ("auto", "MODE_AUTO"), ("any", "MODE_REQUIRED")])
def test_tool_choice_is_a_mode(choice: str, mode: str) -> None:
    found = payload(tools=[WEATHER], tool_choice={"type": choice})
    assert chat_pb2.ToolChoice.Mode.Name(found.tool_choice.mode) == mode
    assert not found.HasField("parallel_tool_calls")


def test_one_tool_can_be_forced() -> None:
    assert (
        payload(tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}).tool_choice.function_name == "weather"
    )


def test_default_tool_choice_sets_no_fields() -> None:
    found = payload(tools=[SEARCH], tool_choice={"type": "auto", "disable_parallel_tool_use": False})
    assert not found.HasField("tool_choice")
    assert not found.HasField("parallel_tool_calls")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [BASH], "tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [WEATHER] * 4}, "tools"),
        ({"tools": [{"name": "weather"}]}, "tools[0].input_schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "file:///etc/passwd"}}}},
            "output_config.format.schema.$ref",
        ),
        ({"tools": [{"name": "a\nb", "input_schema": {}}]}, "tools[0].name"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop_sequences": ["a", "b", "c"]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 21}, "messages"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_invalid_value_error_names_the_field(fields: dict[str, object], field: str) -> None:
    with pytest.raises(WeftError) as caught:
        translated(**fields)
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert caught.value.metadata["field"] == field


def test_only_requested_sampling_fields_are_set() -> None:
    found = payload(temperature=0, top_k=40, stop_sequences=["END"]).sampling
    assert (found.max_tokens, found.temperature, found.top_k, list(found.stop)) == (9, 0, 40, ["END"])
    assert found.HasField("temperature")
    assert not found.HasField("top_p")


@pytest.mark.parametrize(
    ("thinking", "told"),
    [
        ({"type": "enabled", "budget_tokens": 2048, "display": "summarized"}, True),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, None),
        ({"type": "between_tools"}, None),
    ],
)
def test_thinking_is_on_off_or_adaptive(thinking: dict[str, object], told: bool | None) -> None:
    found = payload(thinking=thinking)
    assert (found.thinking if found.HasField("thinking") else None) is told
    budget = {"thinking_budget_tokens": 2048} if "budget_tokens" in thinking else {}
    assert plain_object(found.extra_parameters) == budget


def test_answer_schema_is_accepted_in_its_place_and_in_the_legacy_one() -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    for found in (payload(output_config={"format": wanted}), payload(output_format=wanted)):
        assert plain_object(found.response_format.json_schema.schema) == {"type": "object"}
        assert found.response_format.json_schema.strict


def test_unsupported_fields_are_reported() -> None:
    found = translated(
        mcp_servers=[{"type": "url", "url": "https://x"}],
        container=None,
        context_management={"edits": []},
        x_unheard=1,
        speed="standard",
    )
    assert [warning.field for warning in found.warnings] == ["mcp_servers", "x_unheard"]
    assert not found.payload.extra_parameters.fields
