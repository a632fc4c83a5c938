"""What the texts of a message make a process of the mesh open, read or run, and the permission that this needs.

The proto options (`reach` in common/v1/document.proto) state it for each text. `require_reach` is the only check; it
serves declarations and operations over HTTP and gRPC.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from weft.api.common.v1 import document_pb2 as pb
from weft.kernel.access.principal import ANY_SOURCE, RUN_PROGRAMS, USE_SECRETS, Access, Principal
from weft.kernel.channels.outbound import is_link_local
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.load_parameters import parameter_reach
from weft.kernel.models.model_source import asked_source, reaches_anywhere, server_source
from weft.kernel.schemas.field_rules import MapKey, path_text
from weft.kernel.values.names import SECRET_PREFIX
from weft.kernel.values.reach import Reach

_WORDS: Mapping[Reach, str] = MappingProxyType(
    {
        Reach.ADDRESS: "an address",
        Reach.PACKET: "an address",
        Reach.FILE: "a file",
        Reach.SOURCE: "an address or a file",
        Reach.VARIABLE: "a variable or a secret",
        Reach.TEMPLATE: "a variable",
        Reach.PROGRAM: "a program",
        Reach.TOOL: "a tool or a graph that a runner runs",
        Reach.HEADER: "a header of requests to a provider",
    }
)
_NEEDED: Mapping[Reach, tuple[Access, ...]] = MappingProxyType(
    {
        Reach.NONE: (),
        Reach.NAME: (),
        Reach.ADDRESS: (ANY_SOURCE,),
        Reach.FILE: (ANY_SOURCE,),
        Reach.PACKET: (ANY_SOURCE,),
        Reach.SOURCE: (ANY_SOURCE,),
        Reach.VARIABLE: (USE_SECRETS,),
        Reach.TEMPLATE: (USE_SECRETS,),
        Reach.PROGRAM: RUN_PROGRAMS,
        Reach.TOOL: (ANY_SOURCE,),
        Reach.HEADER: (ANY_SOURCE,),
    }
)


def _reaches_anywhere(text: str) -> bool:
    try:
        return server_source(text, "source") is not None or reaches_anywhere(asked_source(text, "source"))
    except FieldError:
        return False  # refused as malformed


_IS_NAMED: Mapping[Reach, Callable[[str], bool]] = MappingProxyType(
    {Reach.SOURCE: _reaches_anywhere, Reach.TEMPLATE: lambda text: "${" in text}
)
"""Whether a text names something; of other kinds, each that is not empty does."""


@dataclass(frozen=True, slots=True)
class Reached:
    """A text of a message that makes a process open, read or run something."""

    path: str
    """Its path in the message, such as "wake.by_mesh.http.url"."""
    reach: Reach
    text: str


def reach_of(field: FieldDescriptor) -> Reach:
    """Returns what a field states; UNSPECIFIED: nothing."""
    return Reach(field.GetOptions().Extensions[pb.reach])


def require_reach(principal: Principal, message: Message, what: str = "") -> None:
    """Raises PERMISSION_DENIED for the first text that needs a permission which the caller lacks, or no caller has.

    `what` is the message in words, such as "model/qwen".
    """
    for text, needed in needed_access(message):
        if principal.may(needed) and not _is_link_local(text):
            continue
        path = text.path.removeprefix("manifest.")
        names = f"{what}: {path} names" if what else f"{path} names"
        if principal.may(needed):
            raise WeftError(Reason.PERMISSION_DENIED, f"{names} a link-local address, which no caller may name")
        raise WeftError(Reason.PERMISSION_DENIED, f"the key lacks the scope {needed}: {names} {_WORDS[text.reach]}")


def needed_access(message: Message) -> Iterator[tuple[Reached, Access]]:
    """Yields the permissions that the texts of a message need, with the text of each."""
    for each in _texts(message, ()):
        needed = _NEEDED[each.reach]
        if needed and _IS_NAMED.get(each.reach, bool)(each.text):
            yield from ((each, access) for access in needed)
        if each.reach is Reach.HEADER and each.text.startswith(SECRET_PREFIX):
            yield each, USE_SECRETS


def _is_link_local(text: Reached) -> bool:
    """Whether it has a link-local address; names are resolved and checked when they are used."""
    try:
        return is_link_local(text.text if text.reach is Reach.PACKET else urlsplit(text.text).hostname or "")
    except ValueError:
        return False


def _texts(message: Message, path: tuple[str | int, ...]) -> Iterator[Reached]:
    plan = _plan(message.DESCRIPTOR)
    for field, value in message.ListFields():
        if field in plan:
            yield from plan[field](value, (*path, field.name))


_Texts = Callable[[Any, tuple[str | int, ...]], Iterable[Reached]]


@cache
def _plan(descriptor: Descriptor) -> Mapping[FieldDescriptor, _Texts]:
    """Returns how to find the texts of the fields of a message. The key is the descriptor, as in field_rules."""
    return MappingProxyType({field: _reader(field) for field in descriptor.fields if _has_texts(field)})


def _reader(field: FieldDescriptor) -> _Texts:
    kind, reach = field.message_type, reach_of(field)
    if kind is not None and kind.GetOptions().map_entry:
        if reach == Reach.PARAMETERS:
            return lambda items, path: (
                Reached(path_text((*path, MapKey(key))), parameter_reach(key), value.word)
                for key, value in items.items()
            )
        return lambda items, path: (
            Reached(path_text((*path, MapKey(key))), reach, str(value)) for key, value in items.items()
        )
    if kind is not None:
        if field.is_repeated:
            return lambda items, path: (
                found for index, each in enumerate(items) for found in _texts(each, (*path, index))
            )
        return _texts
    if field.is_repeated:
        return lambda items, path: (Reached(path_text((*path, at)), reach, text) for at, text in enumerate(items))
    return lambda text, path: (Reached(path_text(path), reach, text),)


def _has_texts(field: FieldDescriptor, around: frozenset[str] = frozenset()) -> bool:
    kind = field.message_type
    if kind is None or kind.GetOptions().map_entry:
        return reach_of(field) != Reach.UNSPECIFIED
    inner = around | {kind.full_name}
    return kind.full_name not in around and any(_has_texts(each, inner) for each in kind.fields)
