"""Routes of an engine that generates text, with llama.cpp's paths and field names."""

import codecs
import json
import re
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft_extensions.engines.engine_host.http_server import (
    TOO_LONG,
    UNSUPPORTED,
    Caller,
    Engine,
    RefusedError,
    Route,
    Turn,
)

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""Space in SentencePiece tokens."""


class TokenBytes:
    """Converts token strings to their bytes, like the tokenizer's decoder."""

    def __init__(self, tokenizer: dict[str, Any]) -> None:
        """`tokenizer`: content of a `tokenizer.json`."""
        self._is_byte_level = "ByteLevel" in set(_types(tokenizer.get("decoder")))
        self._bytes = _byte_level_alphabet()
        self._as_they_are: Collection[str] = {
            str(token.get("content")) for token in tokenizer.get("added_tokens") or () if isinstance(token, dict)
        }

    def of(self, token: str) -> bytes:
        """Returns the bytes of a token; special tokens are their own text."""
        if token in self._as_they_are:
            return token.encode()
        if self._is_byte_level:
            return b"".join(
                bytes((self._bytes[letter],)) if letter in self._bytes else letter.encode() for letter in token
            )
        if (byte := _BYTE.fullmatch(token)) is not None:
            return bytes((int(byte[1], 16),))
        return token.replace(_SPACE, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte for each letter of byte-level tokenizers; printable characters represent themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _types(decoder: object) -> Iterator[str]:
    """Yields the types of a decoder and of those within it."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for inner in decoder.get("decoders") or ():
            yield from _types(inner)


class StopMatcher:
    """Finds stop strings in the bytes of the tokens, and returns the text that can be shown.

    Holds back incomplete characters, and text that may be the start of a stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(text for text in stop if text)
        self._longest = max(map(len, self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; the text from there on is never shown."""

    def feed(self, piece: bytes) -> str:
        """Returns the text that can be shown after these bytes."""
        return self._show(self._decoder.decode(piece))

    def finish(self) -> str:
        """Returns the text held back, at the end of the generation."""
        shown = self._show(self._decoder.decode(b"", final=True))
        rest, self._held = ("" if self.stopped else self._held), ""
        return shown + rest

    def _show(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [index for index in map(text.find, self._stop) if index >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _undecided(self, text: str) -> int:
        """Returns the length of the longest suffix of `text` that is a prefix of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


REQUEST_FIELDS = frozenset({
    *("prompt", "n", "max_tokens", "seed", "stop", "logit_bias", "grammar", "json_schema", "add_special", "stream"),
    *("stream_options", "return_progress", "cache_prompt", "cache_salt", "id_slot", "model", "ends_loops"),
})  # fmt: skip
"""Fields of a completion; all others are sampling parameters of the library."""
MAX_JSON_BYTES = 64 * 1024 * 1024
"""Maximum size of a model's JSON file; tokenizers with large vocabularies have 30 MB."""
MAX_SCHEMA_CHARS = 64 * 1024
MAX_REPETITIONS = 2000
"""Maximum number of repetitions, as in llama.cpp's grammars; 10**9 would use up all memory."""
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_BRACES = re.compile(r"\{(\d*)(?:,(\d*))?\}")


@dataclass(slots=True)
class Usage:
    """Tokens and times of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    tokenize_seconds: float = 0.0
    prompt_seconds: float = 0.0
    """Time from the start to the first token of each choice."""
    decode_seconds: float = 0.0
    """Time from there to the last token."""
    is_undivided: bool = False
    """Whether a choice was generated in one piece, so that `decode_seconds` includes the prompt."""


class TextEngine(Engine):
    """A loaded model that generates text. Chats arrive as rendered prompts."""

    context_tokens: int

    @property
    def routes(self) -> Mapping[str, Route]:
        """See Engine.routes."""
        return {
            "/v1/completions": Route(self.complete),
            "/v1/embeddings": Route(self._embed),
            "/tokenize": Route(self._tokenize, Turn.NONE),
            "/slots/0?action=erase": Route(lambda *_: {"n_erased": self.forget()}, Turn.ALL),
        }

    def props(self) -> dict[str, Any]:
        """See Engine.props."""
        return {"default_generation_settings": {"n_ctx": self.context_tokens}}

    @abstractmethod
    def complete(self, body: dict[str, Any], caller: Caller) -> None:
        """Streams the continuations of a request's prompts, and its usage."""

    @abstractmethod
    def prompt_of(self, prompt: str | list[int], *, add_special: bool) -> Sequence[Any]:
        """Converts a prompt for the engine. Raises RefusedError if it is invalid."""

    @abstractmethod
    def tokens_of(self, text: str, *, add_special: bool) -> list[int]:
        """Tokenizes a text; called in any thread."""

    @abstractmethod
    def piece_of(self, token: int) -> bytes:
        """Returns the bytes of a token; called in any thread."""

    @abstractmethod
    def forget(self) -> int:
        """Erases the cached prompts; returns their number of tokens. Called without running requests."""

    def read_prompts(self, body: dict[str, Any]) -> tuple[list[Any], Usage]:
        """Returns the prompts of a completion as the engine accepts them, and the usage so far."""
        began = time.perf_counter()
        prompts = [self.prompt_of(prompt, add_special=body.get("add_special", True)) for prompt in _prompts_of(body)]
        return prompts, Usage(prompt_tokens=sum(map(len, prompts)), tokenize_seconds=time.perf_counter() - began)

    def embed(self, texts: list[str], caller: Caller) -> dict[str, Any]:
        """Returns the response to an embedding request."""
        del texts, caller
        raise RefusedError("this engine does not support embeddings", UNSUPPORTED)

    def _embed(self, body: dict[str, Any], caller: Caller) -> dict[str, Any]:
        given = body["input"]
        return self.embed([given] if isinstance(given, str) else given, caller)

    def _tokenize(self, body: dict[str, Any], _: Caller) -> dict[str, Any]:
        ids = self.tokens_of(body["content"], add_special=bool(body.get("add_special")))
        with_pieces = body.get("with_pieces")
        return {"tokens": [{"id": id_, "piece": list(self.piece_of(id_))} for id_ in ids] if with_pieces else ids}


def send_choice(caller: Caller, index: int, text: str, finish_reason: str | None) -> None:
    """Sends the next text of a choice."""
    caller.send({"choices": [{"index": index, "text": text, "finish_reason": finish_reason}]})


def send_progress(caller: Caller, total: int, processed: int, cached: int = 0) -> None:
    """Sends the progress of prompt processing, in tokens."""
    caller.send({"choices": [], "prompt_progress": {"total": total, "cache": cached, "processed": processed}})


def send_usage(caller: Caller, usage: Usage) -> None:
    """Sends the usage of a request."""
    tokens: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    timings = {"tokenize_ms": usage.tokenize_seconds * 1e3}
    if usage.is_undivided:
        timings["undivided_ms"] = (usage.prompt_seconds + usage.decode_seconds) * 1e3
    else:
        timings |= {"prompt_ms": usage.prompt_seconds * 1e3, "predicted_ms": usage.decode_seconds * 1e3}
    caller.send({"choices": [], "usage": tokens, "timings": timings})


def _prompts_of(body: dict[str, Any]) -> list[str | list[int]]:
    """Returns the prompts of a completion: texts, or lists of token ids."""
    given = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    return [given] if given and isinstance(given[0], int) else given


def check_prompt(tokens: Sequence[object], context_tokens: int, vocabulary: int | None = None) -> None:
    """Raises RefusedError for a prompt that is empty, has invalid token ids, or fills the context."""
    if not tokens:
        raise RefusedError("prompt: must have at least one token")
    if vocabulary is not None and not all(isinstance(token, int) and 0 <= token < vocabulary for token in tokens):
        raise RefusedError(f"prompt: token ids must be 0 to {vocabulary - 1}")
    if len(tokens) >= context_tokens:
        message = f"the prompt has {len(tokens)} tokens; the context of this model has {context_tokens}"
        raise RefusedError(message, TOO_LONG)


def sampling_of(body: dict[str, Any], known: frozenset[str], library: str) -> dict[str, Any]:
    """Returns the sampling parameters of a completion. Raises RefusedError for an unknown one."""
    sampling = {name: value for name, value in body.items() if name not in REQUEST_FIELDS}
    for name in sampling.keys() - known:
        raise RefusedError(f"{name}: {library} has no such parameter")
    return sampling


def logit_bias_of(body: dict[str, Any], vocabulary: int) -> dict[int, float]:
    """Returns the bias of tokens within the vocabulary."""
    given = ((int(token), value) for token, value in (body.get("logit_bias") or {}).items())
    return {token: value for token, value in given if 0 <= token < vocabulary}


def token_limit(body: dict[str, Any], prompt_tokens: int, context_tokens: int) -> int:
    """Returns the maximum number of tokens in the answer."""
    room = context_tokens - prompt_tokens
    return room if body.get("max_tokens") is None else min(int(body["max_tokens"]), room)


def schema_fault(schema: str) -> str:
    """Returns why a schema is too large; empty: it is not."""
    if len(schema) > MAX_SCHEMA_CHARS:
        return f"the schema must be at most {MAX_SCHEMA_CHARS:,} characters"
    left: list[Any] = [json.loads(schema)]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            if any(count > MAX_REPETITIONS for count in _counts(part)):
                return f"at most {MAX_REPETITIONS:,} repetitions are allowed"
            left += part.values()
    return ""


def _counts(part: dict[str, Any]) -> list[float]:
    counts = [value for name in _COUNTS if isinstance(value := part.get(name), int | float)]
    pattern = part.get("pattern")
    if isinstance(pattern, str):
        # Nine digits exceed the limit already.
        counts += [float(digits[:9]) for braces in _BRACES.findall(pattern) for digits in braces if digits]
    return counts


def json_file(path: Path) -> dict[str, Any]:
    """Returns the object in a model's JSON file; empty: the file does not exist. Raises RefusedError."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_JSON_BYTES:
        raise RefusedError(f"{path} is over {MAX_JSON_BYTES:,} bytes")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}
