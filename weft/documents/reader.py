"""Reads documents (JSON types) into messages by the options of their protos; inverse of `weft.documents.codec`.

Field names are accepted in lowerCamelCase and snake_case. Types are checked first, then field rules.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, OneofDescriptor
from google.protobuf.message import Message

from weft.api.common.v1 import document_pb2 as pb
from weft.documents.codec import (
    camel,
    document_path,
    is_map,
    is_of,
    is_text,
    is_typed,
    oneof_words,
    plan_of,
    value_oneof_of,
)
from weft.documents.computed import CHECKS, READ_AS
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.schemas.field_rules import DURATION, MapKey, RuleError, RuleErrors, check_rules, enum_words
from weft.kernel.values.names import ascii_name
from weft.kernel.values.units import keep_alive_seconds

MessageT = TypeVar("MessageT", bound=Message)
Decode = Callable[[Any], Any]
_NANOSECONDS = 1e9
_MAX_INT32, _MAX_INT64 = 2**31 - 1, 2**63 - 1
MAX_KEY_DIGITS = 11


def read_message(value: Any, kind: type[MessageT]) -> MessageT:
    """Returns the message that a document declares. Raises RuleError with the paths of all wrong values."""
    message = kind()
    descriptor: Any = message.DESCRIPTOR
    errors = RuleErrors()
    try:
        _read(value, message)
    except RuleError as error:
        if error.omitted:
            raise
        errors.add(error)
    unread = [each.path for each in errors]
    try:
        check_rules(message)
    except RuleError as error:
        for each in error.all:
            path = document_path(descriptor, each.path)
            # A value that could not be read is missing in the message; that is not a separate error.
            if not any(_overlap(path, other) for other in unread):
                errors.add(RuleError(each.problem, *reversed(path)))
    errors.raise_any()
    return message


def _overlap(one: tuple[str | int, ...], other: tuple[str | int, ...]) -> bool:
    """Whether one path is a prefix of the other."""
    return all(
        step == second or (isinstance(step, str) and isinstance(second, str) and camel(step) == camel(second))
        for step, second in zip(one, other, strict=False)
    )


def _read(value: Any, message: Any) -> None:
    if not isinstance(value, dict):
        raise RuleError("must be a mapping of names to values")
    plan = _reading_plan(message.DESCRIPTOR)
    value = value if plan.prepare is None else plan.prepare(value)
    if plan.typed is not None:
        _read_typed(plan.typed, value, message)
        return
    given = _read_fields(plan, value, message)
    for names in plan.alternatives:
        if len(names & given.keys()) > 1:
            *others, last = sorted(names)
            raise RuleError(f"needs exactly one of {', '.join(others)} and {last}")
    for parent in plan.parents:
        if message.HasField(parent) and not getattr(message, parent).ListFields():
            message.ClearField(parent)
    problem = plan.check(message) if plan.check is not None else ""
    if problem:
        raise RuleError(problem)


def _read_fields(plan: "_ReadingPlan", value: Mapping[Any, Any], message: Any) -> dict[str, str]:
    """Reads the given fields and fills in the others; returns how each given field is spelled."""
    errors = RuleErrors()
    given = _read_given(plan, value, message, errors)
    for reader in plan.filled:
        if reader.key not in given:
            try:
                reader.fill(message)
            except RuleError as error:
                errors.add(error)
    errors.raise_any()
    return given


def _read_given(plan: "_ReadingPlan", value: Mapping[Any, Any], message: Any, errors: RuleErrors) -> dict[str, str]:
    """Reads the given fields and adds what is wrong to `errors`; returns how each is spelled."""
    given: dict[str, str] = {}
    for key, part in value.items():
        reader = plan.readers.get(key) if isinstance(key, str) else None
        if reader is None:
            errors.add(RuleError("there is no such field", key if isinstance(key, str | int) else str(key)))
            continue
        if reader.key in given:
            errors.add(RuleError(f"is set twice, also as {given[reader.key]}", key))
            continue
        given[reader.key] = key
        try:
            reader.read(part, message)
        except RuleError as error:
            errors.add(error.within(key))
    return given


def _read_typed(oneof: OneofDescriptor, value: Mapping[Any, Any], message: Any) -> None:
    key, words = oneof.GetOptions().Extensions[pb.document_oneof].type, oneof_words(oneof)
    name = next((name for name, word in words.items() if word == value.get(key)), None)
    if name is None:
        raise RuleError(f"{key} must be one of {', '.join(words.values())}")
    part = getattr(message, name)
    part.SetInParent()
    _read({own: each for own, each in value.items() if own != key}, part)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one field of a document into a message."""

    key: str
    name: str
    parents: tuple[str, ...]
    """The inline messages that contain the field."""
    decode: Callable[[Any, Any, str], None]
    """Sets a message field from a value. Raises RuleError."""
    is_required: bool
    is_nullable: bool
    default: Any
    """Value if the document omits the field; None: there is none."""
    is_optional: bool
    """Whether readers of the message apply the default too, so that it can stay unset."""

    def read(self, value: Any, message: Any) -> None:
        if value is None and self.is_nullable:
            return
        for parent in self.parents:
            message = getattr(message, parent)
        if not self.is_optional or value != self.default:
            self.decode(value, message, self.name)

    def fill(self, message: Any) -> None:
        """Sets the value of an omitted field. Raises RuleError if the field is required."""
        if self.is_required:
            raise RuleError("is missing", self.key)
        self.read(self.default, message)


