"""Requests of Ollama's API as the mesh's messages."""

import json
from typing import Any

import pytest
from test_messages_request import PNG

from gateway.gateway_config import MediaConfig, RequestLimits
from gateway.intake.json_guard import parse
from gateway.media import RequestMedia
from gateway.openai.chat_builder import ChatTranslation
from weft.api.common.v1 import chat_pb2, completion_pb2
from weft.dispatch.fleet import FleetView, expected_model
from weft.dispatch.history import left_out_note
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_objects import plain_object
from weft_extensions.ollama.names import mesh_name
from weft_extensions.ollama.payload import prompt_to_chat, to_chat, to_completion
from weft_extensions.ollama.schema import OllamaChatRequest, OllamaGenerateRequest

CALL = {"function": {"name": "weather", "arguments": {"city": "Oslo", "far": 12345678901234567890123}}}
OTHER_CALL = {"function": {"name": "clock", "arguments": {}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
LIMITS = RequestLimits(max_stop=2, max_stop_chars=9, max_messages=20, max_tools=3)


def media() -> RequestMedia:
    return RequestMedia(MediaConfig())


def chat(*, context: int = 4096, **fields: Any) -> ChatTranslation:
    request = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return to_chat(parse(OllamaChatRequest, json.dumps(request).encode(), max_depth=64), LIMITS, media(), context)


def generating(**fields: object) -> OllamaGenerateRequest:
    return parse(OllamaGenerateRequest, json.dumps({"model": "tiny", "prompt": "Hi"} | fields).encode(), max_depth=64)


def prompted(**fields: object) -> chat_pb2.ChatPayload:
    return prompt_to_chat(generating(**fields), LIMITS, media(), 4096).payload


def completed(**fields: object) -> tuple[completion_pb2.CompletionPayload, list[str]]:
    found, warnings = to_completion(generating(raw=True, **fields), LIMITS, 4096)
    return found, [warning.field for warning in warnings]


def warned(**fields: Any) -> list[str]:
    return [warning.field for warning in chat(**fields).warnings]


def refused_field(**fields: Any) -> str:
    with pytest.raises(WeftError) as caught:
        chat(**fields)
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    return str(caught.value.metadata["field"])


def test_the_languages_of_a_translation_are_passed_on() -> None:
    """The engine asked for fields that this API did not have."""
    for found in (chat(target_lang_code="en"), prompt_to_chat(generating(target_lang_code="en"), LIMITS, media(), 9)):
        assert plain_object(found.payload.extra_parameters) == {"target_lang_code": "en"}
        assert not found.warnings


def test_conversation_keeps_roles_thinking_and_images() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is this?", "images": [PNG, f"data:image/png;base64,{PNG}"]},
        {"role": "assistant", "content": "A dot.", "thinking": "Small."},
        {"role": "user", "content": "Sure?"},
    ]
    found = chat(messages=messages).payload.messages
    assert [chat_pb2.Role.Name(turn.role) for turn in found] == [
        "ROLE_SYSTEM",
        "ROLE_USER",
        "ROLE_ASSISTANT",
        "ROLE_USER",
    ]
    assert [part.WhichOneof("kind") for part in found[1].content] == ["text", "image", "image"]
    assert {part.image.media_type for part in found[1].content[1:]} == {"image/png"}
    assert found[2].reasoning == "Small."


def test_arguments_are_objects_and_numbers_keep_all_digits() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    (made,) = chat(messages=messages).payload.messages[1].tool_calls
    assert (made.name, made.arguments_text) == ("weather", '{"city":"Oslo","far":12345678901234567890123}')
    assert made.id
    assert not chat(messages=messages).payload.messages[1].content


def results(*messages: dict[str, Any], calls: list[dict[str, Any]]) -> list[str]:
    """The names of the calls that results answer."""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}, *messages]
    found = chat(messages=turns).payload.messages
    names = {call.id: call.name for call in found[1].tool_calls}
    return [names[turn.tool_call_id] for turn in found[2:]]


def test_result_answers_the_call_by_id_by_function_or_the_oldest_open_one() -> None:
    calls = [CALL | {"id": "a1"}, OTHER_CALL | {"id": "b2"}]
    by_id = [{"role": "tool", "content": "1", "tool_call_id": name} for name in ("b2", "a1")]
    by_name = [{"role": "tool", "content": "1", "tool_name": name} for name in ("clock", "weather")]
    by_order = [{"role": "tool", "content": "1"}] * 2
    assert results(*by_id, calls=calls) == ["clock", "weather"]
    assert results(*by_name, calls=[CALL, OTHER_CALL]) == ["clock", "weather"]
    assert results(*by_order, calls=[CALL, OTHER_CALL]) == ["weather", "clock"]


