"""Sources of a watch: each yields the objects of one kind, then every change."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from enum import StrEnum

from google.protobuf.message import Message

from weft.documents.codec import document_of
from weft.kernel.access.principal import Access, Principal
from weft.kernel.text.json_lines import encode_json


class ChangeType(StrEnum):
    """What a change does to the reader's copy of one kind."""

    PUT = "put"
    """An object is new or changed: `object` replaces it."""
    DELETE = "delete"
    """An object is gone; the reader may never have had it."""
    SYNCED = "synced"
    """All existing objects have been sent; changes follow."""
    RESET = "reset"
    """The reader drops all objects of this kind, which are then sent again."""
    UNAVAILABLE = "unavailable"
    """The source cannot be reached. The reader's copy is as last known until the next `reset`."""


def _no_object() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of one kind."""

    type: ChangeType
    name: str = ""
    """The object's name, unique in its kind; empty: the change is about the whole kind."""
    encode: Callable[[], bytes | None] = _no_object
    """Returns the JSON of the object of a `PUT`, called when the change is sent; None: the object is gone, and its
    deletion follows."""
    message: str = ""
    """Why the source is unavailable."""


def put(name: str, encode: Callable[[], bytes | None]) -> Change:
    """Returns the change to a new or changed object; `encode` returns its JSON when it is sent."""
    return Change(type=ChangeType.PUT, name=name, encode=encode)


def put_message(name: str, message: Message) -> Change:
    """Returns the change to a new or changed object, whose JSON is the document of a message."""
    return put(name, lambda: encode_json(document_of(message)))


def delete(name: str) -> Change:
    """Returns the change that deletes an object."""
    return Change(type=ChangeType.DELETE, name=name)


def synced() -> Change:
    """Returns the mark after all existing objects."""
    return Change(type=ChangeType.SYNCED)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchCaller:
    """The caller of a watch."""

    principal: Principal
    tenant: str
    """The tenant of its requests and tasks."""


@dataclass(frozen=True, kw_only=True)
class WatchSource:
    """A source of the objects of one kind."""

    kind: str
    """The kind, such as "model"."""
    access: Access
    """The access that a caller needs: that of the kind's list."""
    by_name: bool = False
    """Whether a scope limited to names suffices. `changes` then leaves out what the caller may not see."""
    changes: Callable[[WatchCaller], AsyncGenerator[Change]]
    """Yields a put for each existing object, `synced`, then every change while it is read.

    A name that changes often may be yielded often: the stream merges unread changes. Raises a WeftError if the source
    is lost, WATCH_LAGGED if it is read too slowly. It is then called again, and its output replaces everything before.
    """
