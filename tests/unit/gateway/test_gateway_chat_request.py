import base64
import json
from collections.abc import Mapping

import pytest
from _pytest.mark.structures import ParameterSet
from google.protobuf.json_format import MessageToDict

from gateway.gateway_config import RequestLimits
from gateway.intake.json_guard import parse
from gateway.openai.chat import to_chat, to_payload, warnings_of
from gateway.openai.chat_schema import ChatRequest
from weft.api.common.v1 import chat_pb2
from weft.api.runner.v1 import generation_service_pb2
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.json_schema import SchemaLimits
from weft.kernel.text.json_objects import plain_object
from weft_testing.media_files import png, wav

LIMITS = RequestLimits()
USER = {"role": "user", "content": "hi"}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
PNG = base64.b64encode(png(1, 1)).decode()
PIXEL = f"data:image/png;base64,{PNG}"
SOUND = base64.b64encode(wav(seconds=1)).decode()
FUNCTION = {"type": "function", "function": {"name": "f"}}


def payload_of(**fields: object) -> chat_pb2.ChatPayload:
    raw = json.dumps({"model": "m", "messages": [USER], **fields}).encode()
    return to_payload(parse(ChatRequest, raw, max_depth=64), LIMITS)


def test_plain_request_sets_only_its_message() -> None:
    payload = MessageToDict(payload_of(), preserving_proto_field_name=True)
    payload.pop("sampling", None)
    assert payload == {"messages": [{"role": "ROLE_USER", "content": [{"text": "hi"}]}]}


OPTIONAL = [field.alias or name for name, field in ChatRequest.model_fields.items() if not field.is_required()]


@pytest.mark.parametrize("field", [*OPTIONAL, "unheard_of"])
def test_null_means_absent_for_every_optional_field(field: str) -> None:
    assert payload_of(**{field: None}) == payload_of()


def test_explicit_defaults_are_accepted() -> None:
    payload = payload_of(n=1, stream=False, logprobs=False, service_tier="auto", store=False)
    assert payload == payload_of()


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 2, "top_p": 1, "min_p": 0.05}, {"temperature": 2.0, "top_p": 1.0, "min_p": 0.05}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"max_tokens": -1}, {}),
        ({"max_tokens": 8.0}, {"max_tokens": 8}),
        ({"max_completion_tokens": -1}, {}),
        ({"top_k": 0, "seed": -1}, {"top_k": 0, "seed": "-1"}),
        ({"seed": 2**63 - 1}, {"seed": str(2**63 - 1)}),
        ({"stop": "end"}, {"stop": ["end"]}),
        ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"stop": []}, {}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
        ({"repeat_penalty": 1.1}, {"repeat_penalty": 1.1}),
        ({"repetition_penalty": 1.1}, {"repeat_penalty": 1.1}),
        ({"logit_bias": {"50256": -100}}, {"logit_bias": {"50256": -100.0}}),
    ],
)
def test_sampling_is_copied_unchanged(fields: dict[str, object], sampling: dict[str, object]) -> None:
    assert MessageToDict(payload_of(**fields).sampling, preserving_proto_field_name=True) == sampling


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "system", "content": "s"}, {"role": "ROLE_SYSTEM", "content": [{"text": "s"}]}),
        ({"role": "developer", "content": "d"}, {"role": "ROLE_DEVELOPER", "content": [{"text": "d"}]}),
        ({"role": "user", "content": ""}, {"role": "ROLE_USER", "content": [{"text": ""}]}),
        (
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "ROLE_USER", "name": "ann", "content": [{"text": "a"}, {"text": "b"}]},
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}]},
            {
                "role": "ROLE_USER",
                "content": [{"image": {"data": PNG, "media_type": "image/png", "detail": "low"}}],
            },
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}]},
            {"role": "ROLE_USER", "content": [{"audio": {"data": SOUND, "media_type": "audio/wav"}}]},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "r", "refusal": None},
            {"role": "ROLE_ASSISTANT", "content": [{"text": "a"}], "reasoning": "r"},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "r"},
            {"role": "ROLE_ASSISTANT", "content": [{"text": "a"}], "reasoning": "r"},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "ROLE_ASSISTANT", "refusal": "no"},
        ),
        (CALLING, {"role": "ROLE_ASSISTANT", "tool_calls": [{"id": "c1", "name": "f", "arguments_text": "{}"}]}),
    ],
)
def test_every_message_kind_is_accepted(message: dict[str, object], expected: dict[str, object]) -> None:
    payload = payload_of(messages=[message, USER])
    assert MessageToDict(payload.messages[0], preserving_proto_field_name=True) == expected


