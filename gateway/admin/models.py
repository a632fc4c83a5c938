"""GET /v1/admin/models, loads and unloads of them, GET /v1/admin/gpu-memory."""

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.models_body import admin_model, model_memory, public_names, runners_of
from gateway.admin.ports import AdminPorts
from gateway.admin.request import AdminDeps, create_operation, empty_body_or
from gateway.admin.schemas import AdminModelDocument, AdminModelList, FlushBody, GpuMemoryAnswer, LoadBody, UnloadBody
from gateway.answers.unary import json_response
from gateway.intake.query import Query
from gateway.request_facts import facts_of
from gateway.resources.handlers import name_of
from weft.dispatch.fleet import ModelView
from weft.dispatch.placement import PoolQueue
from weft.documents.document_base import DocumentPart
from weft.documents.operation_documents import LoadSettings
from weft.documents.operation_messages import flush_action, load_action, unload_action
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

ADMIN = "/v1/admin"
SURFACE = "admin"
_MODEL = f"{ADMIN}/models/{{name}}"


async def list_admin_models(deps: AdminDeps, request: Request) -> Response:
    """Every model that can be asked for by name: definition, state, queue, replicas, capabilities, constraints."""
    _begin(request)
    names = public_names(deps.gateway.fleet.view)
    items = tuple(await _documents(deps, names))
    return json_response(plain(AdminModelList(kind="AdminModelList", items=items)))


async def get_admin_model(deps: AdminDeps, request: Request) -> Response:
    """One of them, by the name of the pool or of any of its members."""
    _begin(request)
    name = name_of(request)
    view = deps.gateway.fleet.view
    found = view.pool_members(name)
    if not found:
        raise WeftError(Reason.MODEL_NOT_FOUND, "no model or pool of this name is known")
    (document,) = await _documents(deps, {found[0].pool: sorted(found, key=lambda one: one.name)})
    return json_response(plain(document))


async def get_gpu_memory(deps: AdminDeps, request: Request) -> Response:
    """Accelerator memory of every host with its leases, and what each model takes of it or would take."""
    facts_of(request.scope).surface = SURFACE
    query = Query(request.scope, frozenset({"host"}))
    hosts = await deps.ports.operations.host_memory(query.text("host"))
    models = [one for one in model_memory(deps.gateway.fleet.view) if query.text("host") in ("", one.host)]
    return json_response(plain(GpuMemoryAnswer(kind="GpuMemory", hosts=tuple(hosts), models=tuple(models))))


async def load_model(deps: AdminDeps, request: Request) -> Response:
    """Load a model, or load it again with other settings: 202 with the operation that does it."""
    body = await empty_body_or(request, deps.gateway, LoadBody, SURFACE)
    settings = LoadSettings.model_construct(**{name: getattr(body, name) for name in LoadSettings.model_fields})
    action = load_action(name_of(request), settings, evict_model=body.evict_model or "", replicas=body.replicas or 0)
    return await create_operation(request, deps.ports, action, body.authorization)


async def unload_model(deps: AdminDeps, request: Request) -> Response:
    """Unload a model, or every member of a pool: 202 with the operation that does it."""
    body = await empty_body_or(request, deps.gateway, UnloadBody, SURFACE)
    return await create_operation(request, deps.ports, unload_action(name_of(request)), body.authorization)


async def flush_cache(deps: AdminDeps, request: Request) -> Response:
    """Forget cached prefixes: 202 with the operation that does it."""
    body = await empty_body_or(request, deps.gateway, FlushBody, SURFACE)
    action = flush_action(
        body.scope, model=body.model or "", tenant=body.tenant, tag=body.tag, runner=body.runner or ""
    )
    return await create_operation(request, deps.ports, action, body.authorization)


def _begin(request: Request) -> None:
    facts_of(request.scope).surface = SURFACE
    Query(request.scope)


async def _documents(deps: AdminDeps, names: dict[str, list[ModelView]]) -> list[AdminModelDocument]:
    members = [member for found in names.values() for member in found]
    queues, described = await asyncio.gather(_queues(deps.ports), deps.ports.instances.instances(runners_of(members)))
    view = deps.gateway.fleet.view
    return [admin_model(view, name, found, queues, described) for name, found in names.items()]


async def _queues(ports: AdminPorts) -> Sequence[PoolQueue] | None:
    """None while the router cannot be asked: that is no reason to say nothing of the models."""
    try:
        return await ports.queues.queues()
    except WeftError:
        return None


def plain(document: DocumentPart) -> object:
    """A document as JSON types; what is not set is left out."""
    return document.model_dump(mode="json", by_alias=True, exclude_none=True)
