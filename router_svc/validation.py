"""What a public gRPC payload must look like. The HTTP edge has its own, stricter parser; these are the same bounds."""

import math

from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, json_value_pb2
from weft.dispatch.parameter_checks import check_extra, check_sampling
from weft.dispatch.schema_guard import SchemaGuard, SchemaLimits
from weft.kernel.errors import invalid_field
from weft.kernel.json_objects import plain_object, to_json_object

MAX_MESSAGES = 10_000
MAX_CHOICES = 8
MAX_TOP_LOGPROBS = 20
MAX_EMBEDDING_INPUTS = 2_048
MAX_TOOLS = 128


def check_chat(payload: chat_pb2.ChatPayload, schemas: SchemaLimits, field: str = "payload") -> None:
    """Raises INVALID_ARGUMENT naming the field, which is `field` or in it.

    Upper bounds in its schemas that are none are left out of the payload: see SchemaGuard.require_safe.
    """
    check_count(f"{field}.messages", len(payload.messages), 1, MAX_MESSAGES)
    for index, message in enumerate(payload.messages):
        if message.role not in chat_pb2.Role.values() or message.role == chat_pb2.ROLE_UNSPECIFIED:
            raise invalid_field(f"{field}.messages[{index}].role", "must be set to a known role")
        for place, part in enumerate(message.content):
            if part.WhichOneof("kind") is None:
                raise invalid_field(f"{field}.messages[{index}].content[{place}]", "must be text, image or audio")
    for index, tool in enumerate(payload.tools):
        if not tool.function.name:
            raise invalid_field(f"{field}.tools[{index}].function.name", "must not be empty")
    check_count(f"{field}.tools", len(payload.tools), 0, MAX_TOOLS)
    if payload.HasField("choice_count"):
        check_number(f"{field}.choice_count", payload.choice_count, 1, MAX_CHOICES)
    if payload.HasField("top_logprobs"):
        check_number(f"{field}.top_logprobs", payload.top_logprobs, 0, MAX_TOP_LOGPROBS)
    check_sampling(payload.sampling, f"{field}.sampling")
    check_extra(payload.extra_parameters, f"{field}.extra_parameters")
    _guard_schemas(payload, schemas, field)


def _guard_schemas(payload: chat_pb2.ChatPayload, limits: SchemaLimits, field: str) -> None:
    guard = SchemaGuard(limits)
    for index, tool in enumerate(payload.tools):
        if tool.function.HasField("parameters"):
            _guard(tool.function.parameters, guard, f"{field}.tools[{index}].function.parameters")
    if payload.response_format.HasField("json_schema"):
        _guard(payload.response_format.json_schema.schema, guard, f"{field}.response_format.json_schema.schema")


def _guard(document: json_value_pb2.JsonObject, guard: SchemaGuard, field: str) -> None:
    schema = plain_object(document)
    safe = guard.require_safe(schema, field)
    if safe is not schema:
        document.CopyFrom(to_json_object(safe, field))


def check_completion(payload: completion_pb2.CompletionPayload) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    check_count("payload.prompts", len(payload.prompts), 1, MAX_CHOICES)
    _check_prompts("payload.prompts", list(payload.prompts))
    if payload.HasField("choice_count"):
        check_number("payload.choice_count", payload.choice_count, 1, MAX_CHOICES)
    if payload.HasField("logprobs"):
        check_number("payload.logprobs", payload.logprobs, 0, MAX_TOP_LOGPROBS)
    check_sampling(payload.sampling, "payload.sampling")
    check_extra(payload.extra_parameters, "payload.extra_parameters")


def check_embedding(payload: embedding_pb2.EmbeddingPayload) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    check_count("payload.inputs", len(payload.inputs), 1, MAX_EMBEDDING_INPUTS)
    _check_prompts("payload.inputs", list(payload.inputs))
    if payload.HasField("dimensions"):
        check_number("payload.dimensions", payload.dimensions, 1, 2**31 - 1)


def _check_prompts(field: str, prompts: list[completion_pb2.PromptInput]) -> None:
    for index, prompt in enumerate(prompts):
        if prompt.WhichOneof("kind") is None:
            raise invalid_field(f"{field}[{index}]", "must be text or tokens")
        if prompt.WhichOneof("kind") == "tokens" and not prompt.tokens.ids:
            raise invalid_field(f"{field}[{index}].tokens", "must not be empty")


def check_number(field: str, value: float, low: float, high: float) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    if not math.isfinite(value) or not low <= value <= high:
        raise invalid_field(field, f"must be {low:g} to {high:g}")


def check_count(field: str, count: int, low: int, high: int) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    if not low <= count <= high:
        raise invalid_field(field, f"must have {low} to {high} entries, has {count}")