def test_system_messages_are_accepted_anywhere_and_tool_results_answer_calls() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    payload = payload_of(
        messages=[{"role": "system", "content": "s"}, USER, CALLING, result, {"role": "system", "content": "t"}]
    )
    assert [message.role for message in payload.messages] == [1, 3, 4, 5, 1]
    assert payload.messages[3].tool_call_id == "c1"


def test_tools_keep_the_order_and_types_of_their_schema() -> None:
    schema = {"type": "object", "properties": {"b": {"minimum": 1}, "a": {"maximum": 1.0, "enum": [None, True, "x"]}}}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema, "strict": True}}
    payload = payload_of(
        tools=[tool, {"type": "web_search", "name": "w"}, {"type": "custom"}], parallel_tool_calls=False
    )
    assert len(payload.tools) == 1
    function = payload.tools[0].function
    assert (function.name, function.description, function.strict) == ("f", "d", True)
    properties = function.parameters.fields[1].value.object_value
    assert [field.name for field in properties.fields] == ["b", "a"]
    assert properties.fields[0].value.object_value.fields[0].value.WhichOneof("kind") == "integer_value"
    assert properties.fields[1].value.object_value.fields[0].value.WhichOneof("kind") == "number_value"
    assert payload.HasField("parallel_tool_calls")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", {"mode": "MODE_NONE"}),
        ("auto", {"mode": "MODE_AUTO"}),
        ("required", {"mode": "MODE_REQUIRED"}),
        ({"type": "function", "function": {"name": "f"}}, {"function_name": "f"}),
    ],
)
def test_every_tool_choice_is_accepted(choice: object, expected: dict[str, object]) -> None:
    payload = payload_of(tools=[FUNCTION], tool_choice=choice)
    assert MessageToDict(payload.tool_choice, preserving_proto_field_name=True) == expected


def test_schema_beside_type_json_schema_is_used() -> None:
    """As llama.cpp's server takes it; it was refused with 400."""
    wanted = payload_of(response_format={"type": "json_schema", "schema": {"type": "object"}}).response_format
    assert plain_object(wanted.json_schema.schema) == {"type": "object"}


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        ({"type": "text"}, "text"),
        ({"type": "json_object"}, "json_object"),
        (
            {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True}},
            "json_schema",
        ),
    ],
)
def test_every_response_format_is_accepted(wanted: dict[str, object], kind: str) -> None:
    assert payload_of(response_format=wanted).response_format.WhichOneof("kind") == kind


