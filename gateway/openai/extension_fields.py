"""Extension fields: unknown fields of a request, passed to the engine or warned about."""

from collections.abc import Mapping
from itertools import islice

from gateway.answers.answer_builder import MAX_NOTICES
from gateway.intake.request_model import HandledRequest
from weft.api.common.v1 import json_value_pb2, warning_pb2
from weft.dispatch.parameter_checks import MAX_EXTRA_BYTES, MAX_EXTRA_FIELDS, MAX_EXTRA_NAME_CHARS, take_bytes
from weft.kernel.errors import invalid_field
from weft.kernel.json_objects import add_member

# Fields about OpenAI's own service: accounts, prices, stores and caches. They are not used, without a warning because
# clients send them by default.
NOT_USED = frozenset({
    "metadata", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip
# Alias of a field that the request has under its usual name.
_SPELLINGS = frozenset({"repetition_penalty"})
LANGUAGES = ("source_lang_code", "target_lang_code")
"""Fields for translation models, which all chat APIs pass to the engine."""
_MAX_SHOWN_CHARS = 64
EXTENSION_PREFIX = "x_"
"""Prefix of fields for the mesh, which are never passed to an engine."""


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


def unknown_extensions(request: HandledRequest) -> list[warning_pb2.Warning]:
    """Returns a warning for each unknown field with EXTENSION_PREFIX, and for an unknown `ttl`; at most MAX_NOTICES."""
    given = request.model_extra or {}
    names = (name for name, value in given.items() if name.startswith(EXTENSION_PREFIX) and value is not None)
    message = "is an unknown extension; it was not used"
    found = [unsupported(name[:_MAX_SHOWN_CHARS], message) for name in islice(names, MAX_NOTICES - 1)]
    if request.cache_seconds is None:
        found.append(unsupported("prompt_cache_options.ttl", "is not a duration of at most a day; it was ignored"))
    return found


def unsupported(field: str, message: str) -> warning_pb2.Warning:
    """Returns the warning for an unsupported part of a request."""
    return warning_pb2.Warning(code=warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER, field=field, message=message)
