import base64
import json
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from gateway.gateway_config import MediaConfig, RequestLimits
from gateway.intake.json_guard import parse
from gateway.media import RequestMedia
from gateway.openai.chat_builder import ChatTranslation
from gateway.openai.chat_schema import MAX_NAME_CHARS
from gateway.responses import payload as payload_module
from gateway.responses.namespaces import members_by_flat_name
from gateway.responses.output import OutputItems
from gateway.responses.payload import Conversation, asks_for_metrics, own_items, to_response_request
from gateway.responses.schema import InputItem, ResponsesRequest
from weft.api.common.v1 import chat_pb2, event_pb2
from weft.dispatch.history import left_out_note
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.schemas.json_schema import SchemaLimits
from weft.kernel.text.json_objects import plain_object
from weft_testing.media_files import png, wav

UNSUPPORTED = "weft does not support it"

LIMITS = RequestLimits(max_messages=8, max_tools=3)
PIXEL = f"data:image/png;base64,{base64.b64encode(png(1, 1)).decode()}"
SOUND = base64.b64encode(wav(seconds=1)).decode()
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
USER = {"role": "user", "content": "Say hi"}


def request_of(**fields: object) -> ResponsesRequest:
    return parse(ResponsesRequest, json.dumps({"model": "m", **fields}).encode(), max_depth=64)


def asked_of(*, earlier: tuple[dict[str, object], ...] = (), **fields: object) -> ChatTranslation:
    request = request_of(**({"input": "Say hi"} | fields))
    before = [InputItem.model_validate(item) for item in earlier]
    return to_response_request(request, Conversation(own_items(request), before), RequestMedia(MediaConfig()), LIMITS)


def payload_of(**fields: Any) -> chat_pb2.ChatPayload:
    return asked_of(**fields).payload


def messages_of(**fields: Any) -> list[dict[str, Any]]:
    return MessageToDict(payload_of(**fields), preserving_proto_field_name=True)["messages"]  # type: ignore[no-any-return]


def refused_field(**fields: Any) -> str:
    with pytest.raises(FieldError) as caught:
        asked_of(**fields)
    return caught.value.field


def test_text_is_a_user_turn_after_the_instructions() -> None:
    assert messages_of(instructions="Be terse.") == [
        {"role": "ROLE_SYSTEM", "content": [{"text": "Be terse."}]},
        {"role": "ROLE_USER", "content": [{"text": "Say hi"}]},
    ]


def test_items_of_one_assistant_turn_are_one_message() -> None:
    turn, answer = messages_of(input=[USER, THOUGHT, SAID, CALL, OUTPUT])[1:]
    assert turn == {
        "role": "ROLE_ASSISTANT",
        "reasoning": "Hm.",
        "content": [{"text": "Let me see."}],
        "tool_calls": [{"id": "c1", "name": "f", "arguments_text": "{}"}],
    }
    assert answer == {"role": "ROLE_TOOL", "tool_call_id": "c1", "content": [{"text": "sunny"}]}


def test_parallel_calls_are_one_message_and_sequential_calls_are_two() -> None:
    second = CALL | {"call_id": "c2"}
    result = OUTPUT | {"call_id": "c2"}
    at_once = messages_of(input=[USER, CALL, second, OUTPUT, result])
    in_turn = messages_of(input=[USER, CALL, OUTPUT, second, result])
    roles = [[message["role"] for message in messages] for messages in (at_once, in_turn)]
    assert roles == [
        ["ROLE_USER", "ROLE_ASSISTANT", "ROLE_TOOL", "ROLE_TOOL"],
        ["ROLE_USER", "ROLE_ASSISTANT", "ROLE_TOOL", "ROLE_ASSISTANT", "ROLE_TOOL"],
    ]


def test_two_assistant_messages_stay_separate() -> None:
    assert [message["role"] for message in messages_of(input=[USER, SAID, SAID, USER])] == [
        "ROLE_USER",
        "ROLE_ASSISTANT",
        "ROLE_ASSISTANT",
        "ROLE_USER",
    ]


def test_history_is_between_instructions_and_input() -> None:
    before = ({"role": "user", "content": "Hello"}, SAID)
    assert [message["role"] for message in messages_of(earlier=before, instructions="Be terse.")] == [
        "ROLE_SYSTEM",
        "ROLE_USER",
        "ROLE_ASSISTANT",
        "ROLE_USER",
    ]


def test_output_may_answer_a_call_of_the_previous_response() -> None:
    assert messages_of(earlier=(USER, CALL), input=[OUTPUT])[-1]["tool_call_id"] == "c1"


