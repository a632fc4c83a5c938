"""Changed copies of messages."""

from typing import Any, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def changed(message: M, **fields: Any) -> M:
    """A copy with other values of these fields, as `dataclasses.replace` makes one; None clears a field."""
    copy = type(message)()
    copy.CopyFrom(message)
    for name in fields:
        copy.ClearField(name)
    copy.MergeFrom(type(message)(**fields))
    return copy
