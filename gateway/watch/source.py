"""What a watch streams: a source yields the things of one kind, then every change of them."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from enum import StrEnum

from google.protobuf.message import Message

from gateway.answers.answer_builder import encode_json
from weft.documents.codec import document_of
from weft.kernel.principal import Access, Principal


class ChangeType(StrEnum):
    """What a change does to the reader's copy of one kind."""

    PUT = "put"
    """A thing is new or changed: `object` replaces it."""
    DELETE = "delete"
    """A thing is gone; the reader may never have had it."""
    SYNCED = "synced"
    """Everything that there is has been sent; changes follow."""
    RESET = "reset"
    """The reader drops everything of this kind: all of it is sent again."""
    UNAVAILABLE = "unavailable"
    """The source cannot be reached; what the reader has is as last known, until the next `reset`."""


def _no_object() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of one kind."""

    type: ChangeType
    name: str = ""
    """The thing's name, unique in its kind; empty where the change is about the whole kind."""
    encode: Callable[[], bytes | None] = _no_object
    """Returns the JSON of the thing, of a `PUT` alone. It is called when the change is sent; None: by now the thing is
    gone, and its deletion follows."""
    message: str = ""
    """Why the source is unavailable."""


def put(name: str, encode: Callable[[], bytes | None]) -> Change:
    """Returns the change to a new or changed thing; `encode` returns its JSON once it is sent."""
    return Change(type=ChangeType.PUT, name=name, encode=encode)


def put_message(name: str, message: Message) -> Change:
    """Returns the change to a new or changed thing whose JSON is the document of a message."""
    return put(name, lambda: encode_json(document_of(message)))


def delete(name: str) -> Change:
    """Returns the change to a thing that is gone."""
    return Change(type=ChangeType.DELETE, name=name)


def synced() -> Change:
    """Returns the mark after everything that there is."""
    return Change(type=ChangeType.SYNCED)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchCaller:
    """The caller of a watch."""

    principal: Principal
    tenant: str
    """The tenant of its requests and tasks."""


class WatchSource(ABC):
    """A source of the things of one kind."""

    kind: str
    """The word of the kind, such as "model"."""
    access: Access
    """The scope that a caller needs, that of the kind's list."""
    by_name: bool = False
    """Whether a scope that is limited to names suffices: then `changes` leaves out what the caller may not see."""

    @abstractmethod
    def changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        """Yields a put for each thing that there is, `synced`, then every change for as long as it is read.

        A name that changes often may be yielded often: the stream merges what its reader has not read yet. Raises a
        WeftError when the source is lost, and WATCH_LAGGED where it is read too slowly; it is then called again, and
        what it yields then replaces everything before.
        """
