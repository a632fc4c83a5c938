"""Validates payloads of public gRPC calls, one function per operation.

The HTTP edge has its own, stricter parser with the same limits.
"""

import math
from collections.abc import Mapping
from typing import Any

from weft.api.common.v1 import (
    audio_pb2,
    chat_pb2,
    completion_pb2,
    embedding_pb2,
    image_pb2,
    json_value_pb2,
    rerank_pb2,
    sampling_pb2,
    tokenize_pb2,
    warning_pb2,
)
from weft.dispatch.declared_presets import OF_CHATS
from weft.dispatch.parameter_checks import (
    IMAGE_FORMATS,
    MAX_DOCUMENTS,
    MAX_GUIDANCE,
    MAX_IMAGE_PROMPT_CHARS,
    MAX_IMAGE_SEED,
    MAX_IMAGE_STEPS,
    MAX_IMAGES,
    MAX_PARTIAL_IMAGES,
    MAX_SOURCE_IMAGES,
    MAX_SPEECH_CHARS,
    MAX_SPEED,
    MAX_TRANSCRIPTION_PROMPT_CHARS,
    MAX_WORD_CHARS,
    MIN_SPEED,
    SPEECH_FORMATS,
    check_extra,
)
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.schemas.json_schema import SchemaFault, SchemaLimits
from weft.kernel.schemas.schema_guard import SchemaGuard
from weft.kernel.text.json_objects import plain_object, to_json_object

MAX_MESSAGES = 10_000
MAX_CHOICES = 8
MAX_TOP_LOGPROBS = 20
MAX_EMBEDDING_INPUTS = 2_048
MAX_TOOLS = 1_024
MAX_PROMPTS = 128
"""Maximum prompts of one text completion."""


def check_chat(
    payload: chat_pb2.ChatPayload, schemas: SchemaLimits, field: str = "payload"
) -> list[warning_pb2.Warning]:
    """Returns warnings. Raises INVALID_ARGUMENT naming the field, which is `field` or within it.

    Removes ineffective upper bounds from schemas in the payload, and parts of tool schemas that engines should not see,
    with a warning: see SchemaGuard.
    """
    check_count(f"{field}.messages", len(payload.messages), 1, MAX_MESSAGES)
    for index, message in enumerate(payload.messages):
        if message.role not in chat_pb2.Role.values() or message.role == chat_pb2.ROLE_UNSPECIFIED:
            raise invalid_field(f"{field}.messages[{index}].role", "must be set to a known role")
        for position, part in enumerate(message.content):
            if part.WhichOneof("kind") is None:
                raise invalid_field(f"{field}.messages[{index}].content[{position}]", "must be text, image or audio")
    for index, tool in enumerate(payload.tools):
        if not tool.function.name:
            raise invalid_field(f"{field}.tools[{index}].function.name", "must not be empty")
    check_count(f"{field}.tools", len(payload.tools), 0, MAX_TOOLS)
    if payload.HasField("choice_count"):
        check_number(f"{field}.choice_count", payload.choice_count, 1, MAX_CHOICES)
    if payload.HasField("top_logprobs"):
        check_number(f"{field}.top_logprobs", payload.top_logprobs, 0, MAX_TOP_LOGPROBS)
    _check_sampling(payload.sampling, f"{field}.sampling")
    check_extra(payload.extra_parameters, f"{field}.extra_parameters")
    return _guard_schemas(payload, schemas, field)


def _guard_schemas(payload: chat_pb2.ChatPayload, limits: SchemaLimits, field: str) -> list[warning_pb2.Warning]:
    guard, warnings = SchemaGuard(limits), list[warning_pb2.Warning]()
    for index, tool in enumerate(payload.tools):
        if tool.function.HasField("parameters"):
            where = f"{field}.tools[{index}].function.parameters"
            schema = plain_object(tool.function.parameters)
            fitted, faults = guard.fitted(schema, where)
            _replace(tool.function.parameters, schema, fitted, where)
            warnings += [part_left_out(fault) for fault in faults]
    if payload.response_format.HasField("json_schema"):
        where, document = f"{field}.response_format.json_schema.schema", payload.response_format.json_schema.schema
        schema = plain_object(document)
        _replace(document, schema, guard.require_safe(schema, where), where)
    return warnings


def part_left_out(fault: SchemaFault) -> warning_pb2.Warning:
    """Returns the warning for a removed part of a tool's schema."""
    message = f"{fault.message}; this part was left out"
    return warning_pb2.Warning(code=warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER, field=fault.field, message=message)


def _replace(
    document: json_value_pb2.JsonObject, schema: Mapping[str, Any], safe: Mapping[str, Any], field: str
) -> None:
    if safe is not schema:
        document.CopyFrom(to_json_object(safe, field))


