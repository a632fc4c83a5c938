"""Strict parsing of JSON and base64url in tokens: bounded and unambiguous."""

import base64
import binascii
import json
import math
import re
from typing import Any

MAX_TOKEN_BYTES = 16 * 1024
MAX_DEPTH = 10
MAX_VALUES = 1024

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_BASE64URL = re.compile(r"[A-Za-z0-9_-]*={0,2}")


class MalformedToken(ValueError):  # noqa: N818 - named for the condition
    """A token is malformed. The message never quotes the token."""


def read_object(data: bytes) -> dict[str, Any]:
    """Returns the JSON object in `data`.

    Raises MalformedToken if parsers could differ (duplicate names, NaN, infinity), and beyond MAX_TOKEN_BYTES,
    MAX_DEPTH and MAX_VALUES.
    """
    if len(data) > MAX_TOKEN_BYTES:
        raise MalformedToken(f"is larger than {MAX_TOKEN_BYTES // 1024} KiB")
    try:
        text = data.decode("utf-8")
        _require_bounded(text)
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except MalformedToken:
        raise
    except (ValueError, RecursionError) as error:
        raise MalformedToken("is not JSON") from error
    if not isinstance(found, dict):
        raise MalformedToken("is not a JSON object")
    return found


def read_envelope(text: str) -> dict[str, Any]:
    """Returns the JSON object in `text`, plain or base64url. Raises as `read_object`."""
    return read_object(text.encode("utf-8", "surrogatepass") if text.startswith("{") else from_base64url(text))


def canonical_json(value: object) -> bytes:
    """Returns `value` as UTF-8 JSON with sorted names and no spaces. Raises MalformedToken if it is not JSON."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")
    except (TypeError, ValueError) as error:
        raise MalformedToken("contains a value that JSON cannot represent") from error


def to_base64url(data: bytes) -> str:
    """Returns `data` as base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def from_base64url(text: str) -> bytes:
    """Returns the bytes in a base64url text with or without padding. Raises MalformedToken."""
    if _BASE64URL.fullmatch(text) is None:
        raise MalformedToken("is not base64url")
    bare = text.rstrip("=")
    try:
        data = base64.urlsafe_b64decode(bare + "=" * (-len(bare) % 4))
    except binascii.Error as error:
        raise MalformedToken("is not base64url") from error
    if to_base64url(data) != bare:
        raise MalformedToken("is not base64url")
    return data


def _require_bounded(text: str) -> None:
    depth = values = 0
    for character in _STRING.sub("", text):
        if character in "[{":
            depth += 1
            values += 1
        elif character in "]}":
            depth -= 1
        elif character == ",":
            values += 1
        if depth > MAX_DEPTH or values > MAX_VALUES:
            raise MalformedToken("is nested too deeply or too large")


def _unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        raise MalformedToken("has a name twice")
    return found


def _no_constant(_: str) -> Any:
    raise MalformedToken("has an invalid number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise MalformedToken("contains a number beyond the range of a double")
    return number
