"""What a runner and the program that hosts an engine say to each other.

Each message is a four-byte length, most significant byte first, and that much JSON. Both ends are of one version: they
come from one installation. Ids count up from 1 and belong to the runner.
"""

import struct
from collections.abc import Callable
from typing import Any

import msgspec

TOKEN_VARIABLE = "WEFT_ENGINE_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable with the word by which the runner knows the program that it started."""
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
LENGTH_BYTES = 4
LOAD_ID = 0
"""The id of a failure that belongs to no request."""


class Generate(msgspec.Struct, tag="generate", kw_only=True):
    """Continue each prompt, `choice_count` times."""

    id: int
    prompts: list[str | list[int]]
    choice_count: int = 1
    has_template: bool = False
    """The prompts come from a chat template, which may have written the token of the beginning itself."""
    max_tokens: int | None = None
    """Per choice; None: until the context ends."""
    seed: int | None = None
    stop: list[str] = []
    sampling: dict[str, Any] = {}
    """By the library's names; what is left out has the library's defaults, which are llama.cpp's."""
    logit_bias: dict[int, float] = {}
    grammar: str = ""
    """GBNF; empty: none."""
    json_object: bool = False
    json_schema: str = ""
    """A schema as JSON text; empty: none."""
    fresh: bool = False
    """Nothing that the engine still has of an earlier prompt may be used."""


class Embed(msgspec.Struct, tag="embed", kw_only=True):
    """Embed each text."""

    id: int
    texts: list[str]


class Tokenize(msgspec.Struct, tag="tokenize", kw_only=True):
    """Tell the tokens of a text; answered beside whatever else is worked on."""

    id: int
    text: str
    add_special: bool = False
    has_template: bool = False
    """The text comes from a chat template, which may have written the token of the beginning itself."""
    with_pieces: bool = False


class Forget(msgspec.Struct, tag="forget"):
    """Forget the prompt of the last request; answered with Done, its `prompt_tokens` what was forgotten."""

    id: int


class Cancel(msgspec.Struct, tag="cancel"):
    """Stops the work on a request that was cancelled."""

    id: int


class Ping(msgspec.Struct, tag="ping"):
    """To be answered at once, whatever the engine does."""

    id: int


class Hello(msgspec.Struct, tag="hello"):
    """The first message of the program."""

    token: str
    pid: int


class LoadProgress(msgspec.Struct, tag="load_progress"):
    """How much of the model is loaded, 0 to 1."""

    share: float


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded."""

    context_tokens: int


class PromptProgress(msgspec.Struct, tag="prompt_progress"):
    """How far a prompt is."""

    id: int
    total: int
    processed: int
    cached: int


class Token(msgspec.Struct, tag="token"):
    """A token was generated; `text` is what can be shown by now, which may be nothing."""

    id: int
    choice: int
    text: str = ""
    finish_reason: str = ""
    """`stop` or `length` with the last token of a choice, else empty."""


class Done(msgspec.Struct, tag="done", kw_only=True):
    """Everything about a request has been said."""

    id: int
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0


class Vector(msgspec.Struct, tag="vector"):
    """One embedding."""

    id: int
    index: int
    values: list[float]


class Tokens(msgspec.Struct, tag="tokens", kw_only=True):
    """The tokens of a text, in order."""

    id: int
    ids: list[int]
    pieces: list[bytes] = []
    """Their texts, where the request wants them."""


class Failed(msgspec.Struct, tag="failed"):
    """A request failed, or the load did. `reason` is the name of one of weft's reasons."""

    id: int
    reason: str
    message: str


class Pong(msgspec.Struct, tag="pong"):
    """The answer to a Ping."""

    id: int


Work = Generate | Embed | Forget
Asking = Work | Tokenize
"""What is answered until Done or Failed."""
ToEngine = Asking | Cancel | Ping
Answer = PromptProgress | Token | Vector | Tokens | Done | Failed
"""What concerns one request."""
ToRunner = Hello | LoadProgress | Ready | Pong | Answer


class TooLongError(Exception):
    """A message is beyond MAX_MESSAGE_BYTES: the other end is not what it should be."""


def encode(message: ToEngine | ToRunner) -> bytes:
    """A message as it travels. Raises TooLongError."""
    body = msgspec.json.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise TooLongError
    return struct.pack(">I", len(body)) + body


def body_length(head: bytes) -> int:
    """How long the message behind these LENGTH_BYTES is. Raises TooLongError."""
    length: int = struct.unpack(">I", head)[0]
    if length > MAX_MESSAGE_BYTES:
        raise TooLongError
    return length


def read_message(read_exactly: Callable[[int], bytes], decoder: msgspec.json.Decoder[ToEngine]) -> ToEngine:
    """The next message of a blocking stream. Raises EOFError at its end, TooLongError, msgspec.DecodeError."""
    return decoder.decode(read_exactly(body_length(read_exactly(LENGTH_BYTES))))