@dataclass(frozen=True, slots=True)
class _ReadingPlan:
    """How to read documents of a message type."""

    readers: Mapping[str, _Reader]
    """Field readers by both spellings, including those of inline messages."""
    filled: tuple[_Reader, ...]
    """Readers of fields that are required or have a default."""
    alternatives: tuple[frozenset[str], ...]
    """Groups of field names of which a document may give at most one."""
    parents: tuple[str, ...]
    """The inline messages, by field name."""
    typed: OneofDescriptor | None
    """The oneof whose type word selects the message."""
    check: Callable[[Any], str] | None
    prepare: Callable[[Mapping[Any, Any]], Mapping[Any, Any]] | None
    """Converts a document before it is read."""


@cache
def _reading_plan(descriptor: Descriptor) -> _ReadingPlan:
    readers = dict(_readers(descriptor, ()))
    own = {reader.key: reader for reader in readers.values()}.values()
    oneofs = [frozenset(camel(field.name) for field in oneof.fields) for oneof in descriptor.oneofs]
    return _ReadingPlan(
        readers=readers,
        filled=tuple(each for each in own if each.is_required or (each.default is not None and not each.is_optional)),
        alternatives=tuple(names for names in oneofs if len(names) > 1),
        parents=tuple(plan.field.name for plan in plan_of(descriptor).fields if plan.inline),
        typed=next((oneof for oneof in descriptor.oneofs if is_typed(oneof)), None),
        check=CHECKS.get(descriptor.full_name),
        prepare=READ_AS.get(descriptor.full_name),
    )


def _readers(descriptor: Descriptor, parents: tuple[str, ...]) -> Iterator[tuple[str, _Reader]]:
    for plan in plan_of(descriptor).fields:
        field = plan.field
        if plan.inline:
            assert field.message_type is not None
            yield from _readers(field.message_type, (*parents, field.name))
            continue
        reader = _Reader(
            key=plan.key,
            name=field.name,
            parents=parents,
            decode=_decoder(field),
            is_required=plan.presence == pb.PRESENCE_REQUIRED,
            is_nullable=plan.nullable,
            default=plan.default,
            is_optional=plan.default is not None and field.has_presence and field.message_type is None,
        )
        yield plan.key, reader
        yield plan.other_key, reader


def _decoder(field: FieldDescriptor) -> Callable[[Any, Any, str], None]:
    """Returns the function that sets a message field from JSON types."""
    if is_map(field):
        return _map_decoder(field)
    if field.is_repeated:
        return _list_decoder(field)
    if field.message_type is not None and not is_of(field, DURATION):

        def decode_message(value: Any, message: Any, name: str) -> None:
            part = getattr(message, name)
            _read(value, part)
            part.SetInParent()

        return decode_message
    decode = _value_decoder(field)

    def decode_duration(value: Any, message: Any, name: str) -> None:
        getattr(message, name).FromNanoseconds(decode(value))

    def decode_value(value: Any, message: Any, name: str) -> None:
        setattr(message, name, decode(value))

    return decode_duration if is_of(field, DURATION) else decode_value


def _list_decoder(field: FieldDescriptor) -> Callable[[Any, Any, str], None]:
    decode = _value_decoder(field)
    holds_messages = field.message_type is not None

    def decode_list(value: Any, message: Any, name: str) -> None:
        if not isinstance(value, list):
            raise RuleError("must be a list")
        items = getattr(message, name)
        errors = RuleErrors()
        for index, item in enumerate(value):
            try:
                if holds_messages:
                    _read(item, items.add())
                else:
                    items.append(decode(item))
            except RuleError as error:
                errors.add(error.within(index))
        errors.raise_any()

    return decode_list


