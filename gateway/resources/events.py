"""GET /api/v1/events: what happened lately, or what happens from now on."""

from fastapi import FastAPI, Request, Response

from gateway.answers.event_stream import EventStream, encoded_events
from gateway.intake.query import Query
from gateway.openapi import answers
from gateway.parts import GatewayParts
from gateway.ports import EventFilter
from gateway.request_facts import facts_of
from gateway.resources.documents import events_body
from gateway.resources.endpoints import API, SURFACE, json_response
from gateway.resources.schema import EventList
from weft.documents.document_base import parse_kind
from weft.kernel.errors import invalid_field
from weft.kernel.names import require_name

MAX_EVENTS = 1000

_PARAMETERS = ("kind", "name", "limit", "watch")


def add_events(app: FastAPI, parts: GatewayParts) -> None:
    """Add the route."""

    async def get_events(request: Request) -> Response:
        """The newest events, oldest first; or with watch=1 a stream of server-sent events from now on."""
        facts_of(request.scope).surface = SURFACE
        query = Query(request.scope, frozenset(_PARAMETERS))
        wanted, limit = _filter_of(query), query.count("limit", MAX_EVENTS)
        if query.flag("watch"):
            if limit:
                raise invalid_field("limit", "goes with a list; a watch has no end")
            return EventStream(parts, encoded_events(parts.registry.watch_events(wanted)))
        return json_response(events_body(await parts.registry.list_events(wanted, limit)))

    app.add_api_route(
        f"{API}/events",
        get_events,
        methods=["GET"],
        tags=["resources"],
        openapi_extra=answers(EventList, query=_PARAMETERS),
    )


def _filter_of(query: Query) -> EventFilter:
    kind = parse_kind(query.text("kind"), "kind") if "kind" in query else None
    if "name" not in query:
        return EventFilter(kind=kind)
    if kind is None:
        raise invalid_field("kind", "is required with name")
    return EventFilter(kind=kind, name=require_name(query.text("name"), "name"))
