"""The schema of POST /v1/chat/completions."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, Tag, model_validator
from typing_extensions import override

from gateway.intake.request_model import (
    AS_TEXT,
    JsonMap,
    OpenModel,
    StopAtFirstError,
    StrictModel,
    by_shape,
    text_or_list,
)
from gateway.openai.sampling import MAX_TOP_LOGPROBS, GenerationRequest, TokenLimit
from weft.durable.batches import MAX_METADATA, MAX_METADATA_VALUE_CHARS

MAX_NAME_CHARS = 64
MAX_FUNCTIONS = 1024

MAX_FUNCTION_NAME_CHARS = 128
FUNCTION_NAME_PATTERN = r"^(?:[A-Za-z0-9_.-]+|[A-Za-z0-9_-][A-Za-z0-9_.-]*(?:[/:][A-Za-z0-9_-][A-Za-z0-9_.-]*)+)$"
FunctionName = Annotated[str, Field(min_length=1, max_length=MAX_FUNCTION_NAME_CHARS, pattern=FUNCTION_NAME_PATTERN)]
"""Name of a function, as MCP servers write it; the runner maps names that an engine does not support."""


class FunctionDefinition(StrictModel):
    """A function the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: JsonMap | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None


class ToolDefinition(StrictModel):
    """A tool. Types other than `function` are accepted and dropped."""

    type: str
    function: FunctionDefinition | None = None

    @override
    def uses(self, name: str) -> bool:
        # Another type has a warning of its own.
        return self.type != "function"


class NamedFunction(StrictModel):
    """The function that must be called."""

    name: FunctionName


class AllowedTool(StrictModel):
    """One of the tools that may be called."""

    type: str
    function: NamedFunction | None = None


class AllowedTools(StrictModel):
    """The tools of the request that may be called, and whether one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_FUNCTIONS), StopAtFirstError()]


class ToolChoiceObject(StrictModel):
    """A tool choice by one or several names. `custom` is refused."""

    type: Literal["function", "allowed_tools", "custom"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~text")] | Annotated[ToolChoiceObject, Tag("~object")],
    by_shape("must be 'none', 'auto', 'required', a named function or allowed tools"),
]

FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("~text")] | Annotated[NamedFunction, Tag("~object")],
    by_shape("must be 'none', 'auto' or a named function"),
]
"""`function_call`, the older form of `tool_choice`."""

MAX_TOOL_CALL_ID_CHARS = 65_536
"""Long, because some proxies write the signatures of a provider's thinking into ids."""
MAX_LABEL_CHARS = 512

ToolCallId = Annotated[str, Field(max_length=MAX_TOOL_CALL_ID_CHARS)]
"""Id of a tool call; empty or missing if the server of an earlier answer sent none."""


CallArguments = Annotated[
    Annotated[str, Tag("~text")] | Annotated[JsonMap, Tag("~object")], by_shape("must be a string or an object")
]
"""The arguments of an earlier call: JSON as text, as models write it, or the object itself, as some clients do."""


def arguments_text(given: object) -> str:
    """Returns the arguments of an earlier call as JSON text. An empty list is PHP's empty object."""
    if isinstance(given, str):
        return "{}" if given.strip() == "[]" else given
    # Not `encode_json`, which rejects integers beyond 64 bits.
    return json.dumps({} if given is None or given == [] else given, ensure_ascii=False, separators=(",", ":"))


class ImageUrl(StrictModel):
    """An image as a data: URL, or a URL that the gateway fetches."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    """`original` counts as `high`."""


class InputAudio(StrictModel):
    """A recording in base64 or as a data: URL."""

    data: str
    format: Any = None
    """Accepted and not used: the bytes decide."""


class AudioUrl(StrictModel):
    """A recording as a data: URL, as clients of vLLM send it."""

    url: str


PART_MEMBERS = {name: name for name in ("text", "image_url", "input_audio", "audio_url", "refusal")}
"""The member with the content of a part, by its type."""


class ContentPart(StrictModel):
    """A part of a message. `type` names the field that holds it."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None
    input_audio: InputAudio | None = None
    audio_url: AudioUrl | None = None

    @override
    def uses(self, name: str) -> bool:
        # A part of an unknown type becomes text.
        return self.type not in PART_MEMBERS


class FunctionCall(OpenModel):
    """An earlier call of the assistant."""

    name: Annotated[str, Field(max_length=256)] | None = None
    """Missing or empty if the model omitted it."""
    arguments: CallArguments | None = None

    @property
    def arguments_text(self) -> str:
        """The arguments as text."""
        return arguments_text(self.arguments)


