"""Converts messages to documents (JSON types) by the options of their protos; see common/v1/document.proto.

The plan of a message type is compiled at its first use and cached. Values are written unchecked: one invalid record
must not make a whole list unreadable. `weft.documents.reader` is the inverse.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC
from functools import cache
from types import MappingProxyType
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, OneofDescriptor
from google.protobuf.message import Message

from weft.api.common.v1 import document_pb2 as pb
from weft.documents.computed import COMPUTED
from weft.kernel.schemas.field_rules import DURATION, TIMESTAMP, MapKey, enum_words, rules_of

UNKNOWN = "unknown"
"""Word for an enum value that is unset or unknown to this version."""
Encode = Callable[[Any], Any]
_NANOSECONDS = 1e9


def document_of(message: Message) -> dict[str, Any]:
    """Returns a message as a document, with fields in the order of the proto."""
    plan = plan_of(message.DESCRIPTOR)
    found: dict[str, Any] = {"kind": plan.kind} if plan.kind else {}
    for write in plan.writers:
        write(message, found)
    if plan.compute is not None:
        plan.compute(message, found)
    return found


def without_defaults(message: Message) -> dict[str, Any]:
    """Returns a message as a document without fields that have their default."""
    descriptor: Any = message.DESCRIPTOR
    return leave_out_defaults(descriptor, document_of(message))


def leave_out_defaults(descriptor: Descriptor, document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document of a message of this type without fields that have their default."""
    plans, found = _plans_by_key(descriptor), {}
    for key, value in document.items():
        plan = plans.get(key)
        kind = plan.field.message_type if plan is not None and not plan.field.is_repeated else None
        part = leave_out_defaults(kind, value) if kind is not None and isinstance(value, dict) else value
        if plan is None or plan.presence == pb.PRESENCE_REQUIRED or part != default_of(plan):
            found[key] = part
    return found


@cache
def _plans_by_key(descriptor: Descriptor) -> "Mapping[str, FieldPlan]":
    """Returns the fields of a document by name, including those of inline messages and of every variant."""
    found: dict[str, FieldPlan] = {}
    for plan in plan_of(descriptor).fields:
        if plan.inline or plan.type_oneof is not None:
            assert plan.field.message_type is not None
            found |= _plans_by_key(plan.field.message_type)
        else:
            found[plan.key] = plan
    return found


def default_of(plan: "FieldPlan") -> Any:
    """Returns the value of a field that a document omits, as JSON types; None: unset."""
    field = plan.field
    if plan.default is not None or plan.nullable:
        return plan.default
    if is_map(field) or (field.message_type is not None and not field.is_repeated):
        return {}
    return [] if field.is_repeated else field.default_value


def word_of(message: Message, field: str) -> str:
    """Returns the word of an enum field's value, such as "running"; "unknown" if it has none."""
    descriptor = message.DESCRIPTOR.fields_by_name[field].enum_type
    assert descriptor is not None, "it is a field of an enum"
    return enum_words(descriptor).get(getattr(message, field), UNKNOWN)


@dataclass(frozen=True, slots=True)
class FieldPlan:
    """A field of a message in documents."""

    field: FieldDescriptor
    key: str
    other_key: str
    """The name in the other spelling, which readers accept too."""
    presence: int
    """A value of `document_pb2.Presence`."""
    nullable: bool
    """Whether documents omit it while it is unset."""
    default: Any
    """What documents show for an unset value, as JSON types; None: nothing."""
    inline: bool
    type_oneof: OneofDescriptor | None
    """The oneof with a type word that contains it."""


@dataclass(frozen=True, slots=True)
class MessagePlan:
    """A message type in documents."""

    kind: str
    fields: tuple[FieldPlan, ...]
    """The fields in output order."""
    writers: tuple[Callable[[Any, dict[str, Any]], None], ...]
    compute: Callable[[Any, dict[str, Any]], None] | None
    """Adds values that do not derive from a single field."""


