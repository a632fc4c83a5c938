"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

Fields of Anthropic's own service (tiers, containers, regions) are accepted and not used. Marks of caches reach
providers with this API.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from typing_extensions import override

from gateway.anthropic.context_edits import CompactionConfig, ContextEdits
from gateway.intake.request_model import (
    AS_TEXT,
    MAX_INT32,
    CarryingModel,
    HandledRequest,
    JsonMap,
    OpenModel,
    StopAtFirstError,
    StrictModel,
    by_type,
    text_or_list,
)
from gateway.openai.chat_schema import FunctionName
from gateway.openai.extension_fields import LANGUAGES
from gateway.openai.sampling import MAX_STOP_CHARS, Share, TokenLimit

MAX_TOOL_USE_ID_CHARS = 256

# Requests for these services get a warning that they are not available.
NOT_OFFERED = ("container", "fallbacks", "inference_geo", "mcp_servers", "speed")

ToolUseId = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_USE_ID_CHARS)]


CacheControl = Any
"""Marks a part of the prompt to cache: `{"type": "ephemeral", "ttl": "5m"}`. It is passed to providers with
Anthropic's API; other engines ignore it."""


class TextBlock(StrictModel):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Any = None
    """Of an earlier answer; accepted and not used."""


class Base64Source(StrictModel):
    """A file in base64."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(max_length=64)]
    data: str


class UrlSource(StrictModel):
    """A file at an address."""

    type: Literal["url"]
    url: str


class OtherSource(OpenModel):
    """An unsupported kind of source, such as an uploaded file."""

    type: str


Source = Annotated[
    Annotated[Base64Source, Tag("~base64")] | Annotated[UrlSource, Tag("~url")] | Annotated[OtherSource, Tag("~other")],
    by_type("base64", "url"),
]


class ImageBlock(StrictModel):
    """An image."""

    type: Literal["image"]
    source: Source
    cache_control: CacheControl = None


class ToolUseBlock(CarryingModel):
    """An earlier tool call of the assistant. Unknown fields are passed back to the provider."""

    type: Literal["tool_use"]
    id: ToolUseId
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: Any = None
    """An object, or text: clients send text if the arguments were truncated while the model wrote them."""
    cache_control: CacheControl = None


class ThinkingBlock(StrictModel):
    """The assistant's earlier thinking. A provider's signature is passed back; models of the mesh have none."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(StrictModel):
    """Encrypted thinking of a provider's model, which only the provider can read."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolReferenceBlock(StrictModel):
    """A tool found by a tool search."""

    type: Literal["tool_reference"]
    tool_name: Annotated[str, Field(min_length=1, max_length=256)]


class OtherBlock(OpenModel):
    """An unsupported kind of block, such as a document. It becomes text or a note, with a warning."""

    type: str


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("~text")]
    | Annotated[ImageBlock, Tag("~image")]
    | Annotated[ToolReferenceBlock, Tag("~tool_reference")]
    | Annotated[OtherBlock, Tag("~other")],
    by_type("text", "image", "tool_reference"),
]


class ToolResultBlock(StrictModel):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: ToolUseId
    content: (
        Annotated[
            Annotated[str, Tag("~text")] | Annotated[list[ResultBlock], StopAtFirstError(), Tag("~list")],
            text_or_list("must be a string or a list of content blocks"),
        ]
        | None
    ) = None
    is_error: bool | None = None
    cache_control: CacheControl = None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("~text")]
    | Annotated[ImageBlock, Tag("~image")]
    | Annotated[ToolUseBlock, Tag("~tool_use")]
    | Annotated[ToolResultBlock, Tag("~tool_result")]
    | Annotated[ThinkingBlock, Tag("~thinking")]
    | Annotated[RedactedThinkingBlock, Tag("~redacted_thinking")]
    | Annotated[OtherBlock, Tag("~other")],
    by_type("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"),
]


class MessageParam(StrictModel):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("~text")] | Annotated[list[ContentBlock], StopAtFirstError(), Tag("~list")],
        text_or_list("must be a string or a list of content blocks"),
    ]


class FunctionTool(StrictModel):
    """A function the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: JsonMap
    strict: bool | None = None
    defer_loading: bool | None = None
    """Whether the model learns of it only once a tool of the client has found it (`tool_reference`)."""
    cache_control: CacheControl = None


