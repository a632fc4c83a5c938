"""Raw bytes to a request model, strictly: real JSON, not too deep, and an error that names the field."""

import json
import re
from itertools import accumulate
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from gateway.schemas.base import TAG_MARK
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

Model = TypeVar("Model", bound=BaseModel)

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_EMPTY_PAIR = re.compile(rb"\[\]|\{\}")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
# As signed bytes: an opening bracket counts +1, a closing one -1.
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_MAX_MESSAGE_CHARS = 500
_MAX_SEGMENT_CHARS = 64


def parse(model: type[Model], raw: bytes, *, max_depth: int) -> Model:
    """The request in `raw`. Raises MALFORMED_REQUEST for what is not JSON, INVALID_ARGUMENT naming the field else."""
    require_strict_json(raw, max_depth)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)[0]
    raise _field_error(found)


def parse_governed(model: type[Model], raw: bytes, *, max_depth: int) -> Model:
    """As `parse`, for what somebody may have to agree to: a name that comes twice in an object is MALFORMED_REQUEST."""
    found = parse(model, raw, max_depth=max_depth)
    json.loads(raw, object_pairs_hook=_require_names_once)
    return found


def _require_names_once(members: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in members}) < len(members):
        raise WeftError(Reason.MALFORMED_REQUEST, "the body has a name twice in one object")


def parse_json(raw: bytes, *, max_depth: int) -> Any:
    """The value in `raw`, for others to check. Raises MALFORMED_REQUEST for what is not JSON."""
    require_strict_json(raw, max_depth)
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise WeftError(Reason.MALFORMED_REQUEST, f"the body is not valid JSON: {error}"[:_MAX_MESSAGE_CHARS]) from None


def require_strict_json(raw: bytes, max_depth: int) -> None:
    """Refuse what the parser would let pass: deep nesting, NaN and Infinity, text that is not UTF-8.

    It looks only for these; whether the rest is JSON is the parser's business.
    """
    if not raw.isascii():
        try:
            raw.decode()
        except UnicodeDecodeError:
            raise WeftError(Reason.MALFORMED_REQUEST, "the body is not valid UTF-8") from None
    suspicious = b"NaN" in raw or b"Infinity" in raw
    if not suspicious and raw.count(b"[") + raw.count(b"{") <= max_depth:
        return
    outside_strings = _STRING.sub(b"", raw)
    if b"NaN" in outside_strings or b"Infinity" in outside_strings:
        raise WeftError(Reason.MALFORMED_REQUEST, "the body is not valid JSON: NaN and Infinity are no JSON numbers")
    if _depth(outside_strings) > max_depth:
        raise WeftError(Reason.MALFORMED_REQUEST, f"the body is nested deeper than {max_depth} levels")


def _depth(outside_strings: bytes) -> int:
    # In one pass: two replacements in a row would also drop the pairs that only the first one has emptied.
    brackets = _EMPTY_PAIR.sub(b"", outside_strings.translate(None, _NOT_BRACKETS))
    steps = memoryview(brackets.translate(_STEPS)).cast("b")
    # The pairs dropped above were one level deeper than what is left.
    return max(accumulate(steps), default=0) + 1


def _field_error(found: ErrorDetails) -> WeftError:
    if found["type"] == "json_invalid":
        detail = found["msg"].removeprefix("Invalid JSON: ")
        return WeftError(Reason.MALFORMED_REQUEST, f"the body is not valid JSON: {detail}"[:_MAX_MESSAGE_CHARS])
    path = field_path(found["loc"])
    if not path:
        return WeftError(Reason.MALFORMED_REQUEST, "the body must be a JSON object")
    return invalid_field(path, found["msg"].removeprefix("Value error, ")[:_MAX_MESSAGE_CHARS])


def field_path(location: tuple[int | str, ...]) -> str:
    """A pydantic location as a caller writes it: `messages[2].role`."""
    path = ""
    for segment in location:
        if isinstance(segment, int):
            path += f"[{segment}]"
        elif not segment.startswith(TAG_MARK):
            # A segment may be a key the caller chose.
            path += f".{segment[:_MAX_SEGMENT_CHARS]}" if path else segment[:_MAX_SEGMENT_CHARS]
    return path