@cache
def plan_of(descriptor: Descriptor) -> MessagePlan:
    """Returns the plan of a message type."""
    snake = descriptor.GetOptions().Extensions[pb.document_message].snake_case
    fields = tuple(
        _field_plan(field, snake=snake)
        for field in descriptor.fields
        if not field.GetOptions().Extensions[pb.document].hidden
    )
    writers = [_oneof_writer(one) for one in descriptor.oneofs if is_typed(one)]
    writers += [_writer(plan) for plan in fields if plan.type_oneof is None]
    computed = COMPUTED.get(descriptor.full_name)
    return MessagePlan(
        kind=descriptor.GetOptions().Extensions[pb.document_message].kind,
        fields=fields,
        writers=tuple(writers),
        compute=computed.compute if computed is not None else None,
    )


def is_typed(oneof: OneofDescriptor) -> bool:
    """Whether a word in documents says which field of the oneof is set."""
    return bool(oneof.GetOptions().Extensions[pb.document_oneof].type)


def _field_plan(field: FieldDescriptor, *, snake: bool) -> FieldPlan:
    options = field.GetOptions().Extensions[pb.document]
    name = options.name or (f"{field.name}_seconds" if is_of(field, DURATION) else field.name)
    default = json.loads(options.default_json) if options.default_json else None
    presence = options.presence
    if not presence and not field.has_presence and not field.is_repeated and is_text(field) and default is None:
        presence = pb.PRESENCE_NOT_EMPTY
    oneof = field.containing_oneof
    return FieldPlan(
        field=field,
        key=name if snake else camel(name),
        other_key=camel(name) if snake else name,
        presence=presence,
        nullable=default is None
        and (presence == pb.PRESENCE_NOT_EMPTY or (not presence and field.has_presence and not field.is_repeated)),
        default=default,
        inline=options.inline,
        type_oneof=oneof if oneof is not None and is_typed(oneof) else None,
    )


def is_of(field: FieldDescriptor, kind: str) -> bool:
    """Whether a field holds messages of a type."""
    return field.message_type is not None and field.message_type.full_name == kind


def is_text(field: FieldDescriptor) -> bool:
    """Whether a field holds strings."""
    return bool(field.type == FieldDescriptor.TYPE_STRING)


def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is a map."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def camel(name: str) -> str:
    """Returns a name in lowerCamelCase."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def _oneof_writer(oneof: OneofDescriptor) -> Callable[[Any, dict[str, Any]], None]:
    key, words = oneof.GetOptions().Extensions[pb.document_oneof].type, oneof_words(oneof)

    def write(message: Any, found: dict[str, Any]) -> None:
        which = message.WhichOneof(oneof.name)
        found[key] = words.get(which, UNKNOWN)
        if which is not None:
            found.update(document_of(getattr(message, which)))

    return write


@cache
def oneof_words(oneof: OneofDescriptor) -> Mapping[str, str]:
    """Returns the type words of a oneof's fields."""
    return MappingProxyType(
        {field.name: field.GetOptions().Extensions[pb.document].name or field.name for field in oneof.fields}
    )


def _writer(plan: FieldPlan) -> Callable[[Any, dict[str, Any]], None]:
    name, encode = plan.field.name, _encoder(plan.field)
    always = plan.presence in (pb.PRESENCE_REQUIRED, pb.PRESENCE_ALWAYS)

    def write_inline(message: Any, found: dict[str, Any]) -> None:
        if always or message.HasField(name):
            found.update(encode(getattr(message, name)))

    if plan.inline:
        return write_inline
    return _present_writer(plan, encode, always=always) if plan.field.has_presence else _plain_writer(plan, encode)


def _present_writer(plan: FieldPlan, encode: Encode, *, always: bool) -> Callable[[Any, dict[str, Any]], None]:
    """Returns the writer of a field that can be unset."""
    name, key, default = plan.field.name, plan.key, plan.default
    not_empty = plan.presence == pb.PRESENCE_NOT_EMPTY

    def write(message: Any, found: dict[str, Any]) -> None:
        if always or message.HasField(name):
            value = encode(getattr(message, name))
            if value or not not_empty:
                found[key] = value
        elif default is not None:
            found[key] = default

    return write


