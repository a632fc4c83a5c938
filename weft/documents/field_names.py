"""Converts field paths in the registry's errors to names in documents."""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from weft.api.operations.v1.operation_pb2 import OperationAction
from weft.api.runner.v1.load_pb2 import LoadOptions
from weft.documents.codec import camel, document_path
from weft.documents.kinds import KINDS
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.schemas.field_rules import MapKey, path_text

_DECLARED = re.compile(rf"^declarations\[(\d+)\](?:\.({'|'.join(KINDS)})(?=[.\[]|$))?\.?")
_STEP = re.compile(r"\[(\d+)\]|\[([^\]]*)\]|([^.\[]+)")


def declared_field(field: str) -> tuple[int, str] | None:
    """Returns the index of a document and a field in it (empty: all of it); None: the field is in no document.

    "declarations[2].model.manifest.pool_name" is (2, "poolName").
    """
    found = _DECLARED.match(field)
    if found is None:
        return None
    descriptor: Any = KINDS[ResourceKind(found[2])].declared.DESCRIPTOR if found[2] else None
    return int(found[1]), path_text(document_path(descriptor, tuple(_steps(field[found.end() :]))))


def _steps(field: str) -> Iterator[str | int]:
    for index, key, name in _STEP.findall(field):
        yield int(index) if index else MapKey(key) if key else name


def document_field(field: str) -> str:
    """Returns the document name of a request field that is outside any document."""
    return camel(field)


# Loads and unloads name their model beside the document.
_SUBJECTS = frozenset({"action.load_model.model", "action.unload_model.model"})
_LOAD_OPTIONS = "action.load_model.options."
_RUNNER_OPTIONS = "options."
"""Prefix with which a runner names load options."""
_ENGINE_PARAMETERS = "parameters"
_PARTS: Mapping[str, Any] = MappingProxyType(
    {_LOAD_OPTIONS: LoadOptions.DESCRIPTOR, "action.": OperationAction.DESCRIPTOR}
)
"""Request fields that hold documents, and the options of a load; longest first."""
_REQUEST_FIELDS: Mapping[str, str] = MappingProxyType({"request_id": "Idempotency-Key", "after_sequence": "after"})


def operation_field(field: str) -> str:
    """Returns the name of an operation request's field in documents and queries; engine settings keep their names.

    "action.load_model.evict_model" is "evictModel"; the model to load is "name".
    """
    if field in _SUBJECTS:
        return "name"
    field = field.removeprefix(_RUNNER_OPTIONS)
    if field.removeprefix(_LOAD_OPTIONS).startswith(_ENGINE_PARAMETERS):
        return field.removeprefix(_LOAD_OPTIONS)
    for part, descriptor in _PARTS.items():
        if field.startswith(part):
            own = path_text(document_path(descriptor, tuple(_steps(field.removeprefix(part)))))
            return own or document_field(field)
    return _REQUEST_FIELDS.get(field) or document_field(field)
