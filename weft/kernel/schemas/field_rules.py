"""Checks messages against the `rules` options of their proto; see common/v1/document.proto.

The plan of a message type is compiled at its first check, so that checks read no descriptors.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import AddressValueError, IPv4Address
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, OneofDescriptor
from google.protobuf.message import Message

from weft.api.common.v1 import document_pb2 as pb
from weft.kernel.errors.error_tree import MAX_REFUSALS, invalid_field
from weft.kernel.values.names import MAX_NAME_CHARS, MODEL_NAME_WORDS, is_model_name, is_name, is_token

DURATION, TIMESTAMP = "google.protobuf.Duration", "google.protobuf.Timestamp"
_NANOSECONDS = 1e9
_MIN_TIMESTAMP, _MAX_TIMESTAMP = -62_135_596_800, 253_402_300_799
"""Seconds of the years 1 and 9999."""


class MapKey(str):
    """A map key as a step of a path."""

    __slots__ = ()


class RuleError(Exception):
    """A value that breaks a rule: the problem in words, and the path to it, innermost step first.

    `others` are further invalid values; those beyond MAX_REFUSALS are counted in `omitted`.
    """

    def __init__(self, problem: str, *steps: str | int) -> None:
        super().__init__(problem)
        self.problem = problem
        self.steps: list[str | int] = list(steps)
        self.others: tuple[RuleError, ...] = ()
        self.omitted = 0

    @property
    def all(self) -> tuple["RuleError", ...]:
        """This error and the others, in the order found."""
        return self, *self.others

    def within(self, step: str | int) -> "RuleError":
        """Returns the error with an outer step added to the path of every invalid value."""
        for each in self.all:
            each.steps.append(step)
        return self

    @property
    def path(self) -> tuple[str | int, ...]:
        """The steps from the message to the value: field names, list indexes, map keys."""
        return tuple(reversed(self.steps))


class RuleErrors:
    """Errors collected while the parts of a value are read or checked."""

    def __init__(self) -> None:
        self._found: list[RuleError] = []
        self._omitted = 0

    def __iter__(self) -> Iterator[RuleError]:
        return iter(self._found)

    def add(self, error: RuleError) -> None:
        """Adds an error with its others; errors beyond MAX_REFUSALS are only counted."""
        room = MAX_REFUSALS - len(self._found)
        self._found += error.all[:room]
        self._omitted += error.omitted + len(error.all[room:])

    def raise_any(self) -> None:
        """Raises all collected errors as one; does nothing if there are none."""
        if self._found:
            first, *others = self._found
            first.others, first.omitted = tuple(others), self._omitted
            raise first


Check = Callable[[Any], None]
"""Raises RuleError if a value or message breaks a rule."""


def check_message(message: Message, field: str = "") -> None:
    """Raises INVALID_ARGUMENT for the first invalid value, naming its path below `field`."""
    try:
        check_rules(message)
    except RuleError as error:
        raise invalid_field(path_text(error.path, field), error.problem) from None


def path_text(path: Iterable[str | int], field: str = "") -> str:
    """Returns a path below `field` as text, such as "models[2].headers[X-A]"."""
    text = field
    for step in path:
        text += f"[{step}]" if isinstance(step, int | MapKey) else f".{step}"
    return text.removeprefix(".")


def check_rules(message: Message) -> None:
    """Raises RuleError with all values that break a rule."""
    plan = _plan(message.DESCRIPTOR)
    errors: RuleErrors | None = None
    for check in plan.required:
        try:
            check(message)
        except RuleError as error:
            errors = errors or RuleErrors()
            errors.add(error)
    for field, value in message.ListFields():
        value_check = plan.values.get(field)
        if value_check is not None:
            try:
                value_check(value)
            except RuleError as error:
                errors = errors or RuleErrors()
                errors.add(error)
    if errors is not None:
        errors.raise_any()


def rules_of(field: FieldDescriptor) -> pb.FieldRules:
    """Returns the rules of a field; empty if it has none."""
    return field.GetOptions().Extensions[pb.rules]


def required_oneofs(descriptor: Descriptor) -> list[OneofDescriptor]:
    """Returns the oneofs of a message of which one field must be set."""
    return [one for one in descriptor.oneofs if one.GetOptions().Extensions[pb.document_oneof].required]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The checks of a message type."""

    required: tuple[Check, ...]
    """Checks of a message for fields that must be set."""
    values: Mapping[FieldDescriptor, Check]
    """Checks of values that are set. The key is the descriptor, because each read of its name builds a new string."""


