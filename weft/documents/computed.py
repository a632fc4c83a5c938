"""Parts of documents that do not derive from a single field of a message, and rules that span several fields.

The tables are keyed by the message's full name, so that a command which shows one kind imports no other messages.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from weft.kernel.schemas.field_rules import RuleError, enum_words
from weft.kernel.values.names import MAX_NAME_CHARS

if TYPE_CHECKING:
    from weft.api.operations.v1 import operation_pb2
    from weft.api.registry.v1 import key_service_pb2, wake_pb2
    from weft.api.router.v1 import task_pb2
    from weft.api.runner.v1 import load_pb2

CONTEXT_TOKENS = "context_tokens"
MIN_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS = 16, 16_777_216
MAX_MEMORY_MB = 16_777_216
MAX_QUANTIZATION_CHARS = 64
MAX_LOAD_PARAMETERS = 64
MAX_PARAMETER_CHARS = 64
MAX_WORD_CHARS = 128


@dataclass(frozen=True, slots=True)
class Computed:
    """How the document of a message differs from its fields."""

    compute: Callable[[Any, dict[str, Any]], None]
    """Changes the document of a message in place."""
    properties: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """JSON schemas of the added fields, and extra constraints on other fields of documents that users write."""
    required: tuple[str, ...] = ()
    """Added fields that are always present."""
    left_out: frozenset[str] = frozenset()
    """Fields of the message that documents may omit."""


def _load_options(_: "load_pb2.LoadOptions", document: dict[str, Any]) -> None:
    """Moves the context out of the parameters: every engine has it."""
    context = document["parameters"].pop(CONTEXT_TOKENS, None)
    if context is not None:
        document["contextTokens"] = context


def _load_parameter(parameter: "load_pb2.LoadParameter", document: dict[str, Any]) -> None:
    kind = "word" if parameter.words else "flag" if parameter.flag else "integer" if parameter.integer else "number"
    document["type"] = kind


_RESULT_FIELDS: Mapping[str | None, tuple[str, ...]] = MappingProxyType(
    {
        "load_model": ("models", "memoryBytes", "memoryMeasured", "loadSeconds", "memoryFreedBytes", "added"),
        "pull_model": ("pulled",),
        "remove_model": ("models", "memoryFreedBytes", "added"),
        "unload_model": ("models", "memoryFreedBytes", "cacheFlushed"),
        "flush_cache": ("models", "entryCount", "tokenCount", "reusableBytes"),
    }
)


def _operation(operation: "operation_pb2.Operation", document: dict[str, Any]) -> None:
    """Removes result fields that do not apply to this kind of action."""
    kind, result = operation.action.WhichOneof("kind"), document.get("result")
    if result is None:
        return
    if kind == "load_model" and not result["memoryFreedBytes"]:
        del result["memoryFreedBytes"]
    shown = _RESULT_FIELDS.get(kind, _RESULT_FIELDS["flush_cache"])
    document["result"] = {name: result[name] for name in shown if name in result}


def _task(task: "task_pb2.Task", document: dict[str, Any]) -> None:
    if not task.batch:
        document.pop("line")
    document["attempts"] = []


def _task_attempt(attempt: "task_pb2.TaskAttempt", document: dict[str, Any]) -> None:
    if attempt.reason:
        words = enum_words(attempt.DESCRIPTOR.fields_by_name["reason"].enum_type)
        document["error"] = {"reason": words.get(attempt.reason, "unknown"), "message": attempt.message}


def _as_it_is(_: Any, __: dict[str, Any]) -> None:
    """Changes nothing."""


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}], "default": None}


def _gaps_in(*names: str) -> Callable[[Any, dict[str, Any]], None]:
    """Returns the change of a document with lists of figures under these names."""

    def compute(_: Any, document: dict[str, Any]) -> None:
        for name in names:
            document[name] = _with_gaps(document[name])

    return compute


def _with_gaps(figures: list[float]) -> list[float | None]:
    """Replaces unknown figures (NaN) by None, since JSON has no NaN."""
    return [None if math.isnan(figure) else figure for figure in figures]


_CONTEXT = {
    "type": "integer",
    "minimum": MIN_CONTEXT_TOKENS,
    "maximum": MAX_CONTEXT_TOKENS,
    "description": "Context of one slot.",
}
_QUANTIZATION = {"type": "string", "minLength": 1, "maxLength": MAX_QUANTIZATION_CHARS}
_PARAMETERS = {
    "maxProperties": MAX_LOAD_PARAMETERS,
    "propertyNames": {"maxLength": MAX_PARAMETER_CHARS},
    "additionalProperties": {"type": ["boolean", "number", "string"], "maxLength": MAX_WORD_CHARS},
}
_PARAMETER_TYPE = {
    "type": "string",
    "enum": ["integer", "number", "word", "flag"],
    "description": "Type of the value.",
}
_KEY_STATE = {
    "type": "string",
    "enum": ["good", "expired", "revoked"],
    "description": "Whether it is valid now.",
}
_WITH_GAPS = {"items": {"type": ["number", "null"]}}
_ATTEMPTS = {"type": "array", "default": [], "description": "All attempts in order, if a single task was requested."}
_ERROR = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"reason": {"type": "string"}, "message": {"type": "string"}},
    "required": ["reason", "message"],
    "description": "Why it failed; absent while it is running, and if it completed.",
}
_RESULT_NAMES = frozenset(name for names in _RESULT_FIELDS.values() for name in names) - {"models"}

_LOAD_OPTIONS = Computed(
    _load_options,
    {
        "contextTokens": _nullable(_CONTEXT),
        "quantization": _nullable(_QUANTIZATION),
        "memoryBudgetMb": _nullable({"type": "integer", "minimum": 1, "maximum": MAX_MEMORY_MB}),
        "parameters": _PARAMETERS,
    },
)
_GRAPH = {
    "type": "object",
    "minProperties": 1,
    "description": 'The graph, as ComfyUI\'s "Export (API)" writes it: an object from the id of each node to its '
    "class and inputs. Documents that are read may have it as a text. At most 256 KiB and 512 nodes.",
}
_DEFAULT = {
    "type": ["string", "number"],
    "description": "Default value. Absent: the value in the graph.",
}


def _workflow(_: Any, document: dict[str, Any]) -> None:
    document["graph"] = _from_json(document["graph"])


def _workflow_input(_: Any, document: dict[str, Any]) -> None:
    if "default" in document:
        document["default"] = _from_json(document["default"])


def _from_json(text: str) -> Any:
    """Parses JSON; returns the text unchanged if it is invalid, so that users can see what is wrong."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


