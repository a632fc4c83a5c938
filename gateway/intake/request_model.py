"""Base classes of request schemas, fields shared by all inference requests, and their configured limits."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag, WithJsonSchema
from typing_extensions import override

from gateway.gateway_config import RequestLimits
from weft.dispatch.extra_fields import CARRIED
from weft.dispatch.parameter_checks import MAX_WORD_CHARS, prefix_seconds
from weft.durable.batches import MAX_METADATA, MAX_METADATA_NAME_CHARS, MAX_METADATA_VALUE_CHARS
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.values.names import MAX_CLIENT_CHARS
from weft.kernel.values.units import MAX_DURATION_CHARS

MAX_ID_CHARS = 128
"""Maximum length of this API's ids."""
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1

# Mark of union members' tags, which is not part of field paths in errors.
TAG_MARK = "~"


class StopAtFirstError(FailFast):
    """A FailFast that works inside a union: a list of a million invalid entries causes one error."""

    __hash__ = object.__hash__


class StrictModel(BaseModel):
    """A schema without type conversions: "1" is not a number, 1.5 is not an integer, and NaN is refused.

    Unknown fields are kept. Each gives a warning (`unknown_fields`) unless the class `uses` it.
    """

    model_config = ConfigDict(defer_build=True, strict=True, allow_inf_nan=False, extra="allow", frozen=True)

    def uses(self, name: str) -> bool:  # noqa: ARG002 - subclasses use it
        """Whether an unknown field is passed on, has another warning, or is silently left out on purpose."""
        return False


class CarryingModel(StrictModel):
    """A part of an earlier answer: fields that a provider needs go back to it."""

    @override
    def uses(self, name: str) -> bool:
        return name in CARRIED


class OpenModel(StrictModel):
    """A schema whose unknown fields are all passed on, or have another warning."""

    @override
    def uses(self, name: str) -> bool:
        return True


def _shape(value: object) -> str | None:
    """Returns the union member for a JSON value, by its shape."""
    match value:
        case str():
            return "~text"
        case dict():
            return "~object"
        case [str(), *_]:
            return "~texts"
        case [int(), *_]:
            return "~tokens"
        case [list(), *_]:
            return "~token_lists"
        case _:
            return None


def by_shape(expected: str) -> Discriminator:
    """Chooses between `~text`, `~object`, `~texts`, `~tokens` and `~token_lists`; otherwise the error is `expected`."""
    return Discriminator(_shape, custom_error_type="wrong_shape", custom_error_message=expected)


def _text_or_list(value: object) -> str | None:
    if isinstance(value, str):
        return "~text"
    return "~list" if isinstance(value, list) else None


def text_or_list(expected: str) -> Discriminator:
    """Chooses between `~text` and `~list`; otherwise the error is `expected`."""
    return Discriminator(_text_or_list, custom_error_type="wrong_shape", custom_error_message=expected)


def by_type(*types: str) -> Discriminator:
    """Chooses between the tags of these types and `~other` by the member `type`."""

    def kind(value: object) -> str:
        found = value.get("type") if isinstance(value, dict) else None
        return f"{TAG_MARK}{found}" if found in types else "~other"

    return Discriminator(kind)


TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Tokens = Annotated[list[TokenId], StopAtFirstError()]
JsonMap = dict[str, Any]

TextsOrTokens = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[str], StopAtFirstError(), Tag("~texts")]
    | Annotated[list[TokenId], StopAtFirstError(), Tag("~tokens")]
    | Annotated[list[Tokens], StopAtFirstError(), Tag("~token_lists")],
    by_shape("must be a string, a list of strings, a list of token ids or a list of those, and not empty"),
]
"""The type of a completion's prompt and of an embedding's input."""


def _as_text(value: object) -> object:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


AS_TEXT = BeforeValidator(_as_text)
"""For text that weft stores or shows and does not interpret: another JSON value becomes its JSON."""
UserName = Annotated[str, Field(max_length=512), AS_TEXT]
"""The end user's name, as the caller reports it. Accepted and not used."""

KeepAlive = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "maxLength": MAX_DURATION_CHARS}]}),
]
"""Seconds, or a duration such as "5m"; `weft.kernel.values.units` parses it, and its error lists the formats."""