def _plain_writer(plan: FieldPlan, encode: Encode) -> Callable[[Any, dict[str, Any]], None]:
    """Returns the writer of a list, a map, or a field without presence."""
    name, key = plan.field.name, plan.key
    not_empty = plan.presence == pb.PRESENCE_NOT_EMPTY
    default = None if plan.field.is_repeated else plan.default

    def write(message: Any, found: dict[str, Any]) -> None:
        value = getattr(message, name)
        if value or not not_empty:
            found[key] = encode(value) if value or default is None else default

    return write


def _encoder(field: FieldDescriptor) -> Encode:
    """Returns the function from a field's value to JSON types."""
    options = field.GetOptions().Extensions[pb.document]
    if is_map(field):
        assert field.message_type is not None
        value = _value_encoder(field.message_type.fields_by_name["value"])
        # Map entries are unordered.
        return lambda items: {str(key): value(items[key]) for key in sorted(items)}
    if options.keyed:
        assert field.message_type is not None
        of, to = [each.name for each in field.message_type.fields]
        return lambda items: {str(getattr(item, of)): getattr(item, to) for item in items}
    if field.is_repeated and field.enum_type is not None and is_declared_enum(field.enum_type):
        words = enum_words(field.enum_type)
        return lambda items: [words[item] for item in items if item in words]
    encode = _value_encoder(field)
    return (lambda items: [encode(item) for item in items]) if field.is_repeated else encode


def is_declared_enum(enum: EnumDescriptor) -> bool:
    """Whether the enum occurs in documents that users write."""
    return bool(enum.GetOptions().Extensions[pb.document_enum].declared)


def _value_encoder(field: FieldDescriptor) -> Encode:
    options = field.GetOptions().Extensions[pb.document]
    if field.message_type is not None:
        return _message_encoder(field)
    if field.enum_type is not None:
        words = enum_words(field.enum_type)
        return lambda number: words.get(number, UNKNOWN)
    if options.bool_words:
        no, yes = options.bool_words
        return lambda value: yes if value else no
    if options.unit:
        unit = options.unit
        return lambda value: -(-value // unit)
    return lambda value: value


def _message_encoder(field: FieldDescriptor) -> Encode:
    if is_of(field, TIMESTAMP):
        return lambda moment: moment.ToDatetime(tzinfo=UTC).isoformat().replace("+00:00", "Z")
    if is_of(field, DURATION):
        # Durations that users write are shown as 300, not 300.0.
        is_declared = bool(rules_of(field).ByteSize()) or field.GetOptions().Extensions[pb.document].keep_alive
        return _whole_seconds if is_declared else lambda length: length.ToNanoseconds() / _NANOSECONDS
    value_oneof = value_oneof_of(field.message_type)
    if value_oneof is not None:
        name = value_oneof.name
        return lambda value: getattr(value, value.WhichOneof(name)) if value.WhichOneof(name) else ""
    return document_of


def value_oneof_of(kind: Descriptor | None) -> OneofDescriptor | None:
    """Returns the oneof whose value documents show instead of the message; None: there is none."""
    oneofs = kind.oneofs if kind is not None else []
    return next((one for one in oneofs if one.GetOptions().Extensions[pb.document_oneof].value), None)


def _whole_seconds(length: Any) -> int | float:
    seconds = float(length.ToNanoseconds() / _NANOSECONDS)
    return int(seconds) if seconds.is_integer() else seconds


def document_path(descriptor: Descriptor | None, path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Converts a path in a message to the path in its document."""
    found: list[str | int] = []
    for step in path:
        if isinstance(step, int | MapKey):
            found.append(step)
            continue
        plan = None
        if descriptor is not None:
            plan = next((each for each in plan_of(descriptor).fields if each.field.name == step), None)
        if plan is None:
            # A oneof's name is not part of the path: documents have its fields.
            found += [] if descriptor is not None and step in descriptor.oneofs_by_name else [camel(step)]
            descriptor = None
            continue
        if not plan.inline and plan.type_oneof is None:
            found.append(plan.key)
        descriptor = plan.field.message_type
    return tuple(found)
