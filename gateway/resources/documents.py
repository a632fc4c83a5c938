"""Schemas and JSON of `/api/v1`: pages, events and apply results around the documents of `weft.documents`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from gateway.intake.request_model import StopAtFirstError
from gateway.ports import AppliedResource, PoolMembers, ResourcePage
from weft.documents.document_base import ResourceKind
from weft.documents.documents import (
    AgentDocument,
    Document,
    EventDocument,
    ModelDocument,
    PoolDocument,
    RouteDocument,
    RunnerDocument,
)
from weft.documents.yaml_documents import MAX_DOCUMENTS, plain


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
    """Resources to bring to their declared state, all or none."""

    documents: Annotated[list[Any], Field(min_length=1, max_length=MAX_DOCUMENTS), StopAtFirstError()]
    """Model, agent, runner, pool and route documents; `status` in them is ignored."""
    dry_run: bool = False
    """Whether the changes are only reported, not made."""
    adopt: bool = False
    """Whether to adopt resources that runners published: virtual ones become public."""


class ApplyResult(_Part):
    """The outcome for one document."""

    kind: Literal["model", "agent", "runner", "pool", "route"]
    name: str
    outcome: Literal["created", "configured", "unchanged"]
    before: Document | None = None
    after: Document | None = None


class ApplyAnswer(_Part):
    """The outcomes, in the order of the documents."""

    kind: Literal["ApplyAnswer"]
    dry_run: bool
    results: list[ApplyResult]


class PoolMembersAnswer(_Part):
    """The pool of a model."""

    kind: Literal["PoolMembers"]
    pool_name: str
    explicit: bool
    """Whether a member names the pool in its `poolName`."""
    explicit_pool_name: str | None
    """The pool's name if it is explicit."""
    size: int
    active_count: int
    members: list[ModelDocument]


class _Page(_Part):
    next_page_token: str
    """Empty on the last page."""


class ModelList(_Page):
    """A page of models."""

    kind: Literal["ModelList"]
    items: list[ModelDocument]


class AgentList(_Page):
    """A page of agents."""

    kind: Literal["AgentList"]
    items: list[AgentDocument]


class RunnerList(_Page):
    """A page of runners."""

    kind: Literal["RunnerList"]
    items: list[RunnerDocument]


class PoolList(_Page):
    """A page of pools."""

    kind: Literal["PoolList"]
    items: list[PoolDocument]


class RouteList(_Page):
    """A page of routes."""

    kind: Literal["RouteList"]
    items: list[RouteDocument]


class MeshConfig(_Part):
    """Settings of the whole mesh that operators can change while it runs."""

    allow_cloud_fallback: bool
    """Whether a route may fall back to a model that sends bytes off the premises. The primary of a route, and a model
    that is requested by name, are not affected. Each request must allow it as well."""


class EventList(_Part):
    """Events, oldest first."""

    kind: Literal["EventList"]
    items: list[EventDocument]


JsonObject = dict[str, object]


def page_body(kind: ResourceKind, page: ResourcePage) -> JsonObject:
    """Returns a page of a list."""
    items = [plain(document) for document in page.documents]
    return {"kind": kind.list_kind, "items": items, "nextPageToken": page.next_page_token}


def members_body(pool: PoolMembers) -> JsonObject:
    """Returns the pool of a model."""
    return {
        "kind": "PoolMembers",
        "poolName": pool.pool,
        "explicit": pool.is_explicit,
        "explicitPoolName": pool.pool if pool.is_explicit else None,
        "size": pool.size,
        "activeCount": pool.active_count,
        "members": [plain(member) for member in pool.members],
    }


def events_body(events: Sequence[EventDocument]) -> JsonObject:
    """Returns a list of events."""
    return {"kind": "EventList", "items": [plain(event) for event in events]}


def applied_body(results: Sequence[AppliedResource], *, dry_run: bool) -> JsonObject:
    """Returns the outcome for each document."""
    return {"kind": "ApplyAnswer", "dryRun": dry_run, "results": [_result(result) for result in results]}


def _result(result: AppliedResource) -> JsonObject:
    body: JsonObject = {"kind": result.kind.value, "name": result.name, "outcome": result.outcome}
    return body | _state("before", result.before) | _state("after", result.after)


def _state(name: str, document: Document | None) -> JsonObject:
    return {} if document is None else {name: plain(document)}