# Fields about OpenAI's own service: accounts, prices, stores and caches. They are not used, without a warning because
# clients send them by default.
NOT_USED = frozenset({
    "metadata", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip
EXTENSION_PREFIX = "x_"
"""Prefix of fields for the mesh, which are never passed to an engine."""


class HandledRequest(StrictModel):
    """Fields of every inference request that control its handling; they are never passed to an engine."""

    user: UserName | None = None
    allow_remote: bool | None = None
    """Extension: whether the request may be sent to remote models and tools."""
    keep_alive: KeepAlive | None = None
    """Extension: how long the model stays loaded afterwards: seconds, "5m", 0 (not at all), -1 (no limit)."""
    prefix_keep_alive: KeepAlive | None = None
    """Extension: how long requests with the same beginning are expected, like `keep_alive`, up to a day: an idle
    engine processes it again after a load. The header X-Prefix-Keep-Alive takes precedence."""
    prompt_cache_options: JsonMap | None = None
    """`ttl` is used as `prefix_keep_alive`; an unknown form gives a warning. `mode` is not used."""
    prompt_cache_key: Any = None
    """Requests with the same key are sent to the same runner where possible, as with the headers X-Session-Id and
    X-Session-Affinity, which take precedence. At most 256 characters."""
    x_priority: Literal["high", "normal", "low"] | None = None
    """Extension: the priority class. The header X-Priority takes precedence."""
    x_client_id: Annotated[str, Field(max_length=MAX_CLIENT_CHARS)] | None = None
    """Extension: the client's id, for profiles and statistics. The header X-Client-Id takes precedence."""
    durable: Literal["wait"] | None = None
    """Extension: whether the request runs as a durable task while its caller waits."""
    on_disconnect: Literal["cancel", "keep"] | None = None
    """Extension, with `durable`: whether a disconnect cancels or keeps the task. Absent: cancel."""

    @override
    def uses(self, name: str) -> bool:
        return name in NOT_USED

    @property
    def end_user(self) -> str:
        """The end user's name; empty: none is given."""
        return self.user or ""

    @property
    def turns(self) -> Sequence[tuple[str | None, object]]:
        """The role and content of each turn: a text, or parts of which some have a `text`; empty: it has none."""
        return ()

    @property
    def own_metadata(self) -> Mapping[str, str]:
        """The caller's metadata, in APIs that support it."""
        return self.__dict__.get("metadata") or {}

    @property
    def cache_seconds(self) -> float | None:
        """The `ttl` of `prompt_cache_options`; 0: absent; None: an unknown form."""
        lifetime = self.prompt_cache_options.get("ttl") if self.prompt_cache_options else None
        try:
            return 0.0 if lifetime is None else prefix_seconds(lifetime, "prompt_cache_options.ttl")
        except FieldError:
            return None


def require_within(params: HandledRequest, limits: RequestLimits) -> None:
    """Raises INVALID_ARGUMENT naming a field above its configured limit; ignores fields that the schema lacks."""
    given = params.__pydantic_fields_set__
    if "user" in given:
        require_few(params.user, "user", limits.max_user_chars, "characters")
    if "metadata" in given:
        require_few(_value(params, "metadata"), "metadata", limits.max_metadata, "entries")
    if "logit_bias" in given:
        require_few(_value(params, "logit_bias"), "logit_bias", limits.max_logit_bias, "tokens")
    for name in given & {"top_logprobs", "logprobs"}:
        count = _value(params, name)
        # In a chat, `logprobs` is a boolean.
        if isinstance(count, int) and not isinstance(count, bool) and count > limits.max_top_logprobs:
            raise invalid_field(name, f"must be at most {limits.max_top_logprobs}")
    for name in given & {"stop", "stop_sequences"}:
        _require_short_stops(_value(params, name), name, limits.max_stop_chars)
    if "n" in given:
        _require_few_tokens(params, limits)


def _value(params: HandledRequest, name: str) -> Any:
    return vars(params).get(name)  # without fields that the schema lacks


def require_few(value: object, field: str, most: int, what: str) -> None:
    """Raises INVALID_ARGUMENT naming `field` if `value` has more than `most` entries; `what` names them."""
    if hasattr(value, "__len__") and len(value) > most:
        raise invalid_field(field, f"must have at most {most} {what}")


def _require_short_stops(stop: object, field: str, most: int) -> None:
    for index, text in enumerate(stop if isinstance(stop, list) else ()):
        require_few(text, f"{field}[{index}]", most, "characters")
    if isinstance(stop, str):
        require_few(stop, field, most, "characters")


def _require_few_tokens(params: HandledRequest, limits: RequestLimits) -> None:
    """Limits `n` times `max_tokens`, because all answers to a prompt are generated concurrently."""
    count = _value(params, "n") or 1
    newer = _value(params, "max_completion_tokens")
    name = "max_tokens" if newer is None else "max_completion_tokens"
    length = _value(params, name)
    if count > 1 and length is not None and count * length > limits.max_choice_tokens:
        raise invalid_field(name, f"must be at most {limits.max_choice_tokens // count} with 'n' {count}")


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_NAME_CHARS)],
        Annotated[str, Field(max_length=MAX_METADATA_VALUE_CHARS), AS_TEXT],
    ],
    Field(max_length=MAX_METADATA),
]
"""The caller's metadata of a stored resource."""

ModelName = str
"""A model or pool of the mesh, `route/NAME`, or `auto`."""

Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARS)]
