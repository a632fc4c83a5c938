"""How much a request may ask for, where the configuration says it rather than the schema."""

from collections.abc import Sized
from typing import Any

from gateway.config import RequestLimits
from gateway.intake.request_model import HandledRequest
from weft.kernel.errors import invalid_field


def require_within(asked: HandledRequest, limits: RequestLimits) -> None:
    """Raises INVALID_ARGUMENT naming the field that asks for too much; fields that a surface lacks say nothing."""
    given = asked.model_fields_set
    if "user" in given:
        _require_few(asked.user, "user", limits.max_user_chars, "characters")
    if "metadata" in given:
        _require_few(_value(asked, "metadata"), "metadata", limits.max_metadata, "entries")
    if "logit_bias" in given:
        _require_few(_value(asked, "logit_bias"), "logit_bias", limits.max_logit_bias, "tokens")
    for name in given & {"top_logprobs", "logprobs"}:
        count = _value(asked, name)
        # In a chat, `logprobs` is yes or no.
        if isinstance(count, int) and not isinstance(count, bool) and count > limits.max_top_logprobs:
            raise invalid_field(name, f"must be at most {limits.max_top_logprobs}")
    for name in given & {"stop", "stop_sequences"}:
        _require_short_stops(_value(asked, name), name, limits.max_stop_chars)
    if "n" in given:
        _require_few_tokens(asked, limits)


def _value(asked: HandledRequest, name: str) -> Any:
    return getattr(asked, name, None)


def _require_few(value: object, field: str, most: int, what: str) -> None:
    if isinstance(value, Sized) and len(value) > most:
        raise invalid_field(field, f"must have at most {most} {what}")


def _require_short_stops(stop: object, field: str, most: int) -> None:
    for index, text in enumerate(stop if isinstance(stop, list) else ()):
        _require_few(text, f"{field}[{index}]", most, "characters")
    if isinstance(stop, str):
        _require_few(stop, field, most, "characters")


def _require_few_tokens(asked: HandledRequest, limits: RequestLimits) -> None:
    """Every answer of a prompt may be as long as `max_tokens` says, and all of them are made at once."""
    count = _value(asked, "n") or 1
    newer = _value(asked, "max_completion_tokens")
    name = "max_tokens" if newer is None else "max_completion_tokens"
    length = _value(asked, name)
    if count > 1 and length is not None and count * length > limits.max_choice_tokens:
        raise invalid_field(name, f"must be at most {limits.max_choice_tokens // count} with 'n' {count}")
