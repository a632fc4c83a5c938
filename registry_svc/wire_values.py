"""Checks of single values from callers. Each raises INVALID_ARGUMENT naming the field."""

import base64
import binascii
import math
import re
from collections.abc import Sequence

from google.protobuf import duration_pb2

from weft.api.runner.v1 import load_pb2
from weft.kernel.access.rpc_auth import caller
from weft.kernel.errors.error_tree import invalid_field

# Characters that can control a terminal, and NUL, which PostgreSQL cannot store. Newlines and tabs are text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def require_text(text: str, field: str, max_chars: int) -> str:
    """Returns one line of at most `max_chars` printable characters."""
    if len(text) > max_chars or not text.isprintable():
        raise invalid_field(
            field, f"must be at most {max_chars} characters, without line breaks and control characters"
        )
    return text


def cleaned_multiline(text: str, field: str, max_chars: int) -> str:
    """Returns a text of at most `max_chars` characters, with a space in place of each control character.

    For texts that a runner forwards from a program: its heartbeat must not fail because the program prints colours.
    """
    if len(text) > max_chars:
        raise invalid_field(field, f"must be at most {max_chars} characters")
    return without_control_characters(text)


def without_control_characters(text: str) -> str:
    """Returns a text with a space in place of each control character other than newline and tab."""
    return _CONTROL.sub(" ", text)


def require_count(number: int, field: str) -> int:
    """Returns a number that is not negative."""
    if number < 0:
        raise invalid_field(field, "must not be negative")
    return number


def require_at_most(items: Sequence[object], field: str, limit: int) -> None:
    """Rejects more than `limit` items."""
    if len(items) > limit:
        raise invalid_field(field, f"at most {limit}, has {len(items)}")


MAX_ACTOR_CHARS = 256


# Separators to remove from one-line values, since cleaned_multiline keeps newlines and tabs.
_LINES = re.compile(r"[\t\n\u2028\u2029]")


def to_actor(requested_by: str) -> str:
    """Returns the requesting actor on one line, with a space in place of each control character."""
    known = caller()
    # A caller that may not act for others is identified by its name.
    said = requested_by if known.names_tenants else known.name
    return _LINES.sub(" ", cleaned_multiline(said, "requested_by", MAX_ACTOR_CHARS))


MAX_PARAMETERS = 64
MAX_PARAMETER_CHARS = 64
MAX_WORD_CHARS = 256
# Ten years: a longer time is a mistake in the unit.
MAX_KEEP_ALIVE_SECONDS = 10 * 365 * 86_400
_MAX_NANOS = 999_999_999


def check_options(options: load_pb2.LoadOptions, field: str) -> None:
    """Raises INVALID_ARGUMENT naming the field for options beyond a limit."""
    require_at_most(list(options.parameters), f"{field}.parameters", MAX_PARAMETERS)
    for name, value in options.parameters.items():
        if not name:
            raise invalid_field(f"{field}.parameters", "must have names")
        require_text(name, f"{field}.parameters", MAX_PARAMETER_CHARS)
        _check_value(value, f"{field}.parameters.{name}")
    if options.HasField("keep_alive"):
        _check_keep_alive(options.keep_alive, f"{field}.keep_alive")


def _check_value(value: load_pb2.LoadValue, field: str) -> None:
    match value.WhichOneof("kind"):
        case None:
            raise invalid_field(field, "must be a whole number, a number, a word, or yes or no")
        case "number":
            if not math.isfinite(value.number):
                raise invalid_field(field, "must be a finite number")
        case "word":
            require_text(value.word, field, MAX_WORD_CHARS)


def _check_keep_alive(duration: duration_pb2.Duration, field: str) -> None:
    mixed = duration.seconds * duration.nanos < 0
    if mixed or abs(duration.seconds) > MAX_KEEP_ALIVE_SECONDS or abs(duration.nanos) > _MAX_NANOS:
        raise invalid_field(field, f"must be a duration of at most {MAX_KEEP_ALIVE_SECONDS} s, or a negative one")


def page_token(last: str) -> str:
    """Returns the token of the page that begins after `last`, a number or a name."""
    return base64.urlsafe_b64encode(last.encode("ascii")).decode("ascii")


def read_page_token(token: str) -> str:
    """Returns what `page_token` was called with; empty for an invalid token."""
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        return ""
