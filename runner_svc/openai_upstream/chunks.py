"""Chunks of an OpenAI-compatible stream as typed structs.

The decoder is strict and fast. What it refuses is read again by `runner_svc.openai_upstream.dialects`.
"""

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