class OtherTool(OpenModel):
    """A tool without a schema, such as a web search that Anthropic runs. It is not offered to the model."""

    type: str
    name: str | None = None


def _tool_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "~function" if kind is None or kind == "custom" else "~other"


ToolParam = Annotated[
    Annotated[FunctionTool, Tag("~function")] | Annotated[OtherTool, Tag("~other")], Discriminator(_tool_kind)
]


class ToolChoiceParam(StrictModel):
    """Whether the model must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    """For type `tool`."""
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(StrictModel):
    """Whether the model thinks before it answers. `adaptive` and `between_tools` leave that to the model."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """For type `enabled`: maximum number of thinking tokens, if the engine supports a limit."""
    display: Any = None
    """Accepted and not used: thinking is always returned in full."""


class OutputFormatParam(StrictModel):
    """A JSON schema that the answer must follow."""

    type: Literal["json_schema"]
    schema_: JsonMap = Field(alias="schema")


class OutputConfigParam(StrictModel):
    """The format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormatParam | None = None


class MetadataParam(StrictModel):
    """Metadata of the request. The user of a journaled message is stored with its task."""

    user_id: Annotated[str, Field(max_length=1024), AS_TEXT] | None = None


class CountTokensRequest(HandledRequest):
    """The request whose tokens are counted."""

    model: str
    """A model or pool of the mesh, `agent/NAME`, `route/NAME`, or `auto`."""
    messages: Annotated[list[MessageParam], Field(min_length=1), StopAtFirstError()]
    system: (
        Annotated[
            Annotated[str, Tag("~text")] | Annotated[list[TextBlock], StopAtFirstError(), Tag("~list")],
            text_or_list("must be a string or a list of text blocks"),
        ]
        | None
    ) = None
    tools: Annotated[list[ToolParam], StopAtFirstError()] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfigParam | None = None
    output_format: OutputFormatParam | None = None
    """The older form of `output_config.format`."""
    context_management: ContextEdits | None = None
    """Edits of a long conversation: old tool results and thinking are removed, or a summary replaces it."""
    compaction: CompactionConfig | None = None
    """Asks for a summary of the conversation as the answer; ignored by `count_tokens`."""
    thread: JsonMap | None = None
    """A stored conversation. It is refused with the error that makes clients send the complete conversation."""

    @property
    @override
    def turns(self) -> Sequence[tuple[str | None, object]]:
        return [("system", self.system), *((message.role, message.content) for message in self.messages)]

    @override
    def uses(self, name: str) -> bool:
        return name in LANGUAGES or name in NOT_OFFERED or super().uses(name)


def _stated(value: object) -> object:
    if value is None:
        raise ValueError("must be a number of tokens, or -1 for no limit")
    return value


class MessagesRequest(CountTokensRequest):
    """A request for a message."""

    max_tokens: Annotated[TokenLimit, BeforeValidator(_stated)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], StopAtFirstError()] | None
    ) = None
    stream: bool | None = None
    service_tier: Any = None
    """Accepted and not used."""
    metadata: MetadataParam | None = None

    @property
    @override
    def end_user(self) -> str:
        """See `HandledRequest.end_user`; `metadata.user_id` is also used."""
        named = "" if self.metadata is None else self.metadata.user_id
        return self.user or named or ""

    @property
    @override
    def own_metadata(self) -> Mapping[str, str]:
        """Returns nothing: Anthropic's `metadata` only names the end user."""
        return {}
