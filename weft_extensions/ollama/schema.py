"""Requests of Ollama's API.

Unknown fields of `options` are passed to the engine; others give a warning.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, Tag, WithJsonSchema
from typing_extensions import override

from gateway.intake.request_model import (
    MAX_INT32,
    MAX_INT64,
    CarryingModel,
    HandledRequest,
    OpenModel,
    StopAtFirstError,
    StrictModel,
    text_or_list,
)
from gateway.openai.chat_schema import CallArguments, FunctionDefinition
from gateway.openai.extension_fields import LANGUAGES
from gateway.openai.sampling import MAX_TOP_LOGPROBS, Penalty, Share, StopSequences
from weft.kernel.models.model_source import MAX_SOURCE_CHARS

MAX_NAME_CHARS = 256
EFFORTS = ("low", "medium", "high", "max")
"""Values of `think` beside true and false."""

Think = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "string", "enum": list(EFFORTS)}]}),
]
Format = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string", "enum": ["", "json"]}, {"type": "object"}]}),
]


class Options(OpenModel):
    """Sampling parameters. Parameters without a field here are passed to the engine by name."""

    num_predict: Annotated[int, Field(ge=-2, le=MAX_INT32)] | None = None
    """Maximum number of answer tokens; 0 or less: limited only by the context."""
    num_ctx: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """Context that the caller needs. The model's settings determine the context; a smaller one gives a warning."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    stop: StopSequences | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: Annotated[float, Field(ge=0, le=2)] | None = None


class OllamaRequest(HandledRequest):
    """Fields of every inference request of Ollama's API."""

    model: str
    """A model or pool of the mesh, `agent/NAME`, `route/NAME`, or `auto`; with or without `:latest`."""
    options: Options | None = None

    @override
    def uses(self, name: str) -> bool:
        return name in LANGUAGES


class GeneratingRequest(OllamaRequest):
    """Fields of the requests that generate text."""

    stream: bool | None = None
    """Absent: true."""
    format: Format = None
    """`json`, or a JSON schema that the answer must follow."""
    think: Think = None
    """Whether the model thinks, or how much."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    truncate: bool | None = None
    """True gives a warning: prompts are never truncated; one that is too long is refused."""
    shift: bool | None = None
    """True gives a warning: the context is never shifted; the answer ends when it is full."""

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is a stream."""
        return self.stream is not False


class CalledFunction(CarryingModel):
    """A function that the assistant called."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    arguments: CallArguments | None = None


class ToolCallMade(CarryingModel):
    """A tool call that the assistant made earlier."""

    id: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    function: CalledFunction


class ChatMessage(StrictModel):
    """One turn of the conversation."""

    role: Annotated[str, Field(max_length=64), AfterValidator(str.lower)]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[str], StopAtFirstError()] | None = None
    """Image files in base64."""
    tool_calls: Annotated[list[ToolCallMade], StopAtFirstError()] | None = None
    tool_name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    """For a result: the called function."""
    tool_call_id: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    """For a result: the id of the call, if it had one."""


class ToolDefinition(StrictModel):
    """A tool. Types other than `function` are accepted and dropped."""

    type: Annotated[str, Field(max_length=64)] | None = None
    """Absent: function."""
    function: FunctionDefinition | None = None

    @override
    def uses(self, name: str) -> bool:
        # Another type has a warning of its own.
        return self.type not in (None, "function")


class OllamaChatRequest(GeneratingRequest):
    """A request to continue a conversation. Without messages, it loads or (`keep_alive` 0) unloads the model."""

    messages: Annotated[list[ChatMessage], StopAtFirstError()] | None = None
    tools: Annotated[list[ToolDefinition], StopAtFirstError()] | None = None


class OllamaGenerateRequest(GeneratingRequest):
    """A request to answer a prompt. Without a prompt, it loads or (`keep_alive` 0) unloads the model."""

    prompt: str | None = None
    suffix: str | None = None
    """Text after the answer; the answer fills the gap between prompt and suffix."""
    system: str | None = None
    images: Annotated[list[str], StopAtFirstError()] | None = None
    raw: bool | None = None
    """Whether the prompt is continued unchanged, without the model's template."""
    template: str | None = None
    """Refused: the model's template is used."""
    context: Annotated[list[int], StopAtFirstError()] | None = None
    """Refused unless empty: conversations go to /api/chat."""


class OllamaEmbedRequest(OllamaRequest):
    """A request for embeddings."""

    input: Annotated[
        Annotated[str, Tag("~text")] | Annotated[list[str], Field(min_length=1), StopAtFirstError(), Tag("~list")],
        text_or_list("must be a string or a list of strings, and not empty"),
    ]
    truncate: bool | None = None
    """True gives a warning: inputs are never truncated; one that is too long is refused."""
    dimensions: Annotated[int, Field(ge=1, le=65_536)] | None = None


class OllamaEmbeddingsRequest(OllamaRequest):
    """The older form of a request for embeddings: one text."""

    prompt: str


class OllamaPullRequest(StrictModel):
    """A request to pull a model."""

    model: Annotated[str, Field(max_length=MAX_SOURCE_CHARS)] | None = None
    """Source, such as `hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M` or `hf:Qwen/Qwen3-8B-GGUF`."""
    name: Annotated[str, Field(max_length=MAX_SOURCE_CHARS)] | None = None
    """The older name of `model`."""
    insecure: bool | None = None
    """True is refused: it is a setting of the mesh."""
    stream: bool | None = None
    """Absent: true."""


class OllamaShowRequest(StrictModel):
    """A request for the details of a model."""

    model: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    """The older name of `model`."""
    verbose: Any = None
    """Accepted and not used: the answer always has all known details."""
