"""Templates of texts about records: how a column of a table or a line of a page says what is in a message.

"{usage.prompt_tokens} in[ ({usage.cached_prompt_tokens} cached)]" names fields by their paths. A part in brackets is
there where all of its fields have values; "|" separates alternatives, of which the first such one is taken. Enums and
lists become words, durations seconds, and times are UTC; besides Python's formats there are those of FORMATS.
"""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache, reduce
from string import Formatter
from types import MappingProxyType
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from typing_extensions import override

from weft.documents.codec import word_of
from weft.kernel.field_rules import enum_words
from weft.kernel.principal import actor_words
from weft.kernel.units import size_words, wait_words

MAX_SHORT_CHARS = 60
LEAST_SHOWN_SECONDS = 0.001
_OPTIONAL = re.compile(r"\[([^\]]*)\]")


def filled(template: str, record: Any) -> str:
    """Returns the text of a record by a template."""
    form = _RecordFormatter(record)
    chosen = (next(filter(form.has_all, parts), "") if len(parts) != 1 else parts[0] for parts in _parts(template))
    return "".join(map(form.format, chosen))


@cache
def _parts(template: str) -> tuple[tuple[str, ...], ...]:
    """Returns the parts of a template in order, each with its alternatives; an optional one ends with none."""
    found = enumerate(_OPTIONAL.split(template))
    # Every second part is one in brackets.
    return tuple((*part.split("|"), "") if place % 2 else (part,) for place, part in found)


class _RecordFormatter(Formatter):
    """Formats templates with the fields of a record."""

    def __init__(self, record: Any) -> None:
        self._record = record

    def has_all(self, template: str) -> bool:
        """Whether every field of the template has a value."""
        return all(self._is_set(path) for _, path, _, _ in self.parse(template) if path)

    def _is_set(self, path: str) -> bool:
        owner, name, field = self._find(path)
        return owner.HasField(name) if field is not None and field.has_presence else bool(getattr(owner, name, None))

    def _find(self, path: str) -> tuple[Any, str, Any]:
        """Returns the owner of a field, its name, and its descriptor where the owner is a message."""
        *parents, name = path.split(".")
        owner = reduce(lambda found, parent: getattr(found, parent, None), parents, self._record)
        return owner, name, owner.DESCRIPTOR.fields_by_name.get(name) if isinstance(owner, Message) else None

    @override
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        owner, name, field = self._find(field_name)
        value = getattr(owner, name)
        if field is not None and field.enum_type is not None:
            words = enum_words(field.enum_type)
            value = [words[each] for each in value if each in words] if field.is_repeated else word_of(owner, name)
        elif isinstance(value, Duration):
            value = value.ToNanoseconds() / 1e9
        elif isinstance(value, Timestamp):
            value = value.ToDatetime(tzinfo=UTC)
        return (value if isinstance(value, str | int | float | datetime) else list(value)), name

    @override
    def format_field(self, value: Any, format_spec: str) -> str:
        form = FORMATS.get(format_spec)
        if form is None and isinstance(value, list):
            return ", ".join(map(str, value))
        return str(format(value, format_spec)) if form is None else form(value)


def seconds_ago(seconds: float) -> str:
    """Returns an age as text: 5s, 3m, 2h, 4d."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def keep_alive_text(seconds: float | None) -> str:
    """Returns how long a model stays loaded after a request, such as "300s"; "-": not configured."""
    if seconds is None:
        return "-"
    return "never" if seconds < 0 else f"{seconds:g}s"


def age(moment: datetime | None) -> str:
    """Returns how long ago, such as "3h"."""
    return "-" if moment is None else seconds_ago((datetime.now(UTC) - moment).total_seconds())


def ago(moment: datetime | None) -> str:
    """Returns an age as text, such as "3h ago"."""
    return "-" if moment is None else f"{age(moment)} ago"


def shortened(text: str) -> str:
    """Returns a text cut to a number of characters."""
    return text if len(text) <= MAX_SHORT_CHARS else f"{text[: MAX_SHORT_CHARS - 1]}…"


def span(seconds: float) -> str:
    """Returns a measured time with three digits, such as "0.313 s"; below a millisecond only that it is."""
    return f"{seconds:.3g} s" if seconds >= LEAST_SHOWN_SECONDS or seconds == 0 else "under 0.001 s"


FORMATS: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {
        "actor": actor_words,
        "age": age,
        "ago": ago,
        "commas": ",".join,
        "keep": keep_alive_text,
        "local": lambda time: f"{time.astimezone():%Y-%m-%d %H:%M:%S}",
        "short": lambda found: shortened(found if isinstance(found, str) else ",".join(found)),
        "size": size_words,
        "span": span,
        "spaced": lambda word: str(word).replace("_", " "),
        "yes": lambda flag: "yes" if flag else "no",
        "wait": wait_words,
    }
)
"""Formats of templates besides those of Python."""