COMPUTED: Mapping[str, Computed] = MappingProxyType(
    {
        "weft.api.common.v1.Workflow": Computed(_workflow, {"graph": _GRAPH}),
        # The inlined Workflow writes the graph; only its schema is added here.
        "weft.api.registry.v1.WorkflowManifest": Computed(_as_it_is, {"graph": _GRAPH}),
        "weft.api.common.v1.WorkflowInput": Computed(_workflow_input, {"default": _DEFAULT}),
        # The state depends on the time, so the caller adds it (`key_state`).
        "weft.api.registry.v1.Key": Computed(_as_it_is, {"state": _KEY_STATE}, required=("state",)),
        # As strict as `operation_actions.LoadSettings`; the registry itself accepts more.
        "weft.api.runner.v1.LoadOptions": _LOAD_OPTIONS,
        "weft.api.runner.v1.LoadParameter": Computed(_load_parameter, {"type": _PARAMETER_TYPE}, required=("type",)),
        "weft.api.operations.v1.Operation": Computed(_operation),
        "weft.api.operations.v1.OperationResult": Computed(_as_it_is, left_out=_RESULT_NAMES),
        "weft.api.router.v1.Task": Computed(_task, {"attempts": _ATTEMPTS}, left_out=frozenset({"line"})),
        "weft.api.router.v1.Percentiles": Computed(_gaps_in("p50", "p95"), {"p50": _WITH_GAPS, "p95": _WITH_GAPS}),
        "weft.api.router.v1.DeviceFigures": Computed(
            _gaps_in("usedBytes", "utilization"), {"usedBytes": _WITH_GAPS, "utilization": _WITH_GAPS}
        ),
        "weft.api.router.v1.TaskAttempt": Computed(_task_attempt, {"error": _nullable(_ERROR)}),
    }
)
"""Differences of documents from messages, by the message's full name."""


def key_state(key: "key_service_pb2.Key", now: datetime) -> str:
    """Returns whether an API key is good, expired or revoked at `now`."""
    if key.HasField("revoke_time"):
        return "revoked"
    is_over = key.HasField("expire_time") and key.expire_time.ToDatetime(tzinfo=UTC) <= now
    return "expired" if is_over else "good"


def _wake(wake: "wake_pb2.Wake") -> str:
    return "" if wake.by_runner or wake.HasField("by_mesh") else "needs byRunner: true, or a recipe in byMesh"


def _alias(alias: Any) -> str:
    """Returns what an alias with a name pattern is missing; empty: nothing."""
    if "*" not in alias.name:
        return ""
    return f"name must be one name: give it another one, and write `pattern: {alias.name[:MAX_NAME_CHARS]!r}` beside it"


CHECKS: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {"weft.api.registry.v1.Wake": _wake, "weft.api.registry.v1.AliasManifest": _alias}
)
"""Rules that span several fields, by the message's full name. Each returns what is wrong, or an empty text."""


def _read_workflow(document: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Replaces the graph by its JSON text, which messages have."""
    graph = document.get("graph")
    return {**document, "graph": _as_json(graph)} if isinstance(graph, dict) else document


def _read_workflow_input(document: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Replaces the default by its JSON text, which messages have."""
    return {**document, "default": _as_json(document["default"])} if "default" in document else document


def _as_json(value: Any) -> str:
    """Returns a value as JSON; empty for null. Raises RuleError for a value that JSON cannot express."""
    if value is None:
        return ""
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise RuleError("contains invalid JSON") from None


READ_AS: Mapping[str, Callable[[Mapping[Any, Any]], Mapping[Any, Any]]] = MappingProxyType(
    {
        "weft.api.common.v1.Workflow": _read_workflow,
        "weft.api.registry.v1.WorkflowManifest": _read_workflow,
        "weft.api.common.v1.WorkflowInput": _read_workflow_input,
    }
)
"""Converts a document before it is read, by the message's full name: the inverse of `COMPUTED`."""
