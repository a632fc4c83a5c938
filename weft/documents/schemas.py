"""The published JSON schemas of resources and events."""

from typing import Any

from weft.api.registry.v1.event_pb2 import Event
from weft.api.registry.v1.model_pb2 import Model
from weft.api.registry.v1.registry_service_pb2 import ListEventsResponse
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.documents.json_schema import (
    DocumentSchema,
    Schema,
    SchemaSet,
    built_schema,
    nullable,
    object_schema,
    record_schema,
    schema_name,
)
from weft.documents.kinds import KINDS
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import MEMBER_FIELDS

_TEXT: Schema = {"type": "string"}


def resource_schema(kind: ResourceKind) -> DocumentSchema:
    """Returns the schema of a resource, as `apply`, `/api/v1` and `-o json` use it."""
    name = f"{kind.value.capitalize()}Document"

    def build(schemas: SchemaSet) -> Schema:
        descriptor: Any = KINDS[kind].declared.DESCRIPTOR
        declared = schemas.object_of(descriptor)
        status = nullable(_status_schema(kind, schemas)) | {"description": "Current status; ignored by `apply`."}
        own = {"kind": {"const": kind.value, "type": "string", "description": "Kind of document."}}
        properties = own | declared["properties"] | {"status": status}
        return object_schema(properties, ["kind", *declared["required"]], KINDS[kind].summary)

    return built_schema(name, build)


def resource_list_schema(kind: ResourceKind, page_token: Schema, *, required: bool) -> DocumentSchema:
    """Returns the schema of a list of resources; `page_token` is the schema of the next page's token."""

    def build(schemas: SchemaSet) -> Schema:
        properties = {
            "nextPageToken": page_token,
            "kind": {"const": kind.list_kind, "type": "string", "description": "Kind of document."},
            "items": {
                "type": "array",
                "items": resource_schema(kind).add(schemas),
                "description": f"The {kind.plural}.",
            },
        }
        always = [*(["nextPageToken"] if required else []), "kind", "items"]
        return object_schema(properties, always, f"{kind.plural.capitalize()} by name.")

    return built_schema(kind.list_kind, build)


def _status_schema(kind: ResourceKind, schemas: SchemaSet) -> Schema:
    descriptor: Any = KINDS[kind].record.DESCRIPTOR

    def build() -> Schema:
        observed = schemas.object_of(descriptor)
        computed, required = _computed_schemas(kind, schemas)
        conditions = {
            "type": "array",
            "items": schemas.add("Condition", _condition_schema),
            "default": [],
            "description": "Conditions of the resource.",
        }
        properties = observed["properties"] | computed | {"conditions": conditions}
        return object_schema(properties, [*observed.get("required", ()), *required], observed["description"])

    return schemas.add(schema_name(descriptor), build)


def _computed_schemas(kind: ResourceKind, schemas: SchemaSet) -> tuple[dict[str, Schema], list[str]]:
    """Returns the schemas of computed status fields, and the names of those that are always present."""
    if kind is ResourceKind.MODEL:
        instance: Any = InstanceState.DESCRIPTOR
        pool = _TEXT | {"description": "Pool of the model: `poolName`, else the model's name."}
        state = nullable(schemas.of_message(instance))
        return {"pool": pool, "instance": state | {"description": "State on its runner, if known."}}, ["pool"]
    if kind is ResourceKind.POOL:
        member = schemas.add("MemberStatus", lambda: _member_schema(schemas))
        return {"members": {"type": "array", "items": member, "default": [], "description": "Its members."}}, []
    return {}, []


def _member_schema(schemas: SchemaSet) -> Schema:
    descriptor: Any = Model.DESCRIPTOR
    model = schemas.object_of(descriptor)["properties"]
    properties = {"name": _TEXT | {"description": "The model."}} | {name: model[name] for name in MEMBER_FIELDS}
    return object_schema(properties, ["name", "kind", "state"], "A model of a pool.")


def _condition_schema() -> Schema:
    properties: dict[str, Schema] = {
        "type": _TEXT | {"description": 'Type of the condition, such as "Ready".'},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"], "description": "Whether it holds."},
        "reason": _TEXT | {"description": 'Machine-readable reason, such as "CrashLoop".'},
        "message": _TEXT | {"description": "Why, in words for people."},
    }
    return object_schema(properties, list(properties), "A condition: whether it is met, and why.")


_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NEXT_PAGE = nullable(_TEXT) | {"description": "Over HTTP: token of the next page; empty on the last page."}


def schemas() -> dict[str, Schema]:
    """Returns every published schema by file name. They describe input of `apply` and output of `-o json`."""
    published = {kind.value: resource_schema(kind) for kind in ResourceKind}
    published |= {f"{kind.value}-list": resource_list_schema(kind, _NEXT_PAGE, required=False) for kind in ResourceKind}
    published |= {"event": record_schema(Event), "event-list": record_schema(ListEventsResponse)}
    return {f"{name}.json": _published(schema) for name, schema in published.items()}


def _published(schema: DocumentSchema) -> Schema:
    found = SchemaSet()
    schema.add(found)
    own = found.definitions.pop(schema.name)
    return {"$schema": _DIALECT, "$defs": dict(sorted(found.definitions.items())), **own}
