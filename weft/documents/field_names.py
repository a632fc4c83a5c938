"""Names of fields in documents, for the fields that the registry names in errors about its messages."""

import re
from collections.abc import Mapping
from types import MappingProxyType

_DECLARED = re.compile(
    r"^declarations\[(\d+)\](?:\.(?:model\.manifest|model|agent\.behaviour|agent|runner|pool|route)(?=\.|$))?\.?"
)
_RECIPE = re.compile(r"(?<=by_mesh)\.(?:http|command|wake_on_lan)(?=\.|$)")
_SNAKE = re.compile(r"_([a-z])")
_PARAMETERS = "default_params."
# Fields of a message that have another name in documents.
_RENAMED = {"repetition_policy": "repetition", "budget": "budget_seconds"}


def declared_field(field: str) -> tuple[int, str] | None:
    """Returns the index of a document and a field in it (empty: all of it); None: a field of no document.

    "declarations[2].model.manifest.pool_name" is (2, "poolName").
    """
    found = _DECLARED.match(field)
    return (int(found[1]), document_field(field[found.end() :])) if found is not None else None


def document_field(field: str) -> str:
    """Returns the name of a message's field in documents; parameters of agents have the same name in both."""
    own, parameters, name = _RECIPE.sub("", field).partition(_PARAMETERS)
    return _camel(_RENAMED.get(own, own) + parameters) + name


def _camel(name: str) -> str:
    return _SNAKE.sub(lambda found: found[1].upper(), name)


_ACTION = re.compile(r"^action\.(?:load_model|unload_model|flush_cache)\.(?:options\.)?")
# The model of a load or an unload is named beside its document.
_SUBJECT = re.compile(r"^action\.(?:load_model|unload_model)\.model$")
_ENGINE_PARAMETERS = "parameters"
_RENAMED_OPERATION_FIELDS: Mapping[str, str] = MappingProxyType(
    {"request_id": "Idempotency-Key", "after_sequence": "after", "memory_budget_bytes": "memoryBudgetMb"}
)


def operation_field(field: str) -> str:
    """Returns the name of an operation request's field in documents and queries; engine settings keep their names.

    "action.load_model.evict_model" is "evictModel"; the model to load is "name".
    """
    if _SUBJECT.match(field):
        return "name"
    own = _ACTION.sub("", field)
    return own if own.startswith(_ENGINE_PARAMETERS) else _RENAMED_OPERATION_FIELDS.get(own) or document_field(own)
