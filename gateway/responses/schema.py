"""Schemas of `/v1/responses`: requests, input items, and stored responses."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema
from typing_extensions import override

from gateway.intake.request_model import (
    AS_TEXT,
    MAX_ID_CHARS,
    MAX_INT32,
    CarryingModel,
    JsonMap,
    Metadata,
    StopAtFirstError,
    StrictModel,
    by_shape,
    text_or_list,
)
from gateway.openai.chat_schema import MAX_FUNCTIONS, CallArguments, ImageUrl, InputAudio, TemplateArguments, ToolCallId
from gateway.openai.sampling import MAX_STOP_CHARS, MAX_TOP_LOGPROBS, GenerationRequest, Share, TokenLimit

ItemId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
MAX_CONTENT_PARTS = 4096

ImageSource = Annotated[
    Annotated[str, Tag("~text")] | Annotated[ImageUrl, Tag("~object")],
    by_shape("must be a URL, or an object with one"),
]
"""A URL, or an object with a `url`: `input_image` has the URL, `image_url` the object."""


class InputPart(StrictModel):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageSource | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: str | None = None
    input_audio: InputAudio | None = None

    @override
    def uses(self, name: str) -> bool:
        # A part of another type becomes text or a note, with a warning.
        return name in _OF_ANSWERS or self.type not in _KNOWN_PARTS


Parts = Annotated[list[InputPart], Field(max_length=MAX_CONTENT_PARTS), StopAtFirstError()]
ItemContent = Annotated[
    Annotated[str, Tag("~text")] | Annotated[Parts, Tag("~list")],
    text_or_list("must be a string or a list of content parts"),
]


_KNOWN_PARTS = frozenset({
    "text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal", "input_image", "image_url",
    "input_audio",
})  # fmt: skip
_OF_ANSWERS = frozenset({"annotations", "logprobs"})
"""Members of an answer's text, which clients send back; engines do not use them."""


class InputItem(CarryingModel):
    """One item: a message, a function call, its output, reasoning, or a reference to a stored item.

    A list of content parts may stand for the items of one user message (see docs/api.md). Fields of a call that a
    provider needs go back to it.
    """

    type: str | None = None
    """Absent: a message."""
    id: ItemId | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: ItemContent | None = None
    status: Any = None
    """Accepted and not used."""
    call_id: ToolCallId | None = None
    name: str | None = None
    namespace: str | None = None
    """For a call: the namespace of the function."""
    arguments: CallArguments | None = None
    output: ItemContent | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None
    text: str | None = None
    image_url: ImageSource | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None

    @property
    def kind(self) -> str:
        """The item's type; by default the usual one."""
        return "message" if self.type is None else self.type


class OtherItem(InputItem):
    """An unsupported kind of item with any members, such as a call of another service's tool."""

    role: Any = None
    content: Any = None
    status: Any = None
    call_id: Any = None
    name: Any = None
    namespace: Any = None
    arguments: Any = None
    output: Any = None
    summary: Any = None
    encrypted_content: Any = None
    text: Any = None
    image_url: Any = None
    detail: Any = None

    @override
    def uses(self, name: str) -> bool:
        # The item becomes a call or text, with a warning.
        return True


KNOWN_ITEMS = frozenset({
    "message", "function_call", "function_call_output", "reasoning", "item_reference", "text", "image_url",
    "output_text",
})  # fmt: skip


def _item_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "~other" if isinstance(kind, str) and kind not in KNOWN_ITEMS else "~known"


Items = Annotated[
    list[
        Annotated[Annotated[InputItem, Tag("~known")] | Annotated[OtherItem, Tag("~other")], Discriminator(_item_kind)]
    ],
    StopAtFirstError(),
]


MAX_INCLUDES = 64
MAX_EDITS = 16
MAX_LANGUAGE_CHARS = 35
"""The longest language tag that RFC 5646 requires implementations to support."""

LanguageCode = Annotated[str, Field(min_length=1, max_length=MAX_LANGUAGE_CHARS, pattern=r"^[A-Za-z0-9_-]+$")]


class ResponseTool(StrictModel):
    """A tool. Types other than `function` and `namespace` are accepted and not offered to the model."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: JsonMap | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    tools: Annotated[list["ResponseTool"], Field(max_length=MAX_FUNCTIONS), StopAtFirstError()] | None = None
    """The tools of a namespace."""
    server_label: str | None = None
    """The name of an MCP server, which weft does not call."""
    execution: Literal["server", "client"] | None = None
    """For a search for tools: who runs it."""
    defer_loading: bool | None = None
    """Whether the model learns of it only once a search of the client has found it."""

    @override
    def uses(self, name: str) -> bool:
        # Another type has a warning of its own.
        return self.type != "function"


class ToolReference(StrictModel):
    """A tool by its name."""

    type: str
    name: str | None = None
    namespace: str | None = None


class ResponsesToolChoiceObject(StrictModel):
    """A tool that must be called, or the tools that may be called."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ToolReference], StopAtFirstError()] | None = None


