"""Parses request bodies of llama-server's routes, reduced to the fields that the fake uses."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from weft_testing.fake_backend.slots import Token

MAX_TOKENS_PER_CHOICE = 1_000_000
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
DEFAULT_TOP_LOGPROBS = 20

_WORD = re.compile(r"\s*\S+|\s+")
_MEDIA_PARTS = MappingProxyType({"image_url": "image", "input_audio": "audio"})


class RequestError(Exception):
    """A request that gets an error object; `facts` are additional fields of it."""

    def __init__(self, status: int, kind: str, message: str, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.facts = dict(facts or {})


def bad_request(message: str) -> RequestError:
    """Returns the usual rejection."""
    return RequestError(400, "invalid_request_error", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One chat or text completion."""

    is_chat: bool
    prompts: list[list[Token]]
    """Tokens of each prompt; a chat has one."""
    echo_text: str
    """Answer of an echoing model: the last user message, or the first prompt."""
    model: str
    stream: bool
    include_usage: bool
    return_progress: bool
    use_cache: bool
    slot: int | None
    """The requested slot; None: any."""
    max_tokens: int | None
    ignores_end: bool
    choices_per_prompt: int
    stops: tuple[str, ...]
    top_logprobs: int | None
    """None: no log probabilities."""
    wants_json: bool
    json_schema: Any
    offers_tools: bool
    """Whether a tool may be called."""
    turn: int
    """Number of model turns since the last user message."""
    answers_tool: bool
    """Whether the last message is a tool result."""


def words(text: str) -> list[str]:
    """Splits a text into the fake's tokens: words with their preceding space."""
    return _WORD.findall(text)


def parse_chat(body: Any, alias: str) -> GenerationRequest:
    """Parses a /v1/chat/completions body. Raises RequestError.

    Chat template: one token for each message's role, its words, and one token before the answer.
    """
    fields = _object(body)
    messages = fields.get("messages")
    if messages is None:
        raise bad_request("'messages' is required")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise bad_request("'messages' must be an array of objects")
    prompt: list[Token] = []
    last_user_text = ""
    for message in messages:
        text = _message_text(message)
        prompt.append(f"<|{message.get('role')}|>")
        prompt.extend(words(text))
        if message.get("role") == "user":
            last_user_text = text
    prompt.append("<|assistant|>")
    response_format = fields.get("response_format") or {}
    if not isinstance(response_format, dict):
        raise bad_request("'response_format' must be an object")
    kind = response_format.get("type", "text")
    if kind not in {"text", "json_object", "json_schema"}:
        raise bad_request('response_format type must be one of "text" or "json_object", but got: ' + str(kind))
    offers_tools = bool(fields.get("tools")) and fields.get("tool_choice") != "none"
    return _request(
        fields,
        alias,
        is_chat=True,
        prompts=[prompt],
        echo_text=last_user_text,
        top_logprobs=_chat_top_logprobs(fields),
        wants_json=kind != "text",
        json_schema=(response_format.get("json_schema") or {}).get("schema") or response_format.get("schema"),
        offers_tools=offers_tools,
        turn=_turn(messages),
        answers_tool=bool(messages) and messages[-1].get("role") == "tool",
    )


def refuse_media(body: Any, status: int) -> None:
    """Raises RequestError with `status` for a chat with images or audio, like llama-server without a projector."""
    messages = body.get("messages") if isinstance(body, dict) else None
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = _MEDIA_PARTS.get(str(part.get("type"))) if isinstance(part, dict) else None
            if kind is not None:
                hint = "hint: if this is unexpected, you may need to provide the mmproj"
                raise RequestError(status, "server_error", f"{kind} input is not supported - {hint}")


def parse_completion(body: Any, alias: str) -> GenerationRequest:
    """Parses a /v1/completions body; `echo` and `suffix` are ignored, as in llama-server. Raises RequestError."""
    fields = _object(body)
    prompts = prompt_list(fields.get("prompt"), "prompt")
    return _request(
        fields,
        alias,
        is_chat=False,
        prompts=prompts,
        echo_text="".join(map(str, prompts[0])),
        top_logprobs=_integer(fields, "logprobs", 0, MAX_TOP_LOGPROBS),
        wants_json=fields.get("json_schema") is not None,
        json_schema=fields.get("json_schema"),
        offers_tools=False,
        turn=0,
        answers_tool=False,
    )


def prompt_list(value: Any, name: str) -> list[list[Token]]:
    """Parses one prompt or several, each text or token ids. Raises RequestError."""
    if isinstance(value, str):
        return [list(words(value))]
    if isinstance(value, list) and value:
        if all(isinstance(item, int) for item in value):
            return [list(value)]
        if all(isinstance(item, str) or _is_token_list(item) for item in value):
            return [list(words(item)) if isinstance(item, str) else list(item) for item in value]
    raise bad_request(f'"{name}" must be a string, an array of tokens, or an array of those')


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) for item in value)


def _request(fields: dict[str, Any], alias: str, **of_the_kind: Any) -> GenerationRequest:
    stream_options = fields.get("stream_options") or {}
    return GenerationRequest(
        model=str(fields.get("model") or alias),
        stream=fields.get("stream") is True,
        include_usage=isinstance(stream_options, dict) and stream_options.get("include_usage") is True,
        return_progress=fields.get("return_progress") is True,
        use_cache=fields.get("cache_prompt", True) is not False,
        slot=_integer(fields, "id_slot", -1, MAX_TOKENS_PER_CHOICE),
        max_tokens=_max_tokens(fields),
        ignores_end=fields.get("ignore_eos") is True,
        choices_per_prompt=_integer(fields, "n", 1, MAX_CHOICES) or 1,
        stops=_stops(fields.get("stop")),
        **of_the_kind,
    )


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    return body


def _integer(fields: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise bad_request(f"'{name}' must be an integer from {low} to {high}")
    return value


def _turn(messages: Sequence[Mapping[str, Any]]) -> int:
    roles = [message.get("role") for message in messages]
    since = len(roles) - roles[::-1].index("user") if "user" in roles else 0
    return roles[since:].count("assistant")


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        limit = _integer(fields, name, -1, 2**31 - 1)
        if limit is not None:
            # llama-server checks the limit after a token, so 0 yields one.
            return None if limit < 0 else min(max(limit, 1), MAX_TOKENS_PER_CHOICE)
    return None


def _chat_top_logprobs(fields: Mapping[str, Any]) -> int | None:
    top = _integer(fields, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if fields.get("logprobs") is True:
        return DEFAULT_TOP_LOGPROBS if top is None else top
    if top is not None:
        raise bad_request("top_logprobs requires logprobs to be set to true")
    return None


def _stops(value: Any) -> tuple[str, ...]:
    stops: Sequence[Any] = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(stop, str) for stop in stops):
        raise bad_request(f"'stop' must be a string or at most {MAX_STOPS} strings")
    return tuple(stop for stop in stops if stop)


def _message_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise bad_request("'content' must be a string, an array of parts or null")
