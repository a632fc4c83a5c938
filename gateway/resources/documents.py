"""Resources as the JSON of `/api/v1`: documents of `weft.documents`, and what stands around several of them."""

from collections.abc import Sequence

from gateway.ports import AppliedResource, PoolMembers, ResourcePage
from weft.documents.document_base import ResourceKind
from weft.documents.documents import Document, EventDocument
from weft.documents.yaml_nodes import plain

JsonObject = dict[str, object]


def page_body(kind: ResourceKind, page: ResourcePage) -> JsonObject:
    """A page of a list."""
    items = [plain(document) for document in page.documents]
    return {"kind": kind.list_kind, "items": items, "nextPageToken": page.next_page_token}


def members_body(pool: PoolMembers) -> JsonObject:
    """The pool that a model is in."""
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
    """A list of events."""
    return {"kind": "EventList", "items": [plain(event) for event in events]}


def applied_body(results: Sequence[AppliedResource], *, dry_run: bool) -> JsonObject:
    """What was done for each document."""
    return {"kind": "ApplyAnswer", "dryRun": dry_run, "results": [_result(result) for result in results]}


def _result(result: AppliedResource) -> JsonObject:
    body: JsonObject = {"kind": result.kind.value, "name": result.name, "outcome": result.outcome}
    return body | _state("before", result.before) | _state("after", result.after)


def _state(name: str, document: Document | None) -> JsonObject:
    return {} if document is None else {name: plain(document)}
