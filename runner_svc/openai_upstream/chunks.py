"""Chunks of an OpenAI-compatible stream as typed structs, and repair of characters split across chunks.

The decoder is strict and fast. Chunks that it rejects are read again by `runner_svc.openai_upstream.dialects`.
"""

import re
from typing import Annotated, Any

import msgspec

from runner_svc.openai_upstream.errors import ErrorBody

MAX_COUNT = 2**53
"""Largest accepted token count: JSON numbers cannot represent larger integers exactly."""
MAX_MILLISECONDS = 1e12
"""Largest accepted time, about 32 years."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_MILLISECONDS)]
Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]
EXTRA = "weft:extra"
"""Name of fields that only `dialects` fills; servers do not send it."""


class ChunkFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a function call."""

    name: str | None = None
    arguments: str | None = None


class ChunkToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a tool call."""

    index: Index | None = None
    id: str | None = None
    type: str | None = None
    function: ChunkFunction | None = None
    extra: dict[str, Any] = msgspec.field(default_factory=dict, name=EXTRA)
    """Unknown fields; those of the function are under `function`."""

    @property
    def name(self) -> str:
        """Function name; empty: not in this part."""
        return (self.function and self.function.name) or ""

    @property
    def arguments(self) -> str:
        """This part of the arguments."""
        return (self.function and self.function.arguments) or ""


class ChunkTop(msgspec.Struct):
    """An alternative to a token."""

    token: str
    logprob: float
    bytes: list[Byte] | None = None


class ChunkToken(msgspec.Struct):
    """A token with its log probability."""

    token: str
    logprob: float
    bytes: list[Byte] | None = None
    top_logprobs: list[ChunkTop] | None = None


class ChunkLogprobs(msgspec.Struct):
    """Log probabilities of the tokens in a chunk."""

    content: list[ChunkToken] | None = None


class ChunkDelta(msgspec.Struct, forbid_unknown_fields=True):
    """The content that a chunk adds to a choice."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """`reasoning_content` under the name that Ollama and mlx-lm use."""
    refusal: str | None = None
    tool_calls: list[ChunkToolCall] | None = None
    function_call: None = None
    """Deprecated form of a tool call; `dialects` converts it."""
    extra: dict[str, Any] = msgspec.field(default_factory=dict, name=EXTRA)


class ChunkChoice(msgspec.Struct):
    """A choice in a chunk."""

    index: Index = 0
    delta: ChunkDelta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: ChunkLogprobs | None = None
    stop_reason: object = None
    """vLLM: the stop string or token that ended the choice."""
    matched_stop: object = None
    """SGLang's name for `stop_reason`."""
    message: msgspec.Raw = msgspec.Raw()
    """Sent by some servers instead of a delta."""

    @property
    def stop_sequence(self) -> str:
        """The stop string that ended the choice; empty: none."""
        if self.stop_reason is None and self.matched_stop is None:
            return ""
        found = self.stop_reason if isinstance(self.stop_reason, str) else self.matched_stop
        return found if isinstance(found, str) else ""


class PromptDetails(msgspec.Struct):
    """Prompt tokens by source."""

    cached_tokens: Count | None = None
    cache_write_tokens: Count | None = None
    """Tokens written to a provider's cache; not part of OpenAI's API."""


class CompletionDetails(msgspec.Struct):
    """Generated tokens by type."""

    reasoning_tokens: Count | None = None


class ChunkUsage(msgspec.Struct):
    """Token usage."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens read from a cache."""
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    @property
    def cache_write_tokens(self) -> int:
        """Prompt tokens written to a cache."""
        details = self.prompt_tokens_details
        return 0 if details is None else details.cache_write_tokens or 0

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens used for reasoning."""
        details = self.completion_tokens_details
        return 0 if details is None else details.reasoning_tokens or 0


class Timings(msgspec.Struct):
    """Timings of one choice as llama-server reports them."""

    prompt_ms: Milliseconds | msgspec.UnsetType = msgspec.UNSET
    """Prompt processing until the first token."""
    predicted_ms: Milliseconds | msgspec.UnsetType = msgspec.UNSET
    """First token to last token."""
    tokenize_ms: Milliseconds | msgspec.UnsetType = msgspec.UNSET
    """Tokenization of the prompts; reported by weft's own server programs."""
    undivided_ms: Milliseconds = 0
    """Time of an answer computed in one piece, reported by them instead of the first two."""


class Metrics(msgspec.Struct):
    """Timings of one request as vLLM reports them with --enable-per-request-metrics; null: unknown."""

    time_to_first_token_ms: Milliseconds | None = None
    """Scheduling to first token, without queueing time."""
    generation_time_ms: Milliseconds | None = None
    """First token to last token."""
    mean_itl_ms: Milliseconds | None = None
    """Mean time between two tokens."""


