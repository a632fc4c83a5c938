"""Chunks of an OpenAI-compatible stream as typed structs, and the characters that a server split across two of them.

The decoder is strict and fast. What it refuses is read again by `runner_svc.openai_upstream.dialects`.
"""

import re
from typing import Annotated, Any

import msgspec

from runner_svc.openai_upstream.errors import ErrorBody

MAX_COUNT = 2**53
"""Largest accepted number of tokens: JSON numbers hold larger ones inexactly."""
MAX_MILLISECONDS = 1e12
"""Largest time that is taken from a server, some 32 years."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Place = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_MILLISECONDS)]
Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]
EXTRA = "weft:extra"
"""Name of fields that only `dialects` fills in; no server writes it."""


class ChunkFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a tool call's function."""

    name: str | None = None
    arguments: str | None = None


class ChunkToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a tool call."""

    index: Place | None = None
    id: str | None = None
    type: str | None = None
    function: ChunkFunction | None = None
    extra: dict[str, Any] = msgspec.field(default_factory=dict, name=EXTRA)
    """Fields that weft does not know; those of the function are under `function`."""

    @property
    def name(self) -> str:
        """Name of the function; empty: not in this part."""
        return (self.function and self.function.name) or ""

    @property
    def arguments(self) -> str:
        """Text of the arguments in this part."""
        return (self.function and self.function.arguments) or ""


class ChunkTop(msgspec.Struct):
    """An alternative of a token."""

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
    """The log probabilities of a chunk's tokens."""

    content: list[ChunkToken] | None = None


class ChunkDelta(msgspec.Struct, forbid_unknown_fields=True):
    """What a chunk adds to a choice."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, by the name that Ollama and mlx-lm give it."""
    refusal: str | None = None
    tool_calls: list[ChunkToolCall] | None = None
    function_call: None = None
    """The older form of a call; `dialects` makes a call of it."""
    extra: dict[str, Any] = msgspec.field(default_factory=dict, name=EXTRA)
    """Fields of the message that weft does not know."""


class ChunkChoice(msgspec.Struct):
    """One choice of a chunk."""

    index: Place = 0
    delta: ChunkDelta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: ChunkLogprobs | None = None
    stop_reason: object = None
    """vLLM's: the stop string or the token that ended the choice."""
    matched_stop: object = None
    """The same, by SGLang's name."""
    message: msgspec.Raw = msgspec.Raw()
    """What some servers send in place of a delta."""

    @property
    def stop_sequence(self) -> str:
        """The stop string that ended the choice; empty: none."""
        words = (word for word in (self.stop_reason, self.matched_stop) if isinstance(word, str))
        return next(words, "")


class PromptDetails(msgspec.Struct):
    """Tokens of the prompt by where they came from."""

    cached_tokens: Count | None = None
    cache_write_tokens: Count | None = None
    """Not OpenAI's: tokens that were written to a provider's cache."""


class CompletionDetails(msgspec.Struct):
    """Generated tokens by what they are."""

    reasoning_tokens: Count | None = None


class ChunkUsage(msgspec.Struct):
    """The figures of an answer."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that came from a cache."""
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    @property
    def cache_write_tokens(self) -> int:
        """Tokens of the prompt that were written to a cache."""
        details = self.prompt_tokens_details
        return 0 if details is None else details.cache_write_tokens or 0

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens that were reasoning."""
        details = self.completion_tokens_details
        return 0 if details is None else details.reasoning_tokens or 0


class Timings(msgspec.Struct):
    """The times of one choice as llama-server reports them."""

    prompt_ms: Milliseconds | msgspec.UnsetType = msgspec.UNSET
    """From its first work on the prompt to the first token."""
    predicted_ms: Milliseconds | msgspec.UnsetType = msgspec.UNSET
    """From the first token to the last."""
    tokenize_ms: Milliseconds | msgspec.UnsetType = msgspec.UNSET
    """Of the prompts, as weft's own server programs tell it ..."""
    undivided_ms: Milliseconds = 0
    """... and the time of an answer that came in one piece, in place of the first two."""


class Metrics(msgspec.Struct):
    """The times of one request as vLLM reports them with --enable-per-request-metrics; null: not known."""

    time_to_first_token_ms: Milliseconds | None = None
    """From scheduling to the first token: waiting in its queue is not included."""
    generation_time_ms: Milliseconds | None = None
    """From the first token to the last."""
    mean_itl_ms: Milliseconds | None = None
    """Between two tokens."""


class PromptProgress(msgspec.Struct):
    """How far llama-server is with a prompt."""

    total: Count = 0
    cache: Count = 0
    processed: Count = 0


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    timings: Timings | None = None
    metrics: msgspec.Raw = msgspec.Raw()
    """vLLM's times of the request; other servers may have other things of this name."""
    prompt_progress: PromptProgress | None = None
    error: ErrorBody | str | None = None


CHUNKS = msgspec.json.Decoder(Chunk)


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for a half that no chunk completes."""
_BYTES = re.compile("[\udc80-\udcff]+")
"""Bytes that alone are not UTF-8, as Python's `surrogateescape` reads them."""
_HALVES = re.compile("[\ud800-\udfff]")
_ARGUMENTS = "arguments"
_MAX_PREFIX = 3
"""Maximum number of bytes of an incomplete character."""


class HalfCharacters:
    """The halves at the ends of the texts so far. `join` is called for each choice of a chunk that may have one."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, str], str] = {}
        """The halves that are held back, by choice and field."""

    def join(self, choice: ChunkChoice) -> None:
        """Complete the texts of a chunk; a half at the end of one is held back. Raises ValueError for invalid bytes."""
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
        """Returns what stands for the halves that no chunk has completed, by choice. Raises ValueError as `join`."""
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
        # Two halves of UTF-16 are one character.
        whole = (held + text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        whole = _BYTES.sub(_decoded, whole)
        half = _half_at_end(whole)
        if half:
            self.held[choice, name] = half
            whole = whole[: -len(half)]
        return _HALVES.sub(REPLACEMENT, whole)


def _decoded(found: "re.Match[str]") -> str:
    """Returns the characters of bytes; an incomplete one at the end of the text stays."""
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
    """Whether bytes are the beginning of a character."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _half_at_end(text: str) -> str:
    """Returns the half of a character at the end of a text; empty: none."""
    if text and "\ud800" <= text[-1] <= "\udbff":
        return text[-1]
    found = re.search("[\udc80-\udcff]+$", text)
    return found.group() if found else ""
