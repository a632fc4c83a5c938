"""The routes of an engine that generates text: llama.cpp's and their words."""

import json
import re
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner_svc.engine_host.http_server import TOO_LONG, UNSUPPORTED, Caller, Engine, RefusedError, Route, Turn

REQUEST_FIELDS = frozenset({
    *("prompt", "n", "max_tokens", "seed", "stop", "logit_bias", "grammar", "json_schema", "add_special", "stream"),
    *("stream_options", "return_progress", "cache_prompt", "cache_salt", "id_slot", "model", "ends_loops"),
})  # fmt: skip
"""Fields of a completion; the others are parameters of the library's sampling."""
MAX_JSON_BYTES = 64 * 1024 * 1024
"""Maximum size of a JSON file of a model; tokenizers of large vocabularies have 30 MB."""
MAX_SCHEMA_CHARS = 64 * 1024
MAX_REPETITIONS = 2000
"""Maximum number of repetitions of one item, as in llama.cpp's own grammars; 10**9 would take all memory."""
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_BRACES = re.compile(r"\{(\d*)(?:,(\d*))?\}")


@dataclass(slots=True)
class Usage:
    """The figures of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    tokenize_seconds: float = 0.0
    """For turning the prompts into tokens."""
    prompt_seconds: float = 0.0
    """To the first token of each choice, from the engine's first work on it."""
    decode_seconds: float = 0.0
    """From there to the last token."""
    is_undivided: bool = False
    """Whether a choice came in one piece, so that `decode_seconds` has the time of its prompt too."""


class TextEngine(Engine):
    """A loaded model that generates text. Chats come as rendered prompts."""

    context_tokens: int

    @property
    def routes(self) -> Mapping[str, Route]:
        """See Engine.routes."""
        return {
            "/v1/completions": Route(self.complete),
            "/v1/embeddings": Route(self._embed),
            "/tokenize": Route(self._tokenize, Turn.NONE),
            "/slots/0": Route(lambda *_: {"n_erased": self.forget()}, Turn.ALL),
        }

    def props(self) -> dict[str, Any]:
        """See Engine.props."""
        return {"default_generation_settings": {"n_ctx": self.context_tokens}}

    @abstractmethod
    def complete(self, body: dict[str, Any], caller: Caller) -> None:
        """Stream the continuations of the prompts of a request, and its usage."""

    @abstractmethod
    def prompt_of(self, prompt: str | list[int], *, add_special: bool) -> Sequence[Any]:
        """Returns a prompt as the engine takes it. Raises RefusedError for one that it cannot take."""

    @abstractmethod
    def tokens_of(self, text: str, *, add_special: bool) -> list[int]:
        """Returns the tokens of a text; called in any thread."""

    @abstractmethod
    def piece_of(self, token: int) -> bytes:
        """Returns the bytes of a token; called in any thread."""

    @abstractmethod
    def forget(self) -> int:
        """Erase the cached prompts; returns their number of tokens. No request runs."""

    def read_prompts(self, body: dict[str, Any]) -> tuple[list[Any], Usage]:
        """Returns the prompts of a completion as the engine takes them, and its usage so far."""
        began = time.perf_counter()
        prompts = [self.prompt_of(prompt, add_special=body.get("add_special", True)) for prompt in _prompts_of(body)]
        return prompts, Usage(prompt_tokens=sum(map(len, prompts)), tokenize_seconds=time.perf_counter() - began)

    def embed(self, texts: list[str], caller: Caller) -> dict[str, Any]:
        """Returns the answer to a request for embeddings."""
        del texts, caller
        raise RefusedError("this engine gives no embeddings", UNSUPPORTED)

    def _embed(self, body: dict[str, Any], caller: Caller) -> dict[str, Any]:
        given = body["input"]
        return self.embed([given] if isinstance(given, str) else given, caller)

    def _tokenize(self, body: dict[str, Any], _: Caller) -> dict[str, Any]:
        ids = self.tokens_of(body["content"], add_special=bool(body.get("add_special")))
        with_pieces = body.get("with_pieces")
        return {"tokens": [{"id": id_, "piece": list(self.piece_of(id_))} for id_ in ids] if with_pieces else ids}


def send_choice(caller: Caller, index: int, text: str, finish_reason: str | None) -> None:
    """Send the next text of a choice."""
    caller.send({"choices": [{"index": index, "text": text, "finish_reason": finish_reason}]})


def send_progress(caller: Caller, total: int, processed: int, cached: int = 0) -> None:
    """Send the progress of a prefill, in tokens."""
    caller.send({"choices": [], "prompt_progress": {"total": total, "cache": cached, "processed": processed}})


def send_usage(caller: Caller, usage: Usage) -> None:
    """Send the figures of the request."""
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
    """Returns the prompts of a completion: texts, or the ids of tokens."""
    given = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    return [given] if given and isinstance(given[0], int) else given


def check_prompt(tokens: Sequence[object], context_tokens: int, vocabulary: int | None = None) -> None:
    """Raise RefusedError for a prompt that is empty, has ids that are no token's, or fills the context."""
    if not tokens:
        raise RefusedError("prompt: must have at least one token")
    if vocabulary is not None and not all(isinstance(token, int) and 0 <= token < vocabulary for token in tokens):
        raise RefusedError(f"prompt: token ids must be 0 to {vocabulary - 1}")
    if len(tokens) >= context_tokens:
        message = f"the prompt has {len(tokens)} tokens; the context of this model has {context_tokens}"
        raise RefusedError(message, TOO_LONG)


def sampling_of(body: dict[str, Any], known: frozenset[str], library: str) -> dict[str, Any]:
    """Returns the parameters of sampling in a completion. Raises RefusedError for one that the library lacks."""
    sampling = {name: value for name, value in body.items() if name not in REQUEST_FIELDS}
    for name in sampling.keys() - known:
        raise RefusedError(f"{name}: {library} has no such parameter")
    return sampling


def logit_bias_of(body: dict[str, Any], vocabulary: int) -> dict[int, float]:
    """Returns the bias of the tokens that the vocabulary has."""
    given = ((int(token), value) for token, value in (body.get("logit_bias") or {}).items())
    return {token: value for token, value in given if 0 <= token < vocabulary}


def token_limit(body: dict[str, Any], prompt_tokens: int, context_tokens: int) -> int:
    """Returns the most tokens of an answer."""
    room = context_tokens - prompt_tokens
    return room if body.get("max_tokens") is None else min(int(body["max_tokens"]), room)


def schema_fault(schema: str) -> str:
    """Returns the fault of a schema that is too large; empty: none."""
    if len(schema) > MAX_SCHEMA_CHARS:
        return f"the schema must be at most {MAX_SCHEMA_CHARS:,} characters"
    left: list[Any] = [json.loads(schema)]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            if any(count > MAX_REPETITIONS for count in _counts(part)):
                return f"at most {MAX_REPETITIONS:,} repetitions can be asked for"
            left += part.values()
    return ""


def _counts(part: dict[str, Any]) -> list[float]:
    counts = [value for name in _COUNTS if isinstance(value := part.get(name), int | float)]
    pattern = part.get("pattern")
    if isinstance(pattern, str):
        # Nine digits are over the limit already.
        counts += [float(digits[:9]) for braces in _BRACES.findall(pattern) for digits in braces if digits]
    return counts


def json_file(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file of a model; empty: there is none. Raises RefusedError."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_JSON_BYTES:
        raise RefusedError(f"{path} is over {MAX_JSON_BYTES:,} bytes")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{path} is no JSON: {error}") from error
    return content if isinstance(content, dict) else {}