@cache
def _plan(descriptor: Descriptor) -> _Plan:
    required = [_oneof_check(one) for one in required_oneofs(descriptor)]
    values = {}
    for field in descriptor.fields:
        rules = rules_of(field)
        if rules.required or rules.min_items:
            required.append(_required_check(field, rules))
        checks = list(_list_checks(field, rules)) if field.is_repeated else [_value_check(field, rules)]
        wanted = [check for check in checks if check is not None]
        if wanted:
            values[field] = _named(field.name, wanted)
    return _Plan(tuple(required), values)


def _oneof_check(oneof: OneofDescriptor) -> Check:
    *others, last = [field.name for field in oneof.fields]
    problem = f"needs exactly one of {', '.join(others)} and {last}"
    # In documents, a oneof with a type word is the whole message.
    steps = () if oneof.GetOptions().Extensions[pb.document_oneof].type else (oneof.name,)

    def check(message: Any) -> None:
        if message.WhichOneof(oneof.name) is None:
            raise RuleError(problem, *steps)

    return check


def _required_check(field: FieldDescriptor, rules: pb.FieldRules) -> Check:
    if rules.problem:
        problem = rules.problem
    elif field.is_repeated:
        problem = f"must have at least {rules.min_items or 1}, has 0"
    elif rules.format not in _MAY_BE_EMPTY:
        problem = _FORMATS[rules.format][1](rules)
    else:
        problem = "must be set" if field.message_type or field.enum_type else "must not be empty"
    name, has_presence = field.name, field.has_presence

    def check(message: Any) -> None:
        if not (message.HasField(name) if has_presence else getattr(message, name)):
            raise RuleError(problem, name)

    return check


def _named(name: str, checks: list[Check]) -> Check:
    def check(value: Any) -> None:
        try:
            for each in checks:
                each(value)
        except RuleError as error:
            error.within(name)
            raise

    return check


def _list_checks(field: FieldDescriptor, rules: pb.FieldRules) -> Iterable[Check | None]:
    entry = field.message_type
    if rules.min_items or rules.max_items:
        yield _count_check(rules)
    if entry is not None and entry.GetOptions().map_entry:
        value_check = _value_check(entry.fields_by_name["value"], rules)
        yield _map_check(value_check, _value_check(entry.fields_by_name["key"], rules.keys), rules.problem)
    else:
        yield _items_check(_value_check(field, rules), rules.problem)
    if rules.unique or rules.unique_by:
        yield _unique_check(rules.unique_by)


def _count_check(rules: pb.FieldRules) -> Check:
    least, most = rules.min_items, rules.max_items or math.inf

    def check(items: Any) -> None:
        if len(items) < least:
            raise RuleError(rules.problem or f"must have at least {least}, has {len(items)}")
        if len(items) > most:
            raise RuleError(f"must have at most {most}, has {len(items)}")

    return check


def _items_check(value_check: Check | None, problem: str) -> Check | None:
    if value_check is None:
        return None

    def check(items: Any) -> None:
        errors = RuleErrors()
        for index, value in enumerate(items):
            try:
                value_check(value)
            except RuleError as error:
                if problem:
                    raise RuleError(problem) from None
                errors.add(error.within(index))
        errors.raise_any()

    return check


def _map_check(value_check: Check | None, key_check: Check | None, problem: str) -> Check | None:
    if value_check is None and key_check is None:
        return None

    def check(items: Any) -> None:
        errors = RuleErrors()
        for key, value in items.items():
            if key_check is not None:
                # The error does not quote the key, which may have any length.
                key_check(key)
            try:
                if value_check is not None:
                    value_check(value)
            except RuleError as error:
                if problem:
                    raise RuleError(problem) from None
                errors.add(error.within(MapKey(key)))
        errors.raise_any()

    return check


