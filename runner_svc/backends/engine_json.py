"""JSON that an engine sent: whatever is wrong with it is a protocol error of that engine, and nobody else's fault.

msgspec refuses numbers that no float holds, NaN, halves of surrogate pairs and control characters by itself. Of a name
that comes twice the last value counts, as with every reader that clients use.
"""

from typing import TypeVar

import msgspec

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

JSON_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding may raise: the wrong form or type, text that is not UTF-8, more levels than the interpreter allows."""
_Kind = TypeVar("_Kind")


def read_json(raw: bytes, kind: type[_Kind], what: str) -> _Kind:
    """`raw` as `kind`. Raises BACKEND_PROTOCOL_ERROR with `what` ("the backend's scores are") and why."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except JSON_FAULTS as error:
        raise malformed(f"{what} malformed:", error) from error


def malformed(what: str, error: Exception) -> WeftError:
    """The error for JSON that cannot be read; `what` is the beginning of its message."""
    why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"{what} {why}")