class ReasoningOptions(StrictModel):
    """Options of the model's thinking."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Any = None
    generate_summary: Any = None
    """The older name of `summary`."""


class TextFormat(StrictModel):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JsonMap | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictModel):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class PoolMessage(StrictModel):
    """Extension: a turn of a conversation in `messages`."""

    role: Literal["user", "assistant"]
    content: ItemContent


class ContextManagement(StrictModel):
    """What is done with a long conversation."""

    type: str
    """`compaction`: a summary replaces it. Others are left out with a warning."""
    compact_threshold: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """Prompt tokens above which it is replaced. Absent: only if it is longer than the context of the model."""


class Decoding(StrictModel):
    """Extension: sampling options in one object."""

    beam_size: Annotated[int, Field(ge=1, le=64)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    top_p: Share | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=2)] | None = None
    max_tokens: TokenLimit = None
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], StopAtFirstError()] | None = (
        None
    )


ConversationId = Annotated[
    ItemId,
    BeforeValidator(lambda given: given.get("id") if isinstance(given, dict) else given),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object", "required": ["id"]}]}),
]
"""The id of a conversation, or an object with its `id`."""


class ResponsesRequest(GenerationRequest):
    """A request for a response."""

    input: (
        Annotated[
            Annotated[str, Tag("~text")] | Annotated[Items, Tag("~list")],
            text_or_list("must be a string or a list of items"),
        ]
        | None
    ) = None
    messages: Annotated[list[PoolMessage], Field(min_length=1), StopAtFirstError()] | None = None
    """Extension: a conversation instead of `input`. The last turn must be the user's."""
    instructions: str | None = None
    previous_response_id: ItemId | None = None
    """Id of a stored response to continue: its input and output precede the input of this request."""
    store: bool | None = None
    """Whether the response is stored. Absent: the gateway's setting (`gateway.keep_responses`)."""
    max_output_tokens: TokenLimit = None
    tools: Annotated[list[ResponseTool], StopAtFirstError()] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("~text")]
            | Annotated[ResponsesToolChoiceObject, Tag("~object")],
            by_shape("must be 'none', 'auto', 'required' or an object"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: (
        Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=MAX_INCLUDES), StopAtFirstError()]
        | None
    ) = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    safety_identifier: Annotated[str, Field(max_length=512), AS_TEXT] | None = None
    """Accepted and echoed, not used."""
    context_management: Annotated[list[ContextManagement], Field(max_length=MAX_EDITS), StopAtFirstError()] | None = (
        None
    )
    background: bool | None = None
    conversation: ConversationId | None = None
    """Id of a conversation: its items precede the input, and input and output are added to it at the end."""
    prompt: Any = None
    enable_thinking: bool | None = None
    """Extension: whether a model that supports thinking does so before it answers. Absent: the model's default."""
    thinking: Literal["default", "enabled", "disabled"] | None = None
    """Extension: another name of `enable_thinking`."""
    chat_template_kwargs: TemplateArguments | None = None
    """Extension: arguments of the model's chat template."""
    decoding: Decoding | None = None
    """Extension: sampling options in one object."""
    source_lang_code: LanguageCode | None = None
    """Extension: language of the input, for translation models. Absent, `auto` or `mixed`: any."""
    target_lang_code: LanguageCode | None = None
    """Extension: language to translate to."""
    envelope: Literal["openai", "pool"] | None = None
    """Extension: the form of the response. Absent: the gateway's setting (`gateway.response_envelope`)."""

    @property
    @override
    def turns(self) -> Sequence[tuple[str | None, object]]:
        """See `HandledRequest.turns`; without those of the response that it continues."""
        given = self.messages if self.input is None else self.input
        own = [("user", given)] if isinstance(given, str) else [(item.role, item.content) for item in given or ()]
        return [("system", self.instructions), *own]


MAX_ITEMS_AT_ONCE = 20
NewItems = Annotated[Items, Field(max_length=MAX_ITEMS_AT_ONCE)]


class ConversationRequest(StrictModel):
    """A new conversation."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class ConversationMetadata(StrictModel):
    """A change of a conversation."""

    metadata: Metadata | None


class ConversationItems(StrictModel):
    """Items to add to a conversation."""

    items: NewItems


class ConversationObject(BaseModel):
    """A conversation."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ResponseObject(BaseModel):
    """A response; docs/api.md lists its other fields."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    model: str
    output: list[dict[str, Any]]
    store: bool


class DeletedResponse(BaseModel):
    """A deleted response or conversation."""

    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: Literal[True]


class ResponseItemList(BaseModel):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