def _unique_check(member: str) -> Check:
    def check(items: Any) -> None:
        seen: set[Any] = set()
        for index, item in enumerate(items):
            value = getattr(item, member) if member else item
            if value in seen:
                raise RuleError("must not appear twice", *([member] if member else []), index)
            seen.add(value)

    return check


def _value_check(field: FieldDescriptor, rules: pb.FieldRules) -> Check | None:
    kind = field.message_type
    if kind is not None and kind.full_name == DURATION:
        number = _number_check(rules)
        return None if number is None else lambda length: number(length.seconds + length.nanos / _NANOSECONDS)
    if kind is not None and kind.full_name == TIMESTAMP:
        return _check_moment
    if kind is not None:
        return check_rules if _has_rules(kind, frozenset()) else None
    if field.enum_type is not None:
        return _enum_check(field.enum_type, rules) if rules.defined_only else None
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _text_check(rules)
    return _number_check(rules)


def _has_rules(descriptor: Descriptor, around: frozenset[str]) -> bool:
    if descriptor.full_name in around:
        return False
    around |= {descriptor.full_name}
    if required_oneofs(descriptor):
        return True
    for field in descriptor.fields:
        if rules_of(field).ByteSize():
            return True
        kind = field.message_type
        if kind is not None and (kind.full_name == TIMESTAMP or _has_rules(kind, around)):
            return True
    return False


def _check_moment(moment: Any) -> None:
    if not _MIN_TIMESTAMP <= moment.seconds <= _MAX_TIMESTAMP or not 0 <= moment.nanos < _NANOSECONDS:
        raise RuleError("must be a time between the years 1 and 9999")


def _enum_check(enum: EnumDescriptor, rules: pb.FieldRules) -> Check:
    known = frozenset(value.number for value in enum.values if value.number)
    words = enum_words(enum)
    problem = rules.problem or "must be " + listed([words[number] for number in sorted(known)])

    def check(number: int) -> None:
        if number not in known:
            raise RuleError(problem)

    return check


@cache
def enum_words(enum: EnumDescriptor) -> Mapping[int, str]:
    """Returns the document words of an enum's values, by number; the unspecified value only if it declares a word."""
    dashes = enum.GetOptions().Extensions[pb.document_enum].dashes
    zero = enum.values_by_number[0].name
    prefix = zero.removesuffix("UNSPECIFIED")
    found = {}
    for value in enum.values:
        word = value.GetOptions().Extensions[pb.word]
        if word or value.number:
            own = word or value.name.removeprefix(prefix).lower()
            found[value.number] = own.replace("_", "-") if dashes else own
    return MappingProxyType(found)


