"""Operations, the audit log and figures (/v1/admin), request records (/v1/requests, /v1/clients)."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, cast

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.instances import EngineLogClient, RunnerDescriptions
from gateway.admin.process_client import ProcessesClient
from gateway.answers.sse_writer import EventStream, encoded_records
from gateway.answers.unary import json_response
from gateway.deps import Gateway
from gateway.intake.headers import tenant_of
from gateway.intake.query import Query, begin_change, begin_read
from gateway.operation_client import (
    OPERATION_PREFIX,
    OperationsClient,
    create_operation,
    idempotency_key,
    keyless_name,
    requester,
)
from gateway.registry_client import RegistryService
from gateway.request_facts import facts_of
from gateway.routing import collaborator
from weft.api.gateway.v1.discovery_pb2 import Discovery
from weft.api.gateway.v1.model_catalog_pb2 import ModelCatalog
from weft.api.operations.v1 import operation_pb2
from weft.api.operations.v1 import operation_service_pb2 as pb
from weft.api.registry.v1.capture_service_pb2 import GetCaptureRequest
from weft.api.registry.v1.lease_service_pb2 import HostMemory
from weft.api.router.v1.request_service_pb2 import (
    RequestSelection,
)
from weft.dispatch.placement import QueueSource
from weft.documents.codec import document_of
from weft.durable.requests import DEFAULT_LISTED, MAX_LISTED, UNDER_WAY, RequestClient, Selection, shown_to
from weft.kernel.errors.error_tree import WeftError, invalid_field, renaming_fields
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.field_rules import enum_words
from weft.kernel.values.names import (
    MAX_NAME_CHARS,
    MAX_REQUEST_ID_CHARS,
    require_request_id,
    require_token,
)

DiscoverySource = Callable[[], Awaitable[Discovery]]
"""Returns engines and models found on the mesh's machine. Raises UNSUPPORTED_OPERATION if it may not be searched."""
CatalogSource = Callable[[str, str, Sequence[HostMemory]], Awaitable[ModelCatalog]]
"""Returns models to pull that match a text, or one source in detail, with their memory on hosts with these accounts."""


async def look_nowhere() -> Discovery:
    """The DiscoverySource of a gateway that runs apart from runners."""
    raise WeftError(
        Reason.UNSUPPORTED_OPERATION,
        "only weft up looks for engines and models on its machine; here: weft models discover, then "
        "POST /v1/admin/models",
    )


async def no_catalog(_text: str, _source: str, _hosts: Sequence[HostMemory]) -> ModelCatalog:
    """The CatalogSource of a gateway that runs apart from runners."""
    raise WeftError(Reason.UNSUPPORTED_OPERATION, "only weft up lists models to pull; here: weft load SOURCE")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminPorts:
    """Ports of the endpoints under `/v1/admin`; tests script them."""

    operations: OperationsClient
    instances: RunnerDescriptions
    queues: QueueSource
    engine_logs: EngineLogClient
    processes: ProcessesClient
    discovery: DiscoverySource = look_nowhere
    catalog: CatalogSource = no_catalog


Admin = Annotated[AdminPorts, collaborator(AdminPorts)]
Requests = Annotated[RequestClient, collaborator(RequestClient)]
Captures = Annotated[RegistryService, collaborator("captures")]


async def accept_operation(
    request: Request, ports: AdminPorts, action: operation_pb2.OperationAction, authorization: str
) -> Response:
    """Creates an operation; returns 202 with its location. Raises as `create_operation`."""
    key = idempotency_key(request)
    operation = await create_operation(
        request,
        ports.operations,
        action,
        keyless=keyless_name(request),
        request_id=require_request_id(key, "Idempotency-Key") if key else "",
        authorization=authorization,
    )
    response = json_response(document_of(operation), 202)
    response.headers["location"] = f"/v1/admin/{operation.name}"
    return response


def _requester(request: Request) -> str:
    return requester(request, keyless_name(request))


SURFACE = "admin"
MAX_LEASE_ID_CHARS = 128
MAX_PAGE_SIZE = 1000
MAX_SEQUENCE = 999_999_999
PAGE_PARAMETERS = ("pageSize", "pageToken", "unfinished")
AUDIT_PARAMETERS = ("after", "pageSize")


async def list_operations(ports: Admin, request: Request) -> Response:
    """Lists operations, newest first."""
    query = begin_read(request, SURFACE, PAGE_PARAMETERS)
    wanted = pb.ListOperationsRequest(
        page_size=query.count("pageSize", MAX_PAGE_SIZE),
        page_token=query.text("pageToken"),
        unfinished_only=query.flag("unfinished"),
    )
    return json_response(document_of(await ports.operations.list_page(wanted)))


async def get_operation(deps: Gateway, ports: Admin, request: Request) -> Response:
    """Returns one operation; with `watch=1`, streams it as server-sent events until it ends."""
    query = begin_read(request, SURFACE, ("watch",))
    name = _name_of(request)
    if query.flag("watch"):
        return EventStream(deps, encoded_records(ports.operations.watch(name)))
    return json_response(document_of(await ports.operations.get(name)))


async def cancel_operation(ports: Admin, request: Request) -> Response:
    """Requests the cancellation of an operation. Models that it has loaded are unloaded."""
    begin_change(request, SURFACE)
    cancelled = await ports.operations.cancel(_name_of(request), _requester(request))
    return json_response(document_of(cancelled))