def test_every_content_part_kind_is_passed_on() -> None:
    content = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": PIXEL, "detail": "low"},
        {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}},
    ]
    parts = payload_of(input=[{"role": "user", "content": content}]).messages[0].content
    assert [part.WhichOneof("kind") for part in parts] == ["text", "image", "audio"]
    assert (parts[1].image.media_type, parts[1].image.detail) == ("image/png", "low")


def test_output_may_be_a_list_of_parts_or_empty() -> None:
    parts = [{"type": "input_text", "text": "sunny"}, {"type": "input_image", "image_url": PIXEL}]
    message = payload_of(input=[USER, CALL, OUTPUT | {"output": parts}]).messages[-1]
    assert [part.WhichOneof("kind") for part in message.content] == ["text", "image"]
    assert payload_of(input=[USER, CALL, OUTPUT | {"output": []}]).messages[-1].content[0].text == ""


def test_reasoning_falls_back_to_its_summary() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short."}]}
    assert messages_of(input=[USER, item, SAID])[1]["reasoning"] == "In short."


def test_encrypted_reasoning_of_another_service_is_omitted_with_a_warning() -> None:
    asked = asked_of(input=[{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, USER])
    assert len(asked.payload.messages) == 1
    assert [(warning.field, "encrypted" in warning.message) for warning in asked.warnings] == [("input", True)]


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"type": "hologram", "id": "x"}, "input[0].type"),
        ({"type": "item_reference", "id": "msg_1"}, "input[0].id"),
        ({"content": "hi"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": []}, "input[0].content"),
        ({"role": "tool", "content": "hi"}, "input[0].role"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "video"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].image_url"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "input[0].content[0].file_id"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,!"}]},
            "input[0].content[0].image_url",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input[0].content[0].input_audio"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "input[0].name"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "input[0].arguments"),
        (OUTPUT, "input[0].call_id"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
    ],
)
def test_unreadable_item_is_refused_with_its_position(item: dict[str, object], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        asked_of(input=[item])
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [THOUGHT] * 9}, "input"),
        ({"messages": [USER]}, "input"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"include": ["everything"]}, "include[0]"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "middle"}, "truncation"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"verbosity": "shouting"}}, "text.verbosity"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a\nb"}]}, "tools[0].name"),
        ({"tools": [FUNCTION] * 4}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [{"type": "custom", "name": "c"}], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"source_lang_code": "nl"}, "target_lang_code"),
        ({"target_lang_code": "not a code"}, "target_lang_code"),
        ({"thinking": "sometimes"}, "thinking"),
        ({"thinking": "enabled", "enable_thinking": False}, "thinking"),
        ({"temperature": 0.5, "decoding": {"temperature": 0.7}}, "decoding.temperature"),
        ({"decoding": {"top_k": -1}}, "decoding.top_k"),
        ({"decoding": {"stop": ["x"] * 17}}, "decoding.stop"),
        ({"input": None, "messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"input": None, "messages": [{"role": "assistant", "content": "x"}]}, "messages[0].role"),
    ],
)
def test_unsupported_value_error_names_its_field(fields: dict[str, object], field: str) -> None:
    assert refused_field(**fields) == field