def listed(words: Iterable[str]) -> str:
    """Returns words as a choice: "off, warn or kill"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _number_check(rules: pb.FieldRules) -> Check | None:
    if not rules.HasField("minimum") and not rules.HasField("maximum"):
        return None
    least = rules.minimum if rules.HasField("minimum") else -math.inf
    most = rules.maximum if rules.HasField("maximum") else math.inf
    above, problem = rules.above_minimum, rules.problem or range_words(rules)

    def check(number: float) -> None:
        # NaN fails the comparison; infinity is never allowed.
        if not least <= number <= most or (above and number == least) or math.isinf(number):
            raise RuleError(problem)

    return check


def range_words(rules: pb.FieldRules) -> str:
    """Returns the range in words, such as "must be 0 to 2"."""
    if not rules.HasField("maximum"):
        bound = f"more than {rules.minimum:.15g}" if rules.above_minimum else f"at least {rules.minimum:.15g}"
        return "must not be negative" if not rules.minimum and not rules.above_minimum else f"must be {bound}"
    if not rules.HasField("minimum"):
        return f"must be at most {rules.maximum:.15g}"
    if rules.above_minimum:
        return f"must be more than {rules.minimum:.15g} and at most {rules.maximum:.15g}"
    return f"must be {rules.minimum:.15g} to {rules.maximum:.15g}"


def _text_check(rules: pb.FieldRules) -> Check | None:
    if rules.words:
        words, problem = frozenset(rules.words), rules.problem or f"must be {listed(rules.words)}"
        return _text_refusal(lambda text: text in words, problem)
    fits, words_of = _FORMATS[rules.format]
    least, most = rules.min_chars, rules.max_chars or math.inf
    if fits is None and not least and not rules.max_chars:
        return None
    problem = rules.problem or words_of(rules)

    def allowed(text: str) -> bool:
        return least <= len(text) <= most and (fits is None or fits(text))

    return _text_refusal(allowed, problem)


def _text_refusal(allowed: Callable[[str], bool], problem: str) -> Check:
    def check(text: str) -> None:
        if not allowed(text):
            raise RuleError(problem)

    return check


# Characters that can control a terminal, and NUL, which PostgreSQL cannot store. Newlines and tabs are text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_MAC_ADDRESS = re.compile(r"[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}")
_SIGNAL_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def _is_web_url(url: str) -> bool:
    if not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises ValueError when it is none
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname)


def _is_ipv4(text: str) -> bool:
    try:
        IPv4Address(text)
    except AddressValueError:
        return False
    return True


def _chars(rules: pb.FieldRules) -> str:
    if rules.min_chars:
        return f"must be {rules.min_chars} to {rules.max_chars} characters"
    return f"must be at most {rules.max_chars} characters"


_MAY_BE_EMPTY = frozenset({pb.FORMAT_UNSPECIFIED, pb.FORMAT_LINE, pb.FORMAT_LINES, pb.FORMAT_ARGUMENT})
_FORMATS: Mapping[int, tuple[Callable[[str], bool] | None, Callable[[pb.FieldRules], str]]] = MappingProxyType(
    {
        pb.FORMAT_UNSPECIFIED: (None, _chars),
        pb.FORMAT_NAME: (
            is_name,
            lambda _: (
                f"must be 1 to {MAX_NAME_CHARS} letters, digits, '.', '_', ':' or '-', starting with a letter or digit"
            ),
        ),
        pb.FORMAT_MODEL_NAME: (is_model_name, lambda _: f"must be {MODEL_NAME_WORDS}"),
        pb.FORMAT_TOKEN: (
            lambda text: is_token(text, len(text)),
            lambda rules: (
                f"must be 1 to {rules.max_chars} letters, digits or '._:@/+=-', starting with a letter or digit"
            ),
        ),
        pb.FORMAT_LINE: (str.isprintable, lambda rules: f"{_chars(rules)}, without line breaks and control characters"),
        pb.FORMAT_LINES: (
            lambda text: _CONTROL.search(text) is None,
            lambda rules: f"{_chars(rules)}, without control characters other than newline and tab",
        ),
        pb.FORMAT_WEB_URL: (
            _is_web_url,
            lambda rules: f"must be an http or https URL of at most {rules.max_chars} characters",
        ),
        pb.FORMAT_HEADER_NAME: (
            lambda text: _HEADER_NAME.fullmatch(text) is not None,
            lambda rules: f"names must be tokens of 1 to {rules.max_chars} characters",
        ),
        pb.FORMAT_ARGUMENT: (lambda text: "\0" not in text, lambda rules: f"{_chars(rules)}, none of them NUL"),
        pb.FORMAT_MAC_ADDRESS: (
            lambda text: _MAC_ADDRESS.fullmatch(text) is not None,
            lambda _: "must be six pairs of hex digits joined by ':' or '-'",
        ),
        pb.FORMAT_IPV4_ADDRESS: (_is_ipv4, lambda _: "must be an IPv4 address"),
        pb.FORMAT_SIGNAL_NAME: (
            lambda text: _SIGNAL_NAME.fullmatch(text) is not None,
            lambda _: "must be 1 to 64 capital letters, digits or '_', starting with a letter",
        ),
        pb.FORMAT_DIGEST: (
            lambda text: _DIGEST.fullmatch(text) is not None,
            lambda _: "must be 'sha256:' and 64 lower-case hex digits, or empty",
        ),
    }
)
