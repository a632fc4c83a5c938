"""The fields of all documents."""

import json
from collections.abc import Iterator
from typing import Any

from weft.api.operations.v1 import operation_pb2, operation_service_pb2
from weft.api.registry.v1 import event_pb2, lease_service_pb2
from weft.api.router.v1 import request_pb2, task_service_pb2
from weft.documents.json_schema import Schema, SchemaSet, record_schema
from weft.documents.resource_kinds import ResourceKind
from weft.documents.schemas import resource_schema

_RECORDS = (
    event_pb2.Event,
    task_service_pb2.GetTaskResponse,
    request_pb2.RequestRecord,
    request_pb2.ClientRecord,
    operation_pb2.Operation,
    lease_service_pb2.HostMemory,
    operation_service_pb2.AuditEntry,
)
_HEAD = """# Fields of documents

[Resource documents](../api.md#resource-documents) has examples. An unset field without a default is
omitted unless required. snake_case names are also accepted.
"""


def page() -> str:
    """Returns the page."""
    schemas = SchemaSet()
    for kind in ResourceKind:
        resource_schema(kind).add(schemas)
    for record in _RECORDS:
        record_schema(record).add(schemas)
    return _HEAD + "".join(_section(name, schema) for name, schema in schemas.definitions.items())


def _section(name: str, schema: Schema) -> str:
    rows = "".join(_rows(schema))
    return f"\n## {name}\n\n{schema['description']}\n\n| field | type | default | meaning |\n|---|---|---|---|\n{rows}"


def _rows(schema: Schema) -> Iterator[str]:
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        default = (
            "required"
            if name in required
            else ""
            if field.get("default") is None
            else f"`{json.dumps(field['default'])}`"
        )
        meaning = field.get("description", "").replace("|", "\\|").replace("<", "&lt;")
        yield f"| `{name}` | {_type(field)} | {default} | {meaning} |\n"


def _type(schema: Schema) -> str:
    """Returns what a value may be, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [_type(one) for one in schema.get("anyOf") or schema["oneOf"] if one != {"type": "null"}]
        return " or ".join(kinds)
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema.get("enum") or [schema["const"]])
    if schema["type"] == "array":
        return "list" if "items" not in schema else f"list of {_type(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"mapping to {_type(schema['additionalProperties'])}"
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return " or ".join(kinds) + _range(schema)


def _range(schema: dict[str, Any]) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum")
    if low is None and high is None:
        longest = schema.get("maxLength")
        return "" if longest is None else f", at most {longest} characters"
    above = "more than " if "exclusiveMinimum" in schema else ""
    bounds = [f"from {above}{low}" if low is not None else "", f"to {high}" if high is not None else ""]
    return ", " + " ".join(bound for bound in bounds if bound)