def test_role_has_any_case_and_a_message_of_an_unknown_one_is_the_users() -> None:
    """Regression: both were refused, although Ollama accepts them."""
    named = ["SYSTEM", "narrator", "Assistant", "control"]
    found = chat(messages=[{"role": role, "content": "1"} for role in named])
    assert [chat_pb2.Role.Name(turn.role) for turn in found.payload.messages] == [
        "ROLE_SYSTEM",
        "ROLE_USER",
        "ROLE_ASSISTANT",
        "ROLE_USER",
    ]
    assert [warning.field for warning in found.warnings] == ["messages[1].role", "messages[3].role"]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "tool", "content": "1"}, "messages[0].role"),
        ({"role": "tool", "content": "1", "tool_name": "nope"}, "messages[0].tool_name"),
        ({"role": "tool", "content": "1", "tool_call_id": "nope"}, "messages[0].tool_call_id"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": "1", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "1", "thinking": "x"}, "messages[0].thinking"),
        ({"role": "system", "content": "1", "images": [PNG]}, "messages[0].images"),
        ({"role": "user", "content": "1", "images": ["not base64"]}, "messages[0].images[0]"),
        ({"role": "user", "content": "1", "images": [PNG, "aGVsbG8="]}, "messages[0].images[1]"),
        ({"role": "user", "content": "1", "images": ["https://a.example/b.png"]}, "messages[0].images[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}, None),
    ],
)
def test_invalid_message_error_has_the_field_path(message: dict[str, Any], field: str | None) -> None:
    found = refused_field(messages=[message])
    assert found == (field or "messages[0].tool_calls[0].function.arguments")


def test_mesh_sampling_options_are_mapped_and_others_go_to_the_engine_by_name() -> None:
    options = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 7,
        "repeat_penalty": 1.5,
        "num_predict": 5,
        "stop": ["a", "b"],
        "mirostat": 1,
        "repeat_last_n": None,
    }
    found = chat(options=options)
    sampling = found.payload.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.5, 0.25)
    assert (sampling.seed, sampling.repeat_penalty, sampling.max_tokens) == (7, 1.5, 5)
    assert list(sampling.stop) == ["a", "b"]
    assert plain_object(found.payload.extra_parameters) == {"mirostat": 1}
    assert found.warnings == []


@pytest.mark.parametrize("unlimited", [-2, -1, 0])
def test_unlimited_num_predict_sets_no_max_tokens(unlimited: int) -> None:
    assert not chat(options={"num_predict": unlimited}).payload.sampling.HasField("max_tokens")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": 3}, "options.temperature"),
        ({"temperature": "hot"}, "options.temperature"),
        ({"num_predict": -3}, "options.num_predict"),
        ({"top_k": 1.5}, "options.top_k"),
        ({"stop": ["a", "b", "c"]}, "options.stop"),
        ({"stop": "0123456789"}, "options.stop[0]"),
        ({f"x{index}": 1 for index in range(65)}, "x64"),
    ],
)
def test_out_of_range_option_is_refused(options: dict[str, Any], field: str) -> None:
    assert refused_field(options=options) == field


def test_option_set_only_by_configuration_is_warned_about() -> None:
    assert warned(options={"num_gpu": 4, "num_thread": 2, "use_mmap": None}) == [
        "options.num_gpu",
        "options.num_thread",
    ]
    assert warned(options={"num_ctx": 8192}) == ["options.num_ctx"]
    assert warned(options={"num_ctx": 8192}, context=0) == ["options.num_ctx"]
    assert warned(options={"num_ctx": 4096}) == []


def test_unknown_fields_and_truncate_are_warned_about() -> None:
    assert warned(metadata={"a": 1}, x_unheard=1, nothing=None) == ["metadata", "x_unheard"]
    assert warned(truncate=True, shift=True) == ["truncate", "shift"]
    assert warned(truncate=False, shift=False) == []


def test_format_is_json_or_a_schema() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
    assert chat(format="json").payload.response_format.json_object
    wanted = chat(format=schema).payload.response_format.json_schema
    assert (plain_object(wanted.schema), wanted.strict) == (schema, True)
    assert not chat(format="").payload.HasField("response_format")
    assert refused_field(format="yaml") == "format"
    assert refused_field(format=1) == "format"