class CustomCall(StrictModel):
    """An earlier call of a custom tool, made by the assistant of another server."""

    name: str = Field(min_length=1, max_length=256)
    input: str


class ToolCallMade(OpenModel):
    """A tool call in the conversation so far."""

    id: ToolCallId | None = None
    type: Annotated[str, Field(max_length=MAX_NAME_CHARS)] = "function"
    """`custom`: the content is in `custom`; otherwise in `function`."""
    function: FunctionCall | None = None
    custom: CustomCall | None = None


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[ContentPart], StopAtFirstError(), Tag("~list")],
    text_or_list("must be a string or a list of content parts"),
]


MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RESULT_ROLES = ("tool", "function")


class Message(StrictModel):
    """One turn of the conversation."""

    role: Annotated[str, Field(max_length=MAX_NAME_CHARS, json_schema_extra={"enum": list(MESSAGE_ROLES)})]
    """`function`: the older form of `tool`; it names the function in `name`. Earlier turns may have others."""
    content: Content | None = None
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    tool_calls: Annotated[list[ToolCallMade], Field(max_length=1024), StopAtFirstError()] | None = None
    tool_call_id: ToolCallId | None = None
    function_call: FunctionCall | None = None
    """The older form of `tool_calls`."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another spelling of `reasoning_content`, which some clients send back."""
    refusal: str | None = None

    @override
    def uses(self, name: str) -> bool:
        # Only turns of the assistant are an engine's.
        return self.role == "assistant"

    @model_validator(mode="before")
    @classmethod
    def _read_loose_content(cls, data: object) -> object:
        """Accepts results of tools as any JSON, and parts as text or a single part: clients send all of these."""
        if not isinstance(data, dict):
            return data
        content = given = data.get("content")
        if isinstance(content, dict) and _is_part(content):
            content = [content]
        elif isinstance(content, list) and all(isinstance(part, str) or _is_part(part) for part in content):
            content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        elif data.get("role") in _RESULT_ROLES and not isinstance(content, str | None):
            content = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        return data if content is given else {**data, "content": content}


def _is_part(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


class JsonSchemaDefinition(StrictModel):
    """A named schema the answer must follow."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=r"^[A-Za-z0-9_.-]+$")]
    description: str | None = None
    schema_: JsonMap | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormatChoice(StrictModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaDefinition | None = None
    schema_: JsonMap | None = Field(default=None, validation_alias=AliasChoices("schema", "value"))
    """The schema as clients of llama.cpp's server and Hugging Face send it, instead of `json_schema`."""


class Prediction(OpenModel):
    """Text that the answer is likely to repeat. Passed to the engine."""

    type: Literal["content"]
    content: Content


class TemplateArguments(OpenModel):
    """Arguments of the model's chat template. Other fields are passed to it."""

    enable_thinking: bool | None = None


class ChatRequest(GenerationRequest):
    """A chat completion."""

    messages: Annotated[list[Message], Field(min_length=1), StopAtFirstError()]
    max_completion_tokens: TokenLimit = None
    """The newer name of `max_tokens`; takes precedence."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[ToolDefinition], StopAtFirstError()] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormatChoice | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: bool | None = None
    """Extension: whether a model that supports thinking does so before it answers. Absent: the model's default."""
    chat_template_kwargs: TemplateArguments | None = None
    """Extension: arguments of the model's chat template, such as `enable_thinking`, as on other servers."""
    functions: Annotated[list[FunctionDefinition], Field(max_length=MAX_FUNCTIONS), StopAtFirstError()] | None = None
    """The older form of `tools`; calls in the answer then also have the older form."""
    function_call: FunctionChoice | None = None
    """The older form of `tool_choice`."""
    modalities: Annotated[list[Literal["text", "audio"]], Field(max_length=2), StopAtFirstError()] | None = None
    """Answers are text; `audio` is refused."""
    audio: Any = None
    """The voice of an answer. Accepted and not used: answers are text."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Passed to the engine, as `prediction` and `web_search_options`."""
    prediction: Prediction | None = None
    web_search_options: JsonMap | None = None
    store: bool | None = None
    """Chat answers are not stored; true gives a warning."""
    moderation: Any = None
    """Not supported; gives a warning."""
    service_tier: Any = None
    """Accepted and not used, like the fields below: they concern OpenAI's own service."""
    safety_identifier: Any = None
    prompt_cache_retention: Any = None
    metadata: (
        Annotated[
            dict[str, Annotated[str, Field(max_length=MAX_METADATA_VALUE_CHARS), AS_TEXT]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    """Keys have at most 64 characters."""

    @property
    @override
    def turns(self) -> Sequence[tuple[str | None, object]]:
        return [(message.role, message.content) for message in self.messages]