def check_completion(payload: completion_pb2.CompletionPayload) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    check_count("payload.prompts", len(payload.prompts), 1, MAX_PROMPTS)
    _check_prompts("payload.prompts", list(payload.prompts))
    if payload.HasField("choice_count"):
        check_number("payload.choice_count", payload.choice_count, 1, MAX_CHOICES)
    if payload.HasField("logprobs"):
        check_number("payload.logprobs", payload.logprobs, 0, MAX_TOP_LOGPROBS)
    _check_sampling(payload.sampling, "payload.sampling")
    check_extra(payload.extra_parameters, "payload.extra_parameters")


def _check_sampling(sampling: sampling_pb2.SamplingParams, field: str) -> None:
    """Raises INVALID_ARGUMENT naming the field. Removes a limit of -1 tokens, which means no limit."""
    if sampling.max_tokens == -1:
        sampling.ClearField("max_tokens")
    for name in OF_CHATS:
        if sampling.HasField(name):  # type: ignore[arg-type]  # both are fields
            raise invalid_field(f"{field}.{name}", "is for presets; a chat has its own field")
    check_message(sampling, field)


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


MAX_TOP_N = 2**31 - 1


def check_rerank(payload: rerank_pb2.RerankPayload) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    if not payload.query:
        raise invalid_field("payload.query", "must not be empty")
    check_count("payload.documents", len(payload.documents), 1, MAX_DOCUMENTS)
    for index, document in enumerate(payload.documents):
        if not document:
            raise invalid_field(f"payload.documents[{index}]", "must not be empty")
    if payload.HasField("top_n"):
        check_number("payload.top_n", payload.top_n, 1, MAX_TOP_N)


def check_tokenize(payload: tokenize_pb2.TokenizePayload, schemas: SchemaLimits) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    match payload.WhichOneof("kind"):
        case None:
            raise invalid_field("payload", "must have a text or a chat")
        case "chat":
            check_chat(payload.chat, schemas, "payload.chat")


def check_images(payload: image_pb2.ImagePayload) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    _check_text("payload.prompt", payload.prompt, MAX_IMAGE_PROMPT_CHARS)
    if payload.HasField("count"):
        check_number("payload.count", payload.count, 1, MAX_IMAGES)
    for name in ("size", "quality"):
        _check_text(f"payload.{name}", getattr(payload, name), MAX_WORD_CHARS, may_be_empty=True)
    _check_word("payload.output_format", payload.output_format, IMAGE_FORMATS)
    check_count("payload.images", len(payload.images), 0, MAX_SOURCE_IMAGES)
    if payload.HasField("mask") and not payload.images:
        raise invalid_field("payload.mask", "needs a source image for the mask")
    check_extra(payload.extra_parameters, "payload.extra_parameters")
    _check_text("payload.negative_prompt", payload.negative_prompt, MAX_IMAGE_PROMPT_CHARS, may_be_empty=True)
    check_number("payload.partial_images", payload.partial_images, 0, MAX_PARTIAL_IMAGES)
    for name, most in (
        ("steps", MAX_IMAGE_STEPS),
        ("guidance", MAX_GUIDANCE),
        ("strength", 1),
        ("seed", MAX_IMAGE_SEED),
    ):
        if payload.HasField(name):  # type: ignore[arg-type]  # names of the message
            check_number(f"payload.{name}", getattr(payload, name), 1 if name == "steps" else 0, most)


def check_transcription(payload: audio_pb2.TranscriptionPayload) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    if not payload.audio.data:
        raise invalid_field("payload.audio", "must not be empty")
    _check_text("payload.language", payload.language, MAX_WORD_CHARS, may_be_empty=True)
    _check_text("payload.prompt", payload.prompt, MAX_TRANSCRIPTION_PROMPT_CHARS, may_be_empty=True)
    if payload.HasField("temperature"):
        check_number("payload.temperature", payload.temperature, 0, 1)


def check_speech(payload: audio_pb2.SpeechPayload) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    _check_text("payload.input", payload.input, MAX_SPEECH_CHARS)
    _check_text("payload.voice", payload.voice, MAX_WORD_CHARS, may_be_empty=True)
    _check_word("payload.format", payload.format, SPEECH_FORMATS)
    if payload.HasField("speed"):
        check_number("payload.speed", payload.speed, MIN_SPEED, MAX_SPEED)
    _check_text("payload.instructions", payload.instructions, MAX_SPEECH_CHARS, may_be_empty=True)


def _check_text(field: str, text: str, most: int, *, may_be_empty: bool = False) -> None:
    if not text and not may_be_empty:
        raise invalid_field(field, "must not be empty")
    if len(text) > most:
        raise invalid_field(field, f"must have at most {most} characters")


def _check_word(field: str, word: str, known: tuple[str, ...]) -> None:
    if word and word not in known:
        raise invalid_field(field, f"must be one of {', '.join(known)}")
