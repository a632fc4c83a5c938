"""GET /api/v1/watch: changes of the requested kinds as one stream of server-sent events."""

from collections.abc import Mapping
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.sse_writer import EventStream
from gateway.deps import Gateway
from gateway.intake.headers import tenant_of
from gateway.intake.query import begin_read
from gateway.request_facts import facts_of
from gateway.routing import collaborator
from gateway.watch.source import WatchCaller, WatchSource
from gateway.watch.watch_stream import WatchLimits, WatchStream
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.access.principal import Principal
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason

SURFACE = "api"
PARAMETERS = ("kinds", "allTenants")


Sources = Annotated[Mapping[str, WatchSource], collaborator("watch sources")]
"""Watch sources by kind."""
_KINDS = frozenset(ResourceKind)


async def watch(deps: Gateway, by_kind: Sources, request: Request) -> Response:
    """Streams all objects of the kinds, then every change, as server-sent events.

    `kinds`: comma-separated; absent: all kinds that the caller may see. `allTenants`: also requests and tasks of
    other tenants, if the caller may name them.
    """
    query = begin_read(request, SURFACE, PARAMETERS)
    principal = facts_of(request.scope).principal
    is_of_all = query.flag("allTenants") and principal.names_tenants
    caller = WatchCaller(principal=principal, tenant="" if is_of_all else tenant_of(request.scope))
    if "kinds" in query:
        sources = _wanted(by_kind, query.text("kinds"), caller.principal)
    else:
        sources = [source for source in by_kind.values() if _refusal(caller.principal, source) is None]
    if not sources:
        raise WeftError(Reason.PERMISSION_DENIED, "the key may not view any of these kinds")
    config = deps.config
    limits = WatchLimits(max_names=config.max_watch_names, interval_seconds=config.watch_interval_seconds)
    return EventStream(deps, WatchStream(sources, caller, limits, deps.clock).writes())


def _wanted(by_kind: Mapping[str, WatchSource], text: str, principal: Principal) -> list[WatchSource]:
    """Returns the sources of kinds. Raises INVALID_ARGUMENT, PERMISSION_DENIED naming the kind by its position."""
    words = list(dict.fromkeys(text.split(",")))
    for index, word in enumerate(words):
        if word not in by_kind and (word not in _KINDS or len(words) == 1):
            known = ", ".join(sorted(by_kind))
            message = f"'{word[:32]}' is not a kind; kinds are {known}, separated by commas"
            raise invalid_field(f"kinds[{index}]", message)
    # Of several kinds, those of an extension that is off have no objects: the command line asks for all it knows.
    found = [by_kind[word] for word in words if word in by_kind]
    for index, source in enumerate(found):
        refusal = _refusal(principal, source)
        if refusal is not None:
            raise FieldError(f"kinds[{index}]", f"{source.kind}: {refusal.message}", refusal.reason)
    return found


def _refusal(principal: Principal, source: WatchSource) -> WeftError | None:
    """Returns why a caller may not see a kind; None: it may see at least a part."""
    try:
        if source.by_name:
            principal.require_some(source.access)
        else:
            principal.require(source.access)
    except WeftError as error:
        return error
    return None