@pytest.mark.parametrize("name", ["schema", "value"])
def test_schema_beside_json_object_is_used(name: str) -> None:
    """huggingface-hub and clients of llama.cpp's server write it so; it was ignored without a warning."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    wanted = payload_of(response_format={"type": "json_object", name: schema}).response_format
    assert plain_object(wanted.json_schema.schema) == schema
    with pytest.raises(FieldError) as refused:
        payload_of(response_format={"type": "json_object", name: {"$ref": "file:///etc/passwd"}})
    assert refused.value.field == "response_format.schema.$ref"


def test_log_probabilities_choices_and_effort_are_passed_on() -> None:
    payload = payload_of(logprobs=True, top_logprobs=3, n=2, reasoning_effort="xhigh")
    assert (payload.logprobs, payload.top_logprobs, payload.choice_count) == (True, 3, 2)
    assert payload.reasoning_effort == chat_pb2.REASONING_EFFORT_XHIGH


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def listed(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize("schema", [nested(29), {"a": listed(43)}])
def test_deepest_accepted_schema_survives_serialization(schema: dict[str, object]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    request = generation_service_pb2.GenerateRequest(chat=payload_of(tools=[tool]))
    assert generation_service_pb2.GenerateRequest.FromString(request.SerializeToString()) == request


def image(url: str, **fields: str) -> dict[str, object]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url, **fields}}]}


def calling(*calls: Mapping[str, object]) -> dict[str, object]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def allowing(*names: str, mode: str = "auto") -> dict[str, object]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def bad(field: str, **fields: object) -> ParameterSet:
    return pytest.param(fields, field, id=f"{field}-{str(fields)[:60]}")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        bad("messages", messages=[]),
        bad("messages", messages=None),
        bad("messages", messages=[USER] * 10_001),
        bad("messages[0]", messages=["hi"]),
        bad("messages[1].role", messages=[USER, {"role": "robot", "content": "x"}]),
        bad("messages[0].role", messages=[{"content": "x"}]),
        bad("messages[0].content", messages=[{"role": "user"}]),
        bad("messages[0].content", messages=[{"role": "user", "content": None}]),
        bad("messages[0].content", messages=[{"role": "user", "content": 5}]),
        bad("messages[0].content", messages=[{"role": "user", "content": []}]),
        bad("messages[0].content[0]", messages=[{"role": "user", "content": ["x", 1]}]),
        bad("messages[0].content[0].type", messages=[{"role": "user", "content": [{"type": "video"}]}]),
        bad("messages[0].content[0].text", messages=[{"role": "user", "content": [{"type": "text"}]}]),
        bad("messages[0].content[0].text", messages=[{"role": "user", "content": [{"type": "text", "text": 1}]}]),
        bad("messages[0].content", messages=[{"role": "assistant"}]),
        bad("messages[0].tool_calls", messages=[{**CALLING, "role": "user", "content": "x"}]),
        bad("messages[0].tool_call_id", messages=[{"role": "tool", "content": "x"}]),
        bad("messages[0].tool_call_id", messages=[{"role": "tool", "content": "x", "tool_call_id": "c9"}]),
        bad("max_tokens", max_tokens=0),
        bad("max_tokens", max_tokens=-2),
        bad("max_tokens", max_tokens=2**31),
        bad("max_tokens", max_tokens=1.5),
        bad("max_tokens", max_tokens="5"),
        bad("max_tokens", max_tokens=True),
        bad("max_completion_tokens", max_completion_tokens=2**63),
        bad("n", n=0),
        bad("n", n=9),
        bad("n", n=10**9),
        bad("temperature", temperature=-1),
        bad("temperature", temperature=2.1),
        bad("temperature", temperature=1e308),
        bad("top_p", top_p=1.5),
        bad("top_k", top_k=-1),
        bad("min_p", min_p=2),
        bad("seed", seed=2**64),
        bad("presence_penalty", presence_penalty=3),
        bad("repeat_penalty", repeat_penalty=-1),
        bad("top_logprobs", logprobs=True, top_logprobs=21),
        bad("top_logprobs", top_logprobs=1),
        bad("logit_bias", logit_bias={"word": 1}),
        bad("logit_bias", logit_bias={str(2**31): 1}),
        bad("logit_bias", logit_bias={str(number): 1 for number in range(301)}),
        bad("logit_bias.5", logit_bias={"5": 101}),
        bad("stop", stop=5),
        bad("stop", stop=""),
        bad("stop[1]", stop=["a", ""]),
        bad("stop", stop=["x"] * 17),
        bad("stream", stream="yes"),
        bad("stream_options", stream_options={"include_usage": True}),
        bad("user", user="x" * 513),
        bad("store", store="yes"),
        bad("prompt_cache_options", prompt_cache_options="explicit"),
        bad("verbosity", verbosity="chatty"),
        bad("modalities[1]", modalities=["text", "video"]),
        bad("modalities", modalities="text"),
        bad("modalities", modalities=["text", "audio"]),
        bad("modalities", modalities=["text"] * 3),
        bad("web_search_options", web_search_options=True),
        bad("prediction.type", prediction={"type": "text", "content": "a"}),
        bad("prediction.content", prediction={"type": "content"}),
        bad("prediction.content", prediction={"type": "content", "content": 5}),
        bad("metadata", metadata={"k" * 65: "v"}),
        bad("metadata", metadata={str(number): "v" for number in range(17)}),
        bad("metadata.a", metadata={"a": "v" * 513}),
        bad("functions", functions={}),
        bad("functions[0].name", functions=[{"name": "a\nb"}]),
        bad("functions", functions=[{"name": "f"}] * 1025),
        bad("functions", functions=[{"name": "f"}], tools=[FUNCTION]),
        bad("functions", function_call="auto", tool_choice="auto"),
        bad("function_call", function_call="required"),
        bad("function_call.name", function_call={"name": "g"}, functions=[{"name": "f"}]),
        bad("messages[0].content[0].image_url.detail", messages=[image(PIXEL, detail="blurred")]),
        bad("messages[0].function_call", messages=[{**USER, "function_call": {"name": "f", "arguments": ""}}]),
        bad("messages[0].name", messages=[{"role": "function", "name": "f", "content": "x"}]),
        bad("messages[0].tool_calls[0].custom", messages=[calling({"id": "c", "type": "custom"})]),
        bad("tools", tools={}),
        bad("tools", tools=[FUNCTION] * 1025),
        bad("tools[0].function", tools=[{"type": "function"}]),
        bad("tools[0].function.name", tools=[{"type": "function", "function": {"name": "a\nb"}}]),
        bad("tools[0].function.name", tools=[{"type": "function", "function": {"name": "a" * 129}}]),
        bad(
            "tools[0].function.parameters",
            tools=[{"type": "function", "function": {"name": "f", "parameters": nested(30)}}],
        ),
        bad(
            "tools[0].function.parameters",
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": listed(44)}}}],
        ),
        bad(
            "tools[0].function.parameters",
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": 10**400}}}],
        ),
        bad("tool_choice", tool_choice="sometimes"),
        bad("tool_choice", tool_choice=7),
        bad("tool_choice", tool_choice="required"),
        bad("tool_choice.type", tools=[FUNCTION], tool_choice={"type": "custom"}),
        bad("tool_choice.type", tools=[FUNCTION], tool_choice={"type": "web_search"}),
        bad("tool_choice.function", tools=[FUNCTION], tool_choice={"type": "function"}),
        bad("tool_choice.allowed_tools", tools=[FUNCTION], tool_choice={"type": "allowed_tools"}),
        bad("tool_choice.allowed_tools.mode", tools=[FUNCTION], tool_choice=allowing("f", mode="none")),
        bad("tool_choice.allowed_tools.tools", tools=[FUNCTION], tool_choice=allowing()),
        bad("tool_choice.allowed_tools.tools[1].function.name", tools=[FUNCTION], tool_choice=allowing("f", "g")),
        bad(
            "tool_choice.allowed_tools.tools",
            tools=[FUNCTION],
            tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "custom"}]}},
        ),
        bad("tool_choice.function.name", tools=[FUNCTION], tool_choice={"type": "function", "function": {"name": "g"}}),
        bad("response_format.type", response_format={"type": "xml"}),
        bad("response_format.json_schema", response_format={"type": "json_schema"}),
        bad(
            "response_format.json_schema.schema",
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": 5}},
        ),
        bad("reasoning_effort", reasoning_effort="enormous"),
        bad("model", model=None),
        bad("allow_remote", allow_remote="yes"),
    ],
)
def test_invalid_value_error_names_its_field(fields: dict[str, object], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        payload_of(**fields)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")
    assert len(caught.value.message) < 700


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/a.png",
        "file:///etc/passwd",
        "ftp://host/a",
        "http://169.254.169.254/",
        "data:text/html;base64,AAAA",
        "data:image/svg+xml;base64,AAAA",
        "data:image/png,AAAA",
        "data:image/png;base64,",
        "data:image/png;base64,AA AA",
        "data:image/png;base64,AAA",
        "data:image/png;base64,ÄÄÄÄ",
        "",
    ],
)
def test_images_that_are_not_base64_data_urls_are_refused(url: str) -> None:
    with pytest.raises(FieldError) as caught:
        payload_of(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    assert caught.value.field == "messages[0].content[0].image_url.url"
    assert "169.254" not in caught.value.message


def test_only_allowed_tools_are_sent_to_the_model() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]
    payload = payload_of(tools=tools, tool_choice=allowing("h", "f", mode="required"))
    assert [tool.function.name for tool in payload.tools] == ["f", "h"]
    assert payload.tool_choice.mode == chat_pb2.ToolChoice.MODE_REQUIRED


def test_functions_are_tools_without_parallel_calls() -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    older = payload_of(functions=[function], function_call={"name": "f"})
    newer = payload_of(
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=False,
    )
    assert older == newer
    assert payload_of(functions=[function], function_call="none").tool_choice.mode == chat_pb2.ToolChoice.MODE_NONE


def test_legacy_results_answer_the_last_call_of_their_function() -> None:
    def call(arguments: str) -> dict[str, object]:
        return {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": arguments}}

    result = {"role": "function", "name": "f", "content": None}
    payload = payload_of(messages=[USER, call("1"), result, call("2"), {**result, "content": "two"}])
    calls = [message.tool_calls[0] for message in payload.messages if message.tool_calls]
    results = [message for message in payload.messages if message.role == chat_pb2.ROLE_TOOL]
    assert [call.arguments_text for call in calls] == ["1", "2"]
    assert [message.tool_call_id for message in results] == [call.id for call in calls]
    assert calls[0].id != calls[1].id
    assert [part.text for part in results[1].content] == ["two"]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
def test_a_result_with_nothing_in_it_ended_the_conversation(content: dict[str, object]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    payload = payload_of(messages=[USER, calling(call), {"role": "tool", "tool_call_id": "c1", **content}])
    assert payload.messages[2].tool_call_id == "c1"
    assert not payload.messages[2].content


@pytest.mark.parametrize("nameless", [{}, {"id": ""}, {"id": None}])
def test_history_calls_without_an_id_do_not_fail_the_conversation(nameless: dict[str, object]) -> None:
    calls = [{**nameless, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "ab"]
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "tool_call_id": "", "content": "2"}]
    payload = payload_of(messages=[USER, calling(*calls), *results, USER, calling(*calls), *results])
    made = [call.id for message in payload.messages for call in message.tool_calls]
    assert made == [message.tool_call_id for message in payload.messages if message.role == chat_pb2.ROLE_TOOL]
    assert len(set(made)) == 4


def test_custom_call_of_another_server_is_kept_in_the_conversation() -> None:
    made = {"id": "c1", "type": "custom", "custom": {"name": "shell", "input": 'echo "hi"'}}
    payload = payload_of(messages=[calling(made), {"role": "tool", "tool_call_id": "c1", "content": "hi"}])
    record = payload.messages[0].tool_calls[0]
    assert (record.name, json.loads(record.arguments_text)) == ("shell", {"input": 'echo "hi"'})


def test_original_image_size_maps_to_high_detail() -> None:
    assert payload_of(messages=[image(PIXEL, detail="original")]).messages[0].content[0].image.detail == "high"


def test_engine_only_fields_are_passed_through_in_their_form() -> None:
    given = {
        "verbosity": "low",
        "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]},
        "web_search_options": {"search_context_size": "low"},
    }
    assert plain_object(payload_of(**given).extra_parameters) == given


def test_text_as_the_only_modality_has_no_effect() -> None:
    assert payload_of(modalities=["text"]) == payload_of()


@pytest.mark.parametrize("modalities", [["audio"], ["text", "audio"]])
def test_audio_output_is_refused_as_unsupported(modalities: list[str]) -> None:
    with pytest.raises(FieldError) as caught:
        payload_of(modalities=modalities, audio={"voice": "alloy", "format": "wav"})
    assert (caught.value.reason, caught.value.traits.http_status) == (Reason.UNSUPPORTED_OPERATION, 501)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"store": False, "tools": [FUNCTION], "service_tier": "flex", "prompt_cache_retention": "24h"}, []),
        ({"metadata": {"a": "b"}, "safety_identifier": "u", "prompt_cache_options": {"mode": "explicit"}}, []),
        ({"tools": [{"type": "custom", "custom": {"name": "c"}}, FUNCTION, {"type": "x"}]}, ["tools[0]", "tools[2]"]),
        ({"audio": {"voice": "alloy", "format": "wav"}}, ["audio"]),
        ({"store": True}, ["store"]),
        ({"moderation": {"model": "m"}}, ["moderation"]),
        ({"x_unheard": 1}, ["x_unheard"]),
        ({"prompt_cache_options": {"ttl": "30m"}}, []),
        ({"prompt_cache_options": {"ttl": {"type": "auto"}}}, ["prompt_cache_options.ttl"]),
    ],
)
def test_accepted_but_unsupported_fields_are_reported(fields: dict[str, object], told: list[str]) -> None:
    raw = json.dumps({"model": "m", "messages": [USER], **fields}).encode()
    assert [warning.field for warning in warnings_of(parse(ChatRequest, raw, max_depth=64))] == told


def test_warnings_are_capped_per_answer() -> None:
    raw = json.dumps({"model": "m", "messages": [USER], "tools": [{"type": "custom"}] * 1000}).encode()
    assert len(warnings_of(parse(ChatRequest, raw, max_depth=64))) == 64


def test_tool_and_answer_schemas_share_one_size_limit() -> None:
    """Each had the bytes and patterns of a whole request, though the limit is one for both."""
    schema = {"description": "x" * 600}
    fields = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    raw = json.dumps({"model": "m", "messages": [USER], **fields}).encode()
    limits = RequestLimits(schemas=SchemaLimits(max_total_bytes=1024))
    with pytest.raises(FieldError, match="at most 1024 bytes together") as refused:
        to_payload(parse(ChatRequest, raw, max_depth=64), limits)
    assert refused.value.field == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("given", "text"), [("", ""), ('{"q": "cut', '{"q": "cut'), (None, "{}"), ({"q": 1}, '{"q":1}')]
)
def test_arguments_of_an_earlier_call_may_be_any_json(given: object, text: str) -> None:
    called = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": given}}]}
    result = {"role": "tool", "tool_call_id": "a", "content": "error"}
    found = payload_of(messages=[{"role": "user", "content": "x"}, called, result])
    assert found.messages[1].tool_calls[0].arguments_text == text


@pytest.mark.parametrize(
    "part",
    [
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}},
        {"type": "image_url", "image_url": {"url": "https://elsewhere.example/a.png"}},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "x"}},
    ],
)
def test_unreadable_content_of_earlier_turns_does_not_fail_the_conversation(part: dict[str, object]) -> None:
    first = {"role": "user", "content": [part]}
    messages = [first, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
    payload, warnings = to_chat(
        parse(ChatRequest, json.dumps({"model": "m", "messages": messages}).encode(), max_depth=64), LIMITS
    )
    assert "left out" in payload.messages[0].content[0].text
    assert [warning.field.startswith("messages[0].content[0]") for warning in warnings] == [True]
    with pytest.raises(FieldError, match=r"messages\[0\].content\[0\]"):
        payload_of(messages=[first])


def test_text_file_is_read() -> None:
    file = {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,dGVhbA=="}}
    assert payload_of(messages=[{"role": "user", "content": [file]}]).messages[0].content[0].text == "a.txt\nteal"


def test_result_without_its_call_in_the_history_is_read_as_text() -> None:
    orphan = {"role": "tool", "tool_call_id": "gone", "content": "a.txt"}
    messages = [orphan, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
    found = payload_of(messages=messages)
    assert found.messages[0].role == chat_pb2.ROLE_USER
    assert found.messages[0].content[-1].text == "a.txt"


def _history_of(*messages: object) -> tuple[chat_pb2.ChatPayload, list[str]]:
    raw = json.dumps({"model": "m", "messages": [USER, *messages, USER]}).encode()
    payload, warnings = to_chat(parse(ChatRequest, raw, max_depth=64), LIMITS)
    return payload, [warning.field for warning in warnings]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"temperature": 21}, '{"temperature":21}'),
        ([{"temperature": 21}], '[{"temperature":21}]'),
        (21, "21"),
        (True, "true"),
        ({"type": "text", "text": "warm"}, "warm"),
        (["warm"], "warm"),
    ],
)
def test_tool_result_that_is_any_json_is_read_as_text(content: object, text: str) -> None:
    payload, _ = _history_of(CALLING, {"role": "tool", "tool_call_id": "c1", "content": content})
    assert [part.text for part in payload.messages[2].content] == [text]


def test_plain_strings_among_content_parts_are_texts() -> None:
    payload = payload_of(messages=[{"role": "user", "content": ["hi", {"type": "text", "text": "you"}]}])
    assert [part.text for part in payload.messages[0].content] == ["hi", "you"]


def test_unknown_role_is_the_users_in_earlier_turns_and_rejected_in_the_last() -> None:
    odd = {"role": "critic", "content": "too long"}
    payload, warned = _history_of(odd, {"role": "assistant", "content": "ok"})
    assert (payload.messages[1].role, warned) == (chat_pb2.ROLE_USER, ["messages[1].role"])
    with pytest.raises(FieldError) as refused:
        payload_of(messages=[odd])
    assert refused.value.field == "messages[0].role"


@pytest.mark.parametrize("call", [{"function": {"arguments": "{}"}}, {"function": {"name": ""}}, {"type": "builtin"}])
def test_earlier_tool_call_without_a_name_keeps_the_conversation(call: Mapping[str, object]) -> None:
    assistant = {"role": "assistant", "tool_calls": [{"id": "c1", **call}]}
    payload, _ = _history_of(assistant, {"role": "tool", "tool_call_id": "c1", "content": "done"})
    assert [(made.id, made.name) for made in payload.messages[1].tool_calls] == [("c1", "unknown")]
    assert payload.messages[2].tool_call_id == "c1"


def test_long_tool_call_id_with_a_signature_is_kept_whole() -> None:
    long = "call_1__thought__" + "x" * 5_000
    call = {"id": long, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": long, "content": "done"}
    payload, _ = _history_of({"role": "assistant", "tool_calls": [call]}, result)
    assert (payload.messages[1].tool_calls[0].id, payload.messages[2].tool_call_id) == (long, long)
