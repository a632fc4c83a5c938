"""Templates of texts about records: how a column of a table or a line of a page says what is in a message.

"{usage.prompt_tokens} in[ ({usage.cached_prompt_tokens} cached)]" names fields by their paths. A part in brackets is
there where all of its fields have values; "|" separates alternatives, of which the first such one is taken. Enums and
lists become words, durations seconds, and times are UTC; besides Python's formats there are those of FORMATS.
"""

import re
from datetime import UTC, datetime
from functools import cache, reduce
from string import Formatter
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from typing_extensions import override

from weft.documents.codec import word_of
from weft.kernel.field_rules import enum_words
from weft_app.cli.formats import FORMATS

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
