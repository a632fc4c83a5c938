"""Unknown fields of a request, passed to the engine or warned about."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.answers.answer_builder import MAX_NOTICES
from gateway.intake.request_model import EXTENSION_PREFIX, NOT_USED, HandledRequest, StrictModel
from weft.api.common.v1 import json_value_pb2, warning_pb2
from weft.dispatch.parameter_checks import MAX_EXTRA_BYTES, MAX_EXTRA_FIELDS, MAX_EXTRA_NAME_CHARS, take_bytes
from weft.kernel.errors import invalid_field
from weft.kernel.json_objects import add_member

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
    if _has_unused(request):
        for place in _unused_in(request, ""):
            places.setdefault(_ENTRY.sub("[]", place), place)
            if len(places) == MAX_NOTICES - 1:
                break
    found = [unsupported(place, "is unknown; it was not used") for place in places.values()]
    if isinstance(request, HandledRequest) and request.cache_seconds is None:
        found.append(unsupported("prompt_cache_options.ttl", "is not a duration of at most a day; it was ignored"))
    return found


_ENTRY = re.compile(r"\[\d+\]")
_PLAIN = frozenset({str, int, float, bool, dict, type(None)})
"""Classes of values without fields of a schema. `isinstance` with a pydantic class takes longer than all the rest."""


def _has_unused(value: Any) -> bool:
    """Whether a model, or a list in one, has an unused field. Takes a quarter of the time of the validation."""
    if value.__class__ is list:
        # Lists of token ids are long, and have no fields.
        parts = () if value and value[0].__class__ is int else value
    else:
        if (extra := value.__pydantic_extra__) and any(_unused_names(value, extra)):
            return True
        given = value.__dict__
        parts = [given.get(name) for name in value.__pydantic_fields_set__]
    for part in parts:  # noqa: SIM110 - a generator takes longer
        if part.__class__ not in _PLAIN and _has_unused(part):
            return True
    return False


def _unused_names(model: StrictModel, extra: Mapping[str, object]) -> Iterator[str]:
    return (
        name[:_MAX_SHOWN_CHARS] or '""' for name, given in extra.items() if given is not None and not model.uses(name)
    )


def _unused_in(value: Any, place: str) -> Iterator[str]:
    """Yields the paths of unused fields, such as `messages[0].name`."""
    if value.__class__ is list:
        for index, entry in enumerate(value):
            yield from _unused_in(entry, f"{place}[{index}]")
    elif value.__class__ not in _PLAIN:
        before = f"{place}." if place else ""
        yield from (before + name for name in _unused_names(value, value.model_extra or {}))
        for name, inner in vars(value).items():
            # `schema_` is `schema`
            yield from _unused_in(inner, before + name.removesuffix("_"))


def unsupported(field: str, message: str) -> warning_pb2.Warning:
    """Returns the warning for an unsupported part of a request."""
    return warning_pb2.Warning(code=warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER, field=field, message=message)