class PromptProgress(msgspec.Struct):
    """Prompt progress of llama-server, in tokens."""

    total: Count = 0
    cache: Count = 0
    processed: Count = 0


class Chunk(msgspec.Struct):
    """An event of a stream."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    timings: Timings | None = None
    metrics: msgspec.Raw = msgspec.Raw()
    """vLLM's timings of the request; other servers may use this name for something else."""
    prompt_progress: PromptProgress | None = None
    error: ErrorBody | str | None = None


CHUNKS = msgspec.json.Decoder(Chunk)


class TextDelta(msgspec.Struct, forbid_unknown_fields=True):
    """A delta that only has text."""

    content: str
    role: None = None
    reasoning_content: None = None
    reasoning: None = None
    refusal: None = None
    tool_calls: None = None
    function_call: None = None


class TextChoice(msgspec.Struct):
    """A choice that only has text."""

    delta: TextDelta
    index: Index = 0
    finish_reason: None = None
    logprobs: None = None


class TextChunk(msgspec.Struct):
    """The usual chunk, which only has text of one choice. A reader of it need not look at the other fields."""

    choices: tuple[TextChoice]
    usage: None = None
    timings: None = None
    prompt_progress: None = None
    error: None = None


TEXT_CHUNKS = msgspec.json.Decoder(TextChunk)
NO_TEXT = TextChoice(TextDelta(""))


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Replaces a half that no chunk completes."""
_BYTES = re.compile("[\udc80-\udcff]+")
"""Bytes that are not UTF-8 on their own, as Python's `surrogateescape` decodes them."""
_HALVES = re.compile("[\ud800-\udfff]")
_ARGUMENTS = "arguments"
_MAX_PREFIX = 3
"""Maximum number of bytes in an incomplete character."""


class HalfCharacters:
    """Holds back incomplete characters at the end of texts. `join` is called for each choice that may have one."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, str], str] = {}
        """Incomplete characters by choice and field."""

    def join(self, choice: ChunkChoice) -> None:
        """Completes the texts of a chunk and holds back a half at their end. Raises ValueError for invalid bytes."""
        choice.text = self._joined(choice.index, "text", choice.text)
        if (delta := choice.delta) is None:
            return
        delta.content = self._joined(choice.index, "content", delta.content)
        delta.reasoning_content = self._joined(choice.index, "reasoning_content", delta.reasoning_content)
        delta.reasoning = self._joined(choice.index, "reasoning", delta.reasoning)
        delta.refusal = self._joined(choice.index, "refusal", delta.refusal)
        for call in delta.tool_calls or ():
            if (function := call.function) is not None:
                place = f"{_ARGUMENTS} {call.index}"
                function.arguments = self._joined(choice.index, place, function.arguments)

    def rest(self) -> dict[int, str]:
        """Returns the replacements of incomplete characters by choice. Raises ValueError as `join` does."""
        held, self.held = self.held, {}
        found: dict[int, str] = {}
        for (choice, name), half in held.items():
            if _BYTES.search(half) or name.startswith(_ARGUMENTS):
                raise ValueError("it ends within a character")
            if name in {"text", "content"}:
                found[choice] = REPLACEMENT
        return found

    def _joined(self, choice: int, name: str, text: str | None) -> str | None:
        if not text or not (self.held or _HALVES.search(text)):
            return text
        held = self.held.pop((choice, name), "")
        # Two UTF-16 halves form one character.
        whole = (held + text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        whole = _BYTES.sub(_decoded, whole)
        half = _half_at_end(whole)
        if half:
            self.held[choice, name] = half
            whole = whole[: -len(half)]
        return _HALVES.sub(REPLACEMENT, whole)


def _decoded(found: "re.Match[str]") -> str:
    """Decodes bytes; an incomplete character at the end is kept unchanged."""
    raw = found.group().encode("ascii", "surrogateescape")
    for kept in range(_MAX_PREFIX + 1):
        try:
            text = raw[: len(raw) - kept].decode()
        except UnicodeDecodeError:
            continue
        rest = raw[len(raw) - kept :] if kept else b""
        if rest and not (found.end() == len(found.string) and _may_begin(rest)):
            break
        return text + rest.decode("ascii", "surrogateescape")
    raise ValueError("its text is not UTF-8")


def _may_begin(raw: bytes) -> bool:
    """Whether bytes may be the start of a character."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _half_at_end(text: str) -> str:
    """Returns the incomplete character at the end of a text; empty: none."""
    if text and "\ud800" <= text[-1] <= "\udbff":
        return text[-1]
    found = re.search("[\udc80-\udcff]+$", text)
    return found.group() if found else ""
