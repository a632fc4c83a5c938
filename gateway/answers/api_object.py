"""Objects of the HTTP API made from messages: the published schema says which field each member shows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args, get_origin

from google.protobuf import timestamp_pb2
from google.protobuf.message import Message
from pydantic import BaseModel
from pydantic.fields import FieldInfo

JsonObject = dict[str, object]

_TIME = timestamp_pb2.Timestamp.DESCRIPTOR.full_name


@dataclass(frozen=True, slots=True)
class Shows:
    """The message field that a member shows, if its name differs from the member's."""

    field: str


class _Plan(NamedTuple):
    """How an object is made from a message."""

    template: JsonObject
    """All required members, in order; constants have their values."""
    fields: tuple[tuple[str, Callable[[Any], object]], ...]
    """Members that show a field, with the function that reads it."""
    computed: frozenset[str]
    """Members that the caller computes."""


def object_json(schema: type[BaseModel], message: Message, **computed: object) -> JsonObject:
    """Returns the object of a message, as JSON values.

    A member that may be null is null if its field is empty. Times are Unix seconds in a number, RFC 3339 in a string.
    `computed`: members that show no field, and replacements of others. A member with a default is left out unless it is
    computed.
    """
    plan = _plan(schema, message.DESCRIPTOR)
    assert computed.keys() >= plan.computed, f"{schema.__name__} lacks {plan.computed - computed.keys()}"
    made = plan.template.copy()
    for name, value in plan.fields:
        made[name] = value(message)
    made.update(computed)
    return made


@cache
def _plan(schema: type[BaseModel], message: Any) -> _Plan:
    members = {name: info for name, info in schema.model_fields.items() if info.is_required()}
    values = {name: _value(name, info, message.fields_by_name) for name, info in members.items()}
    constants = {name: _constant(info) for name, info in members.items() if _is_constant(info)}
    return _Plan(
        template={name: constants.get(name) for name in members},
        fields=tuple((name, value) for name, value in values.items() if value is not None and name not in constants),
        computed=frozenset(name for name, value in values.items() if value is None) - constants.keys(),
    )


def _is_constant(info: FieldInfo) -> bool:
    is_one_word = get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1
    return is_one_word or info.annotation is type(None)


def _constant(info: FieldInfo) -> object:
    return next(iter(get_args(info.annotation)), None)


def _value(name: str, info: FieldInfo, fields: Mapping[str, Any]) -> Callable[[Any], object] | None:
    """Returns a function that reads a member from the message; None: the message has no field for it."""
    shown = next((each.field for each in info.metadata if isinstance(each, Shows)), name)
    field = fields.get(shown)
    if field is None:
        return None
    kinds = {info.annotation, *get_args(info.annotation)}
    read, may_be_null, kind = attrgetter(shown), type(None) in kinds, field.message_type
    if kind is not None and kind.full_name == _TIME:
        written = _time_text if str in kinds else attrgetter("seconds")
        if may_be_null:
            return lambda message: written(read(message)) if message.HasField(shown) else None
        return lambda message: written(read(message))
    if kind is not None and kind.GetOptions().map_entry:
        return lambda message: dict(read(message)) or None
    return (lambda message: read(message) or None) if may_be_null else read


def _time_text(time: timestamp_pb2.Timestamp) -> str:
    """Returns a time as RFC 3339 in UTC, to the millisecond."""
    whole = datetime.fromtimestamp(time.seconds, UTC).replace(tzinfo=None).isoformat()
    return f"{whole}.{time.nanos // 1_000_000:03d}Z"