def _map_decoder(field: FieldDescriptor) -> Callable[[Any, Any, str], None]:
    assert field.message_type is not None
    key_field, value_field = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
    oneof = value_oneof_of(value_field.message_type)
    takes_text = is_text(key_field)

    def set_value(values: Any, key: Any, item: Any) -> None:
        values[key] = decode(item)

    def set_one_of(values: Any, key: Any, item: Any) -> None:
        setattr(values[key], choose(item), item)

    if oneof is None:
        decode, put = _value_decoder(value_field), set_value
    else:
        choose, put = _chooser(oneof), set_one_of

    def decode_map(value: Any, message: Any, name: str) -> None:
        if not isinstance(value, dict):
            raise RuleError("must be a mapping of names to values")
        errors = RuleErrors()
        for key, item in value.items():
            try:
                put(getattr(message, name), _text(key) if takes_text else _number_key(key), item)
            except RuleError as error:
                errors.add(error.within(MapKey(key)))
        errors.raise_any()

    return decode_map


def _chooser(oneof: OneofDescriptor) -> Callable[[Any], str]:
    """Returns the function that selects the oneof field for a value of JSON types."""
    fields = {field.cpp_type: field.name for field in oneof.fields}
    types = {kind: fields[cpp_type] for kind, cpp_type in _VALUE_TYPES.items() if cpp_type in fields}

    def choose(value: Any) -> str:
        found = types.get(type(value))
        if found is None:
            raise RuleError("must be a number, a text, or true or false")
        # Checks the value's range and characters.
        check: Decode = _SCALARS.get(_VALUE_TYPES[type(value)], _number)
        check(value)
        return found

    return choose


def _number_key(key: Any) -> int:
    """Returns a key of a map with number keys: JSON object keys are always strings."""
    is_number = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < MAX_KEY_DIGITS
    return _whole(int(key) if is_number else key, _MAX_INT32)


def _value_decoder(field: FieldDescriptor) -> Decode:
    """Returns the function that converts JSON types to a field's value. It raises RuleError."""
    options = field.GetOptions().Extensions[pb.document]
    if field.GetOptions().Extensions[pb.rules].format == pb.FORMAT_MODEL_NAME:
        return lambda value: ascii_name(_text(value))
    if field.enum_type is not None:
        return _enum_decoder(field.enum_type)
    if is_of(field, DURATION):
        return _keep_alive if options.keep_alive else lambda value: _nanoseconds(_number(value))
    if options.unit:
        return lambda value: _whole(value, _MAX_INT64 // options.unit) * options.unit
    return _SCALARS.get(field.cpp_type, _number)


def _enum_decoder(enum: EnumDescriptor) -> Decode:
    numbers = {word: number for number, word in enum_words(enum).items()}
    problem = f"must be one of {', '.join(numbers)}"

    def decode(value: Any) -> int:
        # YAML reads an unquoted `off` as false.
        word = "off" if value is False else value
        if not isinstance(word, str) or word not in numbers:
            raise RuleError(problem)
        return numbers[word]

    return decode


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise RuleError("must be a text")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise RuleError("must be a text of Unicode characters, without lone surrogates")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise RuleError("must be true or false")
    return value


def _whole(value: Any, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RuleError("must be a whole number")
    if not -most - 1 <= value <= most:
        raise RuleError(f"must be at most {most}" if value > 0 else f"must be at least {-most - 1}")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RuleError("must be a number")
    if isinstance(value, int) and abs(value) > _MAX_INT64:
        raise RuleError("is too large a number")
    if not math.isfinite(value):
        raise RuleError("must be a finite number")
    return float(value)


def _keep_alive(value: Any) -> int:
    try:
        return _nanoseconds(keep_alive_seconds(value, ""))
    except FieldError as error:
        raise RuleError(error.message.removeprefix(": ")) from None


MAX_SECONDS = 1e11
"""More than any duration field allows, and within the range of the message."""


def _nanoseconds(seconds: float) -> int:
    nanoseconds = max(-MAX_SECONDS, min(MAX_SECONDS, seconds)) * _NANOSECONDS
    # Rounding reads 8.3 back as 8.3, but a positive duration under a nanosecond must not become 0.
    return round(nanoseconds) or math.ceil(nanoseconds)


_SCALARS: Mapping[int, Decode] = MappingProxyType(
    {
        FieldDescriptor.CPPTYPE_STRING: _text,
        FieldDescriptor.CPPTYPE_BOOL: _flag,
        FieldDescriptor.CPPTYPE_INT32: lambda value: _whole(value, _MAX_INT32),
        FieldDescriptor.CPPTYPE_INT64: lambda value: _whole(value, _MAX_INT64),
    }
)
_VALUE_TYPES: Mapping[type, int] = MappingProxyType(
    {
        bool: FieldDescriptor.CPPTYPE_BOOL,
        int: FieldDescriptor.CPPTYPE_INT64,
        float: FieldDescriptor.CPPTYPE_DOUBLE,
        str: FieldDescriptor.CPPTYPE_STRING,
    }
)
"""Oneof fields by the Python type of their value."""