async def release_lease(ports: Admin, request: Request) -> Response:
    """Releases a program's lease, and notifies the program. The lease of a runner is refused; unload its model."""
    begin_change(request, SURFACE)
    lease_id = require_token(request.path_params["id"], "id", MAX_LEASE_ID_CHARS)
    return json_response(document_of(await ports.operations.release_lease(lease_id, _requester(request))))


async def get_audit(ports: Admin, request: Request) -> Response:
    """Returns entries of the audit log, oldest first, and the hash of the newest entry."""
    query = begin_read(request, SURFACE, AUDIT_PARAMETERS)
    after, size = query.count("after", MAX_SEQUENCE, least=0), query.count("pageSize", MAX_PAGE_SIZE)
    page = await ports.operations.audit(pb.ListAuditEntriesRequest(after_sequence=after, page_size=size))
    return json_response(document_of(page))


def _name_of(request: Request) -> str:
    return f"{OPERATION_PREFIX}{require_token(request.path_params['name'], 'name', MAX_NAME_CHARS)}"


REQUESTS_SURFACE = "requests"

REQUEST_PARAMETERS = ("allTenants",)
REQUEST_LIST_PARAMETERS = ("limit", "state", *REQUEST_PARAMETERS)
_OUTCOMES = {word: number for number, word in enum_words(RequestSelection.DESCRIPTOR).items()}


def _request_field(field: str) -> str:
    return "id" if field == "request_id" else field


async def get_request(requests: Requests, request: Request) -> Response:
    """Returns one request of the caller's tenant: state, scheduling decisions with their reasons, and receipt."""
    query = begin_read(request, REQUESTS_SURFACE, REQUEST_PARAMETERS)
    request_id = require_token(request.path_params["id"], "id", MAX_REQUEST_ID_CHARS)
    with renaming_fields(_request_field):
        record = await requests.request(request_id, _tenant_of_one(request, query))
    return json_response(document_of(shown_to(facts_of(request.scope).principal, record)))


async def cancel_request(requests: Requests, request: Request) -> Response:
    """Cancels a running request of the caller's tenant, and returns its final state."""
    query = begin_change(request, REQUESTS_SURFACE, REQUEST_PARAMETERS)
    request_id = require_token(request.path_params["id"], "id", MAX_REQUEST_ID_CHARS)
    with renaming_fields(_request_field):
        record = await requests.cancel(request_id, _tenant_of_one(request, query), _requester(request))
    return json_response(document_of(shown_to(facts_of(request.scope).principal, record)))


async def get_capture(captures: Captures, request: Request) -> Response:
    """Returns the captured prompt and answer of a request of the caller's tenant; the audit log gets the reader."""
    query = begin_change(request, REQUESTS_SURFACE, REQUEST_PARAMETERS)
    wanted = GetCaptureRequest(
        request_id=require_token(request.path_params["id"], "id", MAX_REQUEST_ID_CHARS),
        tenant=_tenant_of_one(request, query),
        requested_by=_requester(request),
    )
    with renaming_fields(_request_field):
        found = await captures.GetCapture(wanted)
    response = json_response(document_of(found.capture))
    response.headers["cache-control"] = "no-store"
    return response


async def list_requests(requests: Requests, request: Request) -> Response:
    """Lists requests of the caller's tenant: running ones, oldest first, or with `state` ended ones, newest first."""
    query = begin_read(request, REQUESTS_SURFACE, REQUEST_LIST_PARAMETERS)
    limit = query.count("limit", MAX_LISTED) or DEFAULT_LISTED
    listed = await requests.requests(limit, _tenant_of(request, query), _selection(query))
    return json_response(document_of(listed))


def _tenant_of(request: Request, query: Query) -> str:
    """Returns the caller's tenant; empty: any, if the caller asks for all and may name other tenants."""
    is_of_all = query.flag("allTenants") and facts_of(request.scope).principal.names_tenants
    return "" if is_of_all else tenant_of(request.scope)


def _tenant_of_one(request: Request, query: Query) -> str:
    """Returns the tenant of a request named by its id: any, if the caller may name tenants and names none."""
    is_named = "x-tenant-id" in request.headers
    may_be_any = facts_of(request.scope).principal.names_tenants and not is_named
    return "" if may_be_any else _tenant_of(request, query)


def _selection(query: Query) -> Selection:
    if "state" not in query:
        return UNDER_WAY
    found = _OUTCOMES.get(query.text("state"))
    if found is None:
        raise invalid_field("state", f"must be one of {', '.join(_OUTCOMES)}; without it, running requests are listed")
    return cast("Selection", found)


async def list_clients(requests: Requests, request: Request) -> Response:
    """Lists recently seen clients with their request patterns and cooldowns."""
    begin_change(request, REQUESTS_SURFACE)
    return json_response(document_of(await requests.clients()))


LIMIT_PARAMETERS = ("tenant",)


async def list_limit_uses(requests: Requests, request: Request) -> Response:
    """Lists the use of rate limits, of one tenant or of all, as counted by the router."""
    query = begin_read(request, SURFACE, LIMIT_PARAMETERS)
    return json_response(document_of(await requests.limit_uses(query.text("tenant"))))


FIGURES_PARAMETERS = ("day",)


async def get_figures(requests: Requests, request: Request) -> Response:
    """Returns figures in steps: requests, tokens, latencies, queues and devices of all tenants.

    They are of the last hour; with `day`, of the last day.
    """
    query = begin_read(request, SURFACE, FIGURES_PARAMETERS)
    return json_response(document_of(await requests.figures(day=query.flag("day"))))
