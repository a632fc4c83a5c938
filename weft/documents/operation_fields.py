"""Fields of a call about operations, as the registry names them, in the words of the documents."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from weft.documents.declared_fields import document_field

_ACTION = re.compile(r"^action\.(?:load_model|unload_model|flush_cache)\.(?:options\.)?")
# The model of a load or an unload is named beside its document.
_SUBJECT = re.compile(r"^action\.(?:load_model|unload_model)\.model$")
_PARAMETERS = "parameters"
_RENAMED: Mapping[str, str] = MappingProxyType(
    {"request_id": "Idempotency-Key", "after_sequence": "after", "memory_budget_bytes": "memoryBudgetMb"}
)


def operation_field(field: str) -> str:
    """A field of a request, as documents and queries have it; settings of engines have the same name in both.

    "action.load_model.evict_model" is evictModel, and the model that is to be loaded is "name".
    """
    if _SUBJECT.match(field):
        return "name"
    own = _ACTION.sub("", field)
    return own if own.startswith(_PARAMETERS) else _RENAMED.get(own) or document_field(own)
