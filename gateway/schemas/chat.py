"""POST /v1/chat/completions."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, Tag

from gateway.schemas.base import MAX_INT32, JsonMap, StopAtFirstError, StrictModel, by_shape, text_or_list
from gateway.schemas.sampling import MAX_TOP_LOGPROBS, GenerationRequest

MAX_NAME_CHARS = 64
MAX_TOOL_CALL_ID_CHARS = 256

FunctionName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=r"^[A-Za-z0-9_-]+$")]
ToolCallId = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_CALL_ID_CHARS)]


class ImageUrl(StrictModel):
    """An image as a data: URL."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class InputAudio(StrictModel):
    """A recording as base64."""

    data: str
    format: Literal["wav", "mp3"]


class ContentPart(StrictModel):
    """A piece of a message. `type` says which of the other fields holds it."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None
    input_audio: InputAudio | None = None


class FunctionCall(StrictModel):
    """A call the assistant made earlier."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCallMade(StrictModel):
    """A tool call in the conversation so far."""

    id: ToolCallId
    type: Literal["function"] = "function"
    function: FunctionCall


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[ContentPart], StopAtFirstError(), Tag("~list")],
    text_or_list("Input should be a string or a list of content parts"),
]


class Message(StrictModel):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    tool_calls: Annotated[list[ToolCallMade], Field(max_length=1024), StopAtFirstError()] | None = None
    tool_call_id: ToolCallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another spelling of `reasoning_content`, as some clients hand it back."""
    refusal: str | None = None


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


class NamedFunction(StrictModel):
    """The function that must be called."""

    name: FunctionName


class NamedToolChoice(StrictModel):
    """A tool choice by name."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchemaDefinition(StrictModel):
    """A named schema the answer must follow."""

    name: FunctionName
    description: str | None = None
    schema_: JsonMap | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormatChoice(StrictModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaDefinition | None = None


class TemplateArguments(StrictModel):
    """Arguments of the model's chat template. Others than these are handed on."""

    model_config = ConfigDict(extra="allow")

    enable_thinking: bool | None = None


class ChatRequest(GenerationRequest):
    """A chat completion."""

    messages: Annotated[list[Message], Field(min_length=1), StopAtFirstError()]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """The newer spelling of `max_tokens`; wins where both are given."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[ToolDefinition], StopAtFirstError()] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("~text")] | Annotated[NamedToolChoice, Tag("~object")],
            by_shape("Input should be 'none', 'auto', 'required' or a named function"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormatChoice | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: bool | None = None
    """Extension: whether a model that can think does so before it answers. Absent: the model's default."""
    chat_template_kwargs: TemplateArguments | None = None
    """Extension: `enable_thinking` in another place, as other servers have it."""
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    """Accepted and not used."""
