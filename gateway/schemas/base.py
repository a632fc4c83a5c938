"""What every request model stands on."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, WithJsonSchema

from weft.kernel.durations import MAX_DURATION_CHARS

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1

# Union members carry a tag with this mark; it is no part of the path a caller is told.
TAG_MARK = "~"


class StopAtFirstError(FailFast):
    """FailFast that may stand inside a union; a list of a million wrong entries costs one error."""

    __hash__ = object.__hash__


class StrictModel(BaseModel):
    """Takes JSON as it is: "1" is no number, 1.5 no integer, NaN nothing at all."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", frozen=True)


def _shape(value: object) -> str | None:
    """Which member of a union a JSON value is meant for, by its own shape."""
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
    """Chooses between `~text`, `~object`, `~texts`, `~tokens` and `~token_lists`; else the error says `expected`."""
    return Discriminator(_shape, custom_error_type="wrong_shape", custom_error_message=expected)


def _text_or_list(value: object) -> str | None:
    if isinstance(value, str):
        return "~text"
    return "~list" if isinstance(value, list) else None


def text_or_list(expected: str) -> Discriminator:
    """Chooses between `~text` and `~list`; else the error says `expected`."""
    return Discriminator(_text_or_list, custom_error_type="wrong_shape", custom_error_message=expected)


TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Tokens = Annotated[list[TokenId], StopAtFirstError()]
JsonMap = dict[str, Any]

TextsOrTokens = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[str], StopAtFirstError(), Tag("~texts")]
    | Annotated[list[TokenId], StopAtFirstError(), Tag("~tokens")]
    | Annotated[list[Tokens], StopAtFirstError(), Tag("~token_lists")],
    by_shape("Input should be a string, a list of strings, a list of token ids or a list of those, and not empty"),
]
"""What completions call a prompt and embeddings call input."""

UserName = Annotated[str, Field(max_length=512)]
"""Who the caller says it asks for. Accepted and not used."""

KeepAlive = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "maxLength": MAX_DURATION_CHARS}]}),
]
"""Seconds, or a length such as "5m"; `weft.kernel.durations` reads it, and its error says what may be written."""
