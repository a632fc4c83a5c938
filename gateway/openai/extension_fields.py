"""Unknown fields of a request, passed to the engine or warned about."""

import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

from gateway.answers.answer_builder import MAX_NOTICES
from gateway.intake.request_model import EXTENSION_PREFIX, NOT_USED, HandledRequest, StrictModel
from weft.api.common.v1 import json_value_pb2, warning_pb2
from weft.dispatch.parameter_checks import MAX_EXTRA_BYTES, MAX_EXTRA_FIELDS, MAX_EXTRA_NAME_CHARS, take_bytes
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.text.json_objects import add_member

# Alias of a field that the request has under its usual name.
_SPELLINGS = frozenset({"repetition_penalty"})
LANGUAGES = ("source_lang_code", "target_lang_code")
"""Fields for translation models, which all chat APIs pass to the engine."""
_MAX_SHOWN_CHARS = 64


def fill_extra(target: json_value_pb2.JsonObject, given: Mapping[str, object]) -> None:
    """Adds the fields to pass on; null counts as absent. Raises INVALID_ARGUMENT naming a field above the limit."""
    left = MAX_EXTRA_BYTES
    for name, value in given.items():
        if value is None or name in NOT_USED or name in _SPELLINGS or name.startswith(EXTENSION_PREFIX):
            continue
        field = name[:_MAX_SHOWN_CHARS] or "body"
        if not 0 < len(name) <= MAX_EXTRA_NAME_CHARS:
            raise invalid_field(field, f"names of fields have 1 to {MAX_EXTRA_NAME_CHARS} characters")
        if len(target.fields) == MAX_EXTRA_FIELDS:
            raise invalid_field(field, f"is one too many: at most {MAX_EXTRA_FIELDS} unknown fields")
        left = take_bytes(left, name, value, field)
        add_member(target, name, value, field)


def unknown_fields(request: StrictModel) -> list[warning_pb2.Warning]:
    """Returns at most MAX_NOTICES warnings: one for each unknown field at any depth that is not used.

    Entries of a list share one warning, which names the first.
    """
    places: dict[str, str] = {}
    for place in _unused_in(request):
        places.setdefault(_ENTRY.sub("[]", place), place.removeprefix("."))
    found = [unsupported(place, "is unknown; it was not used") for place in islice(places.values(), MAX_NOTICES - 1)]
    if isinstance(request, HandledRequest) and request.cache_seconds is None:
        found.append(unsupported("prompt_cache_options.ttl", "is not a duration of at most a day; it was ignored"))
    return found


_ENTRY = re.compile(r"\[\d+\]")
_PLAIN = frozenset({str, int, float, bool, dict, type(None)})
"""Classes of values without fields of a schema. `isinstance` with a pydantic class takes longer than all the rest."""


def _unused_in(value: Any) -> list[str]:
    """Returns the places of unused fields in a model or list, such as `.messages[0].name`.

    Takes a seventh of the time of the validation.
    """
    found: list[str] = []
    if value.__class__ is list:
        # Lists of token ids are long, and have no fields.
        for index, entry in enumerate(value if value and value[0].__class__ is not int else ()):
            if entry.__class__ not in _PLAIN and (places := _unused_in(entry)):
                found += [f"[{index}]{place}" for place in places]
        return found
    for name, given in (value.__pydantic_extra__ or {}).items():
        if given is not None and not value.uses(name):
            found.append("." + (name[:_MAX_SHOWN_CHARS] or '""'))
    for name, part in value.__dict__.items():
        if part.__class__ not in _PLAIN and (places := _unused_in(part)):
            # `schema_` is `schema`
            found += [f".{name.removesuffix('_')}{place}" for place in places]
    return found


def unsupported(field: str, message: str) -> warning_pb2.Warning:
    """Returns the warning for an unsupported part of a request."""
    return warning_pb2.Warning(code=warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER, field=field, message=message)