def test_thinking_is_a_switch_or_a_level() -> None:
    assert chat(think=True).payload.thinking
    off = chat(think=False).payload
    assert (off.HasField("thinking"), off.thinking) == (True, False)
    assert chat(think="high").payload.reasoning_effort == chat_pb2.REASONING_EFFORT_HIGH
    assert not chat().payload.HasField("thinking")
    for wrong in ("very", 1, ["high"]):
        assert refused_field(think=wrong) == "think"


def test_functions_are_passed_on_and_other_tools_are_warned_about() -> None:
    found = chat(tools=[WEATHER, {"function": {"name": "clock"}}, {"type": "web_search"}])
    assert [tool.function.name for tool in found.payload.tools] == ["weather", "clock"]
    assert [warning.field for warning in found.warnings] == ["tools[2]"]
    assert refused_field(tools=[{"type": "function"}]) == "tools[0].function"


def test_log_probabilities_are_requested_as_in_a_chat() -> None:
    found = chat(logprobs=True, top_logprobs=2).payload
    assert (found.logprobs, found.top_logprobs) == (True, 2)
    assert refused_field(top_logprobs=2) == "top_logprobs"


def test_prompt_becomes_a_chat_with_system_prompt_and_images() -> None:
    found = prompted(system="Be brief.", images=[PNG])
    assert [[part.WhichOneof("kind") for part in turn.content] for turn in found.messages] == [
        ["text"],
        ["text", "image"],
    ]
    assert found.messages[0].role == chat_pb2.ROLE_SYSTEM


def test_raw_prompt_is_continued_and_a_suffix_is_filled_in() -> None:
    found, warnings = completed(suffix="end", options={"num_predict": 4}, logprobs=True, think=True)
    assert (found.prompts[0].text, found.suffix, found.sampling.max_tokens, found.logprobs) == ("Hi", "end", 4, 0)
    assert warnings == ["think"]


@pytest.mark.parametrize("given", [{"system": "a"}, {"images": [PNG]}, {"format": "json"}])
def test_template_features_are_refused_for_a_raw_prompt(given: dict[str, Any]) -> None:
    with pytest.raises(WeftError, match="needs the model's template"):
        completed(**given)


@pytest.mark.parametrize("given", [{"template": "{{ .Prompt }}"}, {"context": [1, 2]}])
def test_templates_and_saved_contexts_are_refused_with_an_alternative(given: dict[str, Any]) -> None:
    for ask in (prompted, completed):
        with pytest.raises(WeftError) as caught:
            ask(**given)
        assert caught.value.reason is Reason.UNSUPPORTED_OPERATION
        assert caught.value.metadata["field"] in given
    assert prompted(template="", context=[]).messages


def test_names_resolve_with_and_without_the_client_tag() -> None:
    models = [expected_model(name, "", "r1") for name in ("tiny", "llama:latest", "both", "both:latest")]
    view = FleetView(1, {}, {model.name: model for model in models})
    names = ("tiny", "tiny:latest", "llama", "llama:latest", "both", "both:latest", "nope:latest", "nope", "nope:1b")
    assert [mesh_name(view, name) for name in names] == [
        "tiny",
        "tiny",
        "llama:latest",
        "llama:latest",
        "both",
        "both:latest",
        "nope",
        "nope",
        "nope:1b",
    ]


def test_string_arguments_and_unreadable_earlier_turns_do_not_fail_the_conversation() -> None:
    call = {"function": {"name": "f", "arguments": '{"cut": '}}
    found = chat(
        messages=[
            {"role": "user", "content": "look", "images": ["%", "aGVsbG8="]},
            {"role": "tool", "content": "of a turn that the client dropped", "tool_name": "g"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "error", "tool_name": "f"},
            {"role": "user", "content": "go on"},
        ]
    )
    first, orphan, called, result, _ = found.payload.messages
    notes = [part.text for part in first.content[1:]]
    assert notes[0] == left_out_note("image", "it must be base64")
    assert notes[1].endswith("its content is of no known type]")
    assert orphan.role == chat_pb2.ROLE_USER
    assert orphan.content[1].text == "of a turn that the client dropped"
    assert called.tool_calls[0].arguments_text == '{"cut": '
    assert result.tool_call_id == called.tool_calls[0].id
    assert [warning.field for warning in found.warnings] == [
        "messages[0].images[0]", "messages[0].images[1]", "messages[1].tool_name",
    ]  # fmt: skip
