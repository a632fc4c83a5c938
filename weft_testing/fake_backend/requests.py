"""Parses request bodies of llama-server's routes, reduced to the fields that the fake uses."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from weft_testing.fake_backend.slots import Token

MAX_TOKENS_PER_CHOICE = 1_000_000
MAX_CHOICES = 128
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


class _Fields(msgspec.Struct):
    """The fields of both bodies; null is the same as a missing field."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_progress: bool | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    n_predict: int | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    prompt: Any = None
    json_schema: Any = None


def _fields(body: Any) -> _Fields:
    try:
        return msgspec.convert(body, _Fields)
    except msgspec.ValidationError as error:
        raise bad_request(str(error)) from None


def parse_chat(body: Any, alias: str) -> GenerationRequest:
    """Parses a /v1/chat/completions body. Raises RequestError.

    Chat template: one token for each message's role, its words, and one token before the answer.
    """
    fields = _fields(body)
    if fields.messages is None:
        raise bad_request("'messages' is required")
    prompt: list[Token] = []
    last_user_text = ""
    for message in fields.messages:
        text = _message_text(message)
        prompt.append(f"<|{message.get('role')}|>")
        prompt.extend(words(text))
        if message.get("role") == "user":
            last_user_text = text
    prompt.append("<|assistant|>")
    response_format = fields.response_format or {}
    top_logprobs = DEFAULT_TOP_LOGPROBS if fields.top_logprobs is None else fields.top_logprobs
    return _request(
        fields,
        alias,
        is_chat=True,
        prompts=[prompt],
        echo_text=last_user_text,
        top_logprobs=top_logprobs if fields.logprobs else None,
        wants_json=response_format.get("type", "text") != "text",
        json_schema=(response_format.get("json_schema") or {}).get("schema") or response_format.get("schema"),
        offers_tools=bool(fields.tools) and fields.tool_choice != "none",
        turn=_turn(fields.messages),
        answers_tool=bool(fields.messages) and fields.messages[-1].get("role") == "tool",
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
    fields = _fields(body)
    prompts = prompt_list(fields.prompt, "prompt")
    return _request(
        fields,
        alias,
        is_chat=False,
        prompts=prompts,
        echo_text="".join(map(str, prompts[0])),
        top_logprobs=fields.logprobs,
        wants_json=fields.json_schema is not None,
        json_schema=fields.json_schema,
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


def _request(fields: _Fields, alias: str, **of_the_kind: Any) -> GenerationRequest:
    limits = (fields.max_completion_tokens, fields.max_tokens, fields.n_predict)
    limit = next((limit for limit in limits if limit is not None), -1)
    return GenerationRequest(
        model=fields.model or alias,
        stream=bool(fields.stream),
        include_usage=(fields.stream_options or {}).get("include_usage") is True,
        return_progress=bool(fields.return_progress),
        use_cache=fields.cache_prompt is not False,
        slot=fields.id_slot,
        # llama-server checks the limit after a token, so 0 yields one.
        max_tokens=None if limit < 0 else min(max(limit, 1), MAX_TOKENS_PER_CHOICE),
        ignores_end=bool(fields.ignore_eos),
        choices_per_prompt=fields.n or 1,
        stops=tuple(filter(None, [fields.stop] if isinstance(fields.stop, str) else fields.stop or [])),
        **of_the_kind,
    )


def _turn(messages: Sequence[Mapping[str, Any]]) -> int:
    roles = [message.get("role") for message in messages]
    since = len(roles) - roles[::-1].index("user") if "user" in roles else 0
    return roles[since:].count("assistant")


def _message_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise bad_request("'content' must be a string, an array of parts or null")
