"""Schemas and JSON of `/api/v1`: pages, events and apply results around the documents of `weft.documents`."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from gateway.intake.request_model import StopAtFirstError
from gateway.registry_client import ResourcePage
from weft.api.registry.v1.declaration_service_pb2 import ApplyResult
from weft.api.registry.v1.pool_pb2 import Pool
from weft.documents.json_schema import DocumentSchema, Schema, SchemaSet, built_schema, nullable, object_schema
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import ModelDocument, applied_document, plain
from weft.documents.schemas import resource_list_schema, resource_schema
from weft.documents.yaml_documents import MAX_DOCUMENTS
from weft.kernel.requests.request_values import JournalWord


class _Part(BaseModel):
    """camelCase in JSON; unknown fields are refused, since a mistyped `dryRun` must not change anything."""

    model_config = ConfigDict(
        defer_build=True,
        strict=True,
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=False,
    )


class ApplyRequest(_Part):
    """Resources to bring to their declared state. If one is refused, none is changed."""

    documents: Annotated[list[Any], Field(min_length=1, max_length=MAX_DOCUMENTS), StopAtFirstError()]
    """Resource documents of any kind. Their `status` is ignored."""
    dry_run: bool = False
    """Whether the changes are only reported and not applied."""
    adopt: bool = False
    """Whether to adopt resources that runners published, so that virtual ones become public."""
    expected: Annotated[list[Any], Field(max_length=MAX_DOCUMENTS)] = []
    """The documents as they were read. If one has changed since, it is refused with `resource_changed`."""


class MeshConfig(_Part):
    """Settings of the whole mesh that operators can change while it runs."""

    allow_cloud_fallback: bool
    """Whether routes may fall back to a remote model. The primary of a route and models requested by name are not
    affected. Each request must allow it as well."""
    journal: JournalWord | None = None
    """Whether requests are durable tasks if neither their model nor their tenant has a setting: `none`, `wait`, or
    `keep`. Absent: unchanged; in an answer: not set."""


_TEXT: Schema = {"type": "string"}
_PAGE_TOKEN: Schema = _TEXT | {"description": "Empty on the last page."}
_OUTCOMES = ("created", "configured", "unchanged")


def page_schema(kind: ResourceKind) -> DocumentSchema:
    """Returns the schema of a page of resources."""
    return resource_list_schema(kind, _PAGE_TOKEN, required=True)


def _result_schema(kinds: Iterable[ResourceKind], schemas: SchemaSet) -> Schema:
    document = nullable({"anyOf": [resource_schema(kind).add(schemas) for kind in kinds]})
    properties: dict[str, Schema] = {
        "kind": {"type": "string", "enum": [kind.value for kind in kinds]},
        "name": _TEXT,
        "outcome": {"type": "string", "enum": list(_OUTCOMES)},
        "before": document,
        "after": document,
    }
    return object_schema(properties, ["kind", "name", "outcome"], "The outcome for one document.")


def _answer_schema(kinds: Iterable[ResourceKind], schemas: SchemaSet) -> Schema:
    result = schemas.add("ApplyResult", lambda: _result_schema(kinds, schemas))
    properties: dict[str, Schema] = {
        "kind": {"type": "string", "const": "ApplyAnswer"},
        "dryRun": {"type": "boolean"},
        "results": {"type": "array", "items": result},
    }
    return object_schema(properties, list(properties), "The outcomes, in the order of the documents.")


def _members_schema(schemas: SchemaSet) -> Schema:
    properties: dict[str, Schema] = {
        "kind": {"type": "string", "const": "PoolMembers"},
        "poolName": _TEXT,
        "explicit": {"type": "boolean", "description": "Whether a member names the pool in its `poolName`."},
        "explicitPoolName": {
            "anyOf": [_TEXT, {"type": "null"}],
            "description": "The pool's name if it is explicit.",
        },
        "size": {"type": "integer"},
        "activeCount": {"type": "integer"},
        "members": {"type": "array", "items": resource_schema(ResourceKind.MODEL).add(schemas)},
    }
    return object_schema(properties, list(properties), "The pool of a model.")


def apply_answer(kinds: Iterable[ResourceKind]) -> DocumentSchema:
    """Returns the schema of an answer of apply, whose documents are of these kinds."""
    return built_schema("ApplyAnswer", partial(_answer_schema, tuple(kinds)))


POOL_MEMBERS = built_schema("PoolMembersAnswer", _members_schema)

JsonObject = dict[str, object]


def page_body(kind: ResourceKind, page: ResourcePage) -> JsonObject:
    """Returns a page of a list."""
    items = [plain(document) for document in page.documents]
    return {"kind": kind.list_kind, "items": items, "nextPageToken": page.next_page_token}


def members_body(pool: Pool, members: Sequence[ModelDocument]) -> JsonObject:
    """Returns the pool of a model."""
    return {
        "kind": "PoolMembers",
        "poolName": pool.name,
        "explicit": pool.explicit,
        "explicitPoolName": pool.name if pool.explicit else None,
        "size": pool.size,
        "activeCount": pool.active_count,
        "members": [plain(member) for member in members],
    }


def applied_body(results: Sequence[ApplyResult], *, dry_run: bool) -> JsonObject:
    """Returns the outcome for each document."""
    return {"kind": "ApplyAnswer", "dryRun": dry_run, "results": [applied_document(result) for result in results]}
