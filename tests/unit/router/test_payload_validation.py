"""Payloads of the public gRPC API: their new fields are bounded as over HTTP, and name no agents."""

import math
from collections.abc import Callable, Iterator, Mapping

import pytest
from google.protobuf.descriptor import Descriptor
from kit.refusals import refused

from gateway.gateway_config import RequestLimits
from weft.api.common.v1 import agent_behaviour_pb2, chat_pb2, completion_pb2, json_value_pb2, sampling_pb2
from weft.api.router.v1 import inference_service_pb2
from weft.api.runner.v1 import generation_service_pb2
from weft.dispatch.parameter_checks import MAX_EXTRA_BYTES, MAX_EXTRA_FIELDS
from weft.dispatch.payload_checks import MAX_PROMPTS, check_chat, check_completion
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.schemas.json_schema import SchemaLimits
from weft.kernel.text.json_objects import plain_object, to_json_object

Check = Callable[[json_value_pb2.JsonObject], None]


def chat_with(extra: json_value_pb2.JsonObject) -> None:
    payload = chat_pb2.ChatPayload(extra_parameters=extra, thinking=False)
    payload.messages.add(role=chat_pb2.ROLE_USER).content.add(text="hi")
    check_chat(payload, SchemaLimits())


def completion_with(extra: json_value_pb2.JsonObject) -> None:
    payload = completion_pb2.CompletionPayload(extra_parameters=extra)
    payload.prompts.add(text="hi")
    check_completion(payload)


def extra_of(members: Mapping[str, str]) -> json_value_pb2.JsonObject:
    extra = json_value_pb2.JsonObject()
    for name, text in members.items():
        extra.fields.add(name=name).value.string_value = text
    return extra


def test_a_limit_of_minus_one_token_is_none() -> None:
    """It was refused."""
    payload = chat_pb2.ChatPayload(sampling=sampling_pb2.SamplingParams(max_tokens=-1))
    payload.messages.add(role=chat_pb2.ROLE_USER)
    check_chat(payload, SchemaLimits())
    assert not payload.sampling.HasField("max_tokens")
    payload.sampling.max_tokens = -2
    with pytest.raises(FieldError, match=r"sampling\.max_tokens"):
        check_chat(payload, SchemaLimits())


def test_tools_and_prompts_are_limited_as_over_http() -> None:
    """Requests that the live routes serve can be tasks and lines of batches."""
    tool = chat_pb2.Tool(function=chat_pb2.FunctionTool(name="f"))
    chat = chat_pb2.ChatPayload(tools=[tool] * RequestLimits().max_tools)
    chat.messages.add(role=chat_pb2.ROLE_USER).content.add(text="hi")
    check_chat(chat, SchemaLimits())
    chat.tools.add().function.name = "f"
    with refused(field="payload.tools"):
        check_chat(chat, SchemaLimits())
    text = completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text="hi")] * MAX_PROMPTS)
    check_completion(text)
    text.prompts.add(text="hi")
    with refused(field="payload.prompts"):
        check_completion(text)


@pytest.mark.parametrize("check", [chat_with, completion_with])
@pytest.mark.parametrize(
    "members",
    [
        {},
        {f"x{n}": "" for n in range(MAX_EXTRA_FIELDS)},
        {"x" * 128: "y"},
        {"a": "x" * (MAX_EXTRA_BYTES - 10)},
    ],
    ids=["none", "as many as may be", "a long name", "as much as may be"],
)
def test_extra_parameters_within_the_limits_pass(check: Check, members: dict[str, str]) -> None:
    check(extra_of(members))


@pytest.mark.parametrize("check", [chat_with, completion_with])
@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({f"x{n}": "" for n in range(MAX_EXTRA_FIELDS + 1)}, ""),
        ({"a": "x" * MAX_EXTRA_BYTES}, ".a"),
        ({"a": "1", "b": "ü" * (MAX_EXTRA_BYTES // 2)}, ".b"),
        ({"a": "x" * MAX_EXTRA_BYTES * 4}, ""),
        ({"": "x"}, ".fields[0].name"),
        ({"a": "", "x" * 129: "y"}, ".fields[1].name"),
    ],
    ids=["too many", "too much", "too much together", "far too much", "no name", "too long a name"],
)
def test_too_many_or_too_large_extra_parameters_are_refused(check: Check, members: dict[str, str], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        check(extra_of(members))
    assert caught.value.field == f"payload.extra_parameters{field}"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_number_not_representable_in_json_is_refused(number: float) -> None:
    extra = json_value_pb2.JsonObject()
    extra.fields.add(name="a").value.array_value.values.add(number_value=number)
    with refused(field="payload.extra_parameters.a"):
        chat_with(extra)


def test_duplicate_parameter_names_are_refused() -> None:
    extra = extra_of({"a": "1"})
    extra.fields.add(name="a").value.bool_value = True
    with refused(field="payload.extra_parameters"):
        chat_with(extra)


def _within(message: Descriptor, seen: set[str]) -> Iterator[str]:
    if message.full_name in seen:
        return
    seen.add(message.full_name)
    yield message.full_name
    for field in message.fields:
        if field.message_type is not None:
            yield from _within(field.message_type, seen)


def test_public_request_cannot_contain_agent_behavior() -> None:
    behaviour = agent_behaviour_pb2.AgentBehaviour.DESCRIPTOR.full_name
    service = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"]
    for method in service.methods:
        assert behaviour not in set(_within(method.input_type, set())), method.name
    assert behaviour in set(_within(generation_service_pb2.GenerateRequest.DESCRIPTOR, set())), "the search finds it"


def with_schemas(tool: Mapping[str, object], form: Mapping[str, object]) -> chat_pb2.ChatPayload:
    payload = chat_pb2.ChatPayload()
    payload.messages.add(role=chat_pb2.ROLE_USER).content.add(text="hi")
    function = payload.tools.add().function
    function.name = "f"
    function.parameters.CopyFrom(to_json_object(tool, "tool"))
    payload.response_format.json_schema.schema.CopyFrom(to_json_object(form, "form"))
    return payload


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/nowhere"}}}, ".properties.a.$ref"),
        ({"required": "a"}, ".required"),
        ({"pattern": "(?=a)"}, ".pattern"),
        ({"$ref": "file:///etc/passwd"}, ".$ref"),
        ({"minItems": 10**9}, ".minItems"),
    ],
    ids=str,
)
def test_a_wrong_schema_of_a_tool_loses_the_part_over_grpc_too_and_another_is_refused(
    schema: dict[str, object], place: str
) -> None:
    """One tool of a server that a caller does not own failed every request with it, over gRPC alone."""
    payload = with_schemas(schema, {})
    (warning,) = check_chat(payload, SchemaLimits())
    assert warning.field == f"payload.tools[0].function.parameters{place}"
    assert warning.message.endswith("; this part was left out")
    assert plain_object(payload.tools[0].function.parameters) != schema
    assert not check_chat(payload, SchemaLimits())
    with pytest.raises(FieldError) as refused:
        check_chat(with_schemas({}, schema), SchemaLimits())
    assert refused.value.field == f"payload.response_format.json_schema.schema{place}"


def test_unreachable_upper_bound_is_dropped_over_grpc_too() -> None:
    payload = with_schemas({"properties": {"a": {"maxLength": 10**9, "minLength": 1}}}, {"type": "object"})
    check_chat(payload, SchemaLimits())
    assert plain_object(payload.tools[0].function.parameters) == {"properties": {"a": {"minLength": 1}}}
    assert plain_object(payload.response_format.json_schema.schema) == {"type": "object"}