def test_sampling_and_answer_format_are_passed_on() -> None:
    payload = payload_of(
        max_output_tokens=12,
        temperature=0,
        top_p=0.5,
        top_k=7,
        parallel_tool_calls=False,
        tools=[FUNCTION | {"description": "d", "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    sampling = payload.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (12, 0, 0.5, 7)
    assert payload.parallel_tool_calls is False
    assert (payload.tools[0].function.name, payload.tools[0].function.strict) == ("f", True)
    assert payload.tool_choice.function_name == "f"
    assert payload.reasoning_effort == chat_pb2.REASONING_EFFORT_LOW
    assert plain_object(payload.response_format.json_schema.schema) == {"type": "object"}
    assert (payload.logprobs, payload.top_logprobs) == (True, 2)


def test_json_object_with_a_schema_uses_it() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    target = payload_of(text={"format": {"type": "json_object", "schema": schema}}).response_format
    assert plain_object(target.json_schema.schema) == schema
    assert payload_of(text={"format": {"type": "json_object"}}).response_format.json_object


def test_plain_request_sets_only_its_message() -> None:
    payload = MessageToDict(payload_of(), preserving_proto_field_name=True)
    payload.pop("sampling", None)
    assert payload == {"messages": [{"role": "ROLE_USER", "content": [{"text": "Say hi"}]}]}


def test_only_allowed_tools_are_sent_to_the_model() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    payload = payload_of(tools=[FUNCTION, FUNCTION | {"name": "g"}], tool_choice=choice)
    assert [tool.function.name for tool in payload.tools] == ["g"]
    assert payload.tool_choice.mode == chat_pb2.ToolChoice.MODE_REQUIRED


def test_many_allowed_tools_are_looked_up_in_the_tools_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups: list[object] = []

    def counted(tools: Any) -> Any:
        lookups.append(tools)
        return members_by_flat_name(tools)

    monkeypatch.setattr(payload_module, "members_by_flat_name", counted)
    allowed = [{"type": "function", "namespace": "mcp__files", "name": "read"}] * 1000
    payload_of(tools=[MCP], tool_choice={"type": "allowed_tools", "mode": "auto", "tools": allowed})
    assert len(lookups) < 10


def test_tools_of_other_kinds_are_omitted_with_a_warning() -> None:
    asked = asked_of(tools=[{"type": "web_search"}, FUNCTION, {"type": "namespace", "name": "n", "tools": []}])
    assert [tool.function.name for tool in asked.payload.tools] == ["f"]
    assert [warning.field for warning in asked.warnings] == ["tools[0]", "tools[2]"]


def test_accepted_but_unsupported_fields_are_reported() -> None:
    asked = asked_of(
        truncation="auto",
        reasoning={"summary": "auto"},
        include=["reasoning.encrypted_content"],
        max_tool_calls=3,
        x_unheard=1,
        client_metadata={"a": 1},
        service_tier="auto",
    )
    assert {warning.field for warning in asked.warnings} == {
        "truncation",
        "reasoning.summary",
        "include",
        "max_tool_calls",
        "x_unheard",
    }
    assert not asked.payload.extra_parameters.fields


def test_unknown_fields_go_to_the_engine() -> None:
    payload = payload_of(grammar="root ::= x", text={"verbosity": "low"}, decoding={"beam_size": 4})
    assert plain_object(payload.extra_parameters) == {"grammar": "root ::= x", "verbosity": "low", "beam_size": 4}


def test_decoding_sets_sampling_in_one_object() -> None:
    decoding = {
        "beam_size": 1,
        "top_k": 1,
        "top_p": 1.0,
        "temperature": 0.1,
        "repetition_penalty": 1.5,
        "max_tokens": 256,
        "stop": ["a"],
    }
    payload = payload_of(decoding=decoding, stop="b")
    sampling = payload.sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (1, 1.0, 0.1)
    assert (sampling.repeat_penalty, sampling.max_tokens, list(sampling.stop)) == (1.5, 256, ["b", "a"])
    assert not payload.extra_parameters.fields


def test_messages_may_replace_input_items() -> None:
    turns = [USER, {"role": "assistant", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "?"}]}]
    assert [message["role"] for message in messages_of(input=None, messages=turns)] == [
        "ROLE_USER",
        "ROLE_ASSISTANT",
        "ROLE_USER",
    ]


def test_bare_parts_are_one_message() -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
    (message,) = payload_of(input=parts).messages
    assert [part.WhichOneof("kind") for part in message.content] == ["text", "image"]
    assert refused_field(input=[*parts, {"type": "image_url"}]) == "input[2].image_url"
    assert refused_field(input=[*parts, {"type": "image_url", "image_url": {"url": "data:,x"}}]) == (
        "input[2].image_url.url"
    )


@pytest.mark.parametrize(("word", "thinks"), [("enabled", True), ("disabled", False)])
def test_thinking_can_be_set_in_three_ways(word: str, thinks: bool) -> None:
    for fields in (
        {"thinking": word},
        {"enable_thinking": thinks},
        {"chat_template_kwargs": {"enable_thinking": thinks}},
    ):
        payload = payload_of(**fields)
        assert payload.HasField("thinking")
        assert payload.thinking is thinks
    assert not payload_of(thinking="default").HasField("thinking")


def test_languages_are_template_arguments() -> None:
    payload = payload_of(source_lang_code="nl", target_lang_code="en", chat_template_kwargs={"x": 1})
    assert plain_object(payload.extra_parameters) == {
        "chat_template_kwargs": {"x": 1, "source_lang_code": "nl", "target_lang_code": "en"}
    }
    assert payload.messages[-1].content[0].text == "Say hi"


@pytest.mark.parametrize("source", [None, "auto", "mixed"])
@pytest.mark.parametrize(("target", "fallback"), [("de", "en"), ("en", "fr"), ("en-GB", "fr"), ("EN_us", "fr")])
def test_unknown_source_language_falls_back_to_another_language(source: str | None, target: str, fallback: str) -> None:
    payload = payload_of(source_lang_code=source, target_lang_code=target)
    arguments = plain_object(payload.extra_parameters)["chat_template_kwargs"]
    assert arguments == {"source_lang_code": fallback, "target_lang_code": target}
    text = payload.messages[-1].content[0].text
    assert text.endswith("\n\nSay hi")
    assert "each segment" in text


@pytest.mark.parametrize(
    "fields",
    [
        {"decoding": {}},
        {"thinking": "default"},
        {"target_lang_code": "en"},
        {"include": ["metrics"]},
        {"input": None, "messages": [USER]},
        {"input": [{"type": "text", "text": "hi"}]},
    ],
)
def test_metrics_are_sent_for_each_field_that_requests_them(fields: dict[str, object]) -> None:
    assert asks_for_metrics(request_of(**({"input": "hi"} | fields)))


def test_official_client_request_gets_no_metrics() -> None:
    assert not asks_for_metrics(request_of(input=[USER], temperature=0.5, allow_remote=True, include=[], tools=[]))


def test_tool_and_answer_schemas_share_one_size_limit() -> None:
    """Each had the bytes and patterns of a whole request, though the limit is one for both."""
    schema = {"description": "x" * 600}
    request = request_of(
        input="Say hi",
        tools=[FUNCTION | {"parameters": schema}],
        text={"format": {"type": "json_schema", "name": "a", "schema": schema}},
    )
    limits = RequestLimits(schemas=SchemaLimits(max_total_bytes=1024))
    with pytest.raises(FieldError, match="at most 1024 bytes together") as refused:
        to_response_request(request, Conversation(own_items(request)), RequestMedia(MediaConfig()), limits)
    assert refused.value.field == "text.format.schema"


SEARCHED = {"type": "web_search_call", "id": "ws_1", "status": "searching", "action": {"type": "search", "query": "q"}}
PATCHED = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"}
LISTED = {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": {"command": ["ls"], "env": {}}}
FOUND = {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "js"}}


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([SEARCHED], [
            (chat_pb2.ROLE_ASSISTANT, '[web_search was called with {"action":{"type":"search","query":"q"}}]')]),
        ([{**SEARCHED, "status": "failed"}], [
            (chat_pb2.ROLE_ASSISTANT,
             '[web_search was called with {"action":{"type":"search","query":"q"}}]\n[The call failed.]')]),
        ([{"type": "compaction", "summary": "so far: nothing"}], [(chat_pb2.ROLE_USER, "so far: nothing")]),
        ([{"type": "mcp_list_tools", "server_label": "s", "tools": []}], []),
        (
            [{"type": "mcp_call", "id": "m", "name": "find", "arguments": "{}", "output": "a.txt"}],
            [(chat_pb2.ROLE_ASSISTANT, "[find was called with {}]\na.txt")],
        ),
        ([{"type": "image_generation_call", "id": "ig", "result": "iVBOR"}], [
            (chat_pb2.ROLE_ASSISTANT, "[image_generation was called with {}]")]),
        ([{"type": "of_next_year", "data": {"text": "x"}}], [(chat_pb2.ROLE_USER, "x")]),
        ([{**PATCHED, "call_id": "unanswered"}], [
            (chat_pb2.ROLE_ASSISTANT, '[apply_patch was called with {"input":"*** Begin"}]')]),
    ],
    ids=str,
)  # fmt: skip
def test_items_of_another_service_do_not_fail_the_conversation(
    items: list[dict[str, object]], expected: list[tuple[object, str]]
) -> None:
    asked = asked_of(input=[USER, *items, USER])
    messages = asked.payload.messages[1:-1]
    assert [(message.role, message.content[0].text) for message in messages] == expected
    assert [warning.field for warning in asked.warnings] == ["input[1].type"]


@pytest.mark.parametrize("sealed", [{}, {"encrypted_content": None}, {"encrypted_content": "gAA"}])
def test_summary_that_nobody_here_can_read_is_refused(sealed: dict[str, object]) -> None:
    with pytest.raises(FieldError) as failure:
        asked_of(input=[USER, {"type": "compaction", "id": "cmp_1", **sealed}, USER])
    assert failure.value.field == "input[1].encrypted_content"


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "compaction", "summary": "so far: nothing"}, "as text"),
        ({"type": "mcp_list_tools", "server_label": "s", "tools": []}, "it was left out"),
    ],
)
def test_warning_about_an_item_of_another_service_says_what_became_of_it(item: dict[str, object], words: str) -> None:
    (warning,) = asked_of(input=[USER, item, USER]).warnings
    assert words in warning.message


@pytest.mark.parametrize(
    ("call", "output", "name", "arguments", "result"),
    [
        (
            PATCHED, {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
            "apply_patch", '{"input":"*** Begin"}', "done",
        ),
        (
            LISTED, {"type": "function_call_output", "call_id": "c", "output": "a.txt"},
            "local_shell", '{"action":{"command":["ls"],"env":{}}}', "a.txt",
        ),
        (
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a.txt", "stderr": ""}]},
            "shell", '{"action":{"commands":["ls"]}}', "a.txt",
        ),
        (
            FOUND, {"type": "tool_search_output", "call_id": "c", "tools": []},
            "tool_search", '{"query":"js"}', '{"tools":[]}',
        ),
    ],
)  # fmt: skip
def test_calls_of_other_tool_kinds_become_function_calls(
    call: dict[str, object], output: dict[str, object], name: str, arguments: str, result: str
) -> None:
    _, called, told, _ = payload_of(input=[USER, call, output, USER]).messages
    made = called.tool_calls[0]
    assert (made.id, made.name, made.arguments_text) == ("c", name, arguments)
    assert (told.tool_call_id, told.content[-1].text) == ("c", result)


def test_result_of_a_compacted_call_does_not_fail_the_conversation() -> None:
    said = {"type": "message", "role": "assistant", "content": "ok"}
    first = payload_of(input=[OUTPUT, said, USER]).messages[0]
    assert first.role == chat_pb2.ROLE_USER


def test_file_or_uploaded_image_in_a_result_does_not_fail_the_conversation() -> None:
    parts = [{"type": "input_file", "filename": "a.pdf", "file_id": "f"}, {"type": "input_image", "file_id": "f"}]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"cut'}
    asked = asked_of(input=[USER, call, {"type": "function_call_output", "call_id": "c", "output": parts}])
    notes = [part.text for part in asked.payload.messages[-1].content]
    assert notes == [left_out_note("a.pdf", UNSUPPORTED), left_out_note("image", UNSUPPORTED)]


MCP = {
    "type": "namespace", "name": "mcp__files", "description": "",
    "tools": [{**FUNCTION, "name": "read"}, {"type": "custom", "name": "raw"}],
}  # fmt: skip


def test_namespaced_functions_are_flattened_for_the_model_and_restored_in_calls() -> None:
    asked = asked_of(tools=[MCP, {**MCP, "name": "mcp__notes__"}, FUNCTION])
    assert [tool.function.name for tool in asked.payload.tools] == ["mcp__files__read", "mcp__notes__read", "f"]
    assert [warning.field for warning in asked.warnings] == ["tools[0]", "tools[1]"]
    items = OutputItems("resp_1", logprobs=False, members=members_by_flat_name(request_of(tools=[MCP]).tools))
    called = event_pb2.ToolCallDelta(index=0, id="c", name="mcp__files__read", arguments_text="{}")
    items.add(event_pb2.Delta(tool_calls=[called]))
    (found,) = items.json("in_progress")
    assert (found["namespace"], found["name"]) == ("mcp__files", "read")


def test_namespaced_call_in_the_history_has_its_flat_name() -> None:
    call = {"type": "function_call", "call_id": "c", "namespace": "mcp__files", "name": "read", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "x"}
    for tools in ([MCP], None):
        messages = payload_of(input=[USER, call, result], tools=tools).messages
        assert messages[1].tool_calls[0].name == "mcp__files__read"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "namespace": "mcp__files", "name": "read"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "mcp__files"}]},
        {
            "type": "allowed_tools", "mode": "required",
            "tools": [{"type": "function", "namespace": "mcp__files", "name": "read"}],
        },
    ],
)  # fmt: skip
def test_namespaced_function_can_be_chosen(choice: dict[str, object]) -> None:
    payload = payload_of(tools=[MCP, FUNCTION], tool_choice=choice)
    offered = [tool.function.name for tool in payload.tools]
    assert payload.tool_choice.function_name == "mcp__files__read" or offered == ["mcp__files__read"]


def test_flat_names_are_short_and_unique_per_namespace_and_function() -> None:
    long = {**MCP, "name": "mcp__" + "x" * 70}
    same = {"type": "function", "name": "mcp__files__read"}
    members = members_by_flat_name(request_of(tools=[MCP, long, {**long, "name": f"{long['name']}y"}, same]).tools)
    assert len(members) == 3
    assert all(len(name) <= MAX_NAME_CHARS for name in members)
    assert "mcp__files__read" not in members
