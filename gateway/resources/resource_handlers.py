"""/api/v1: list, get, apply and delete resources; events; settings of the mesh."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.sse_writer import EventStream, encoded_events
from gateway.answers.unary import json_response
from gateway.deps import Gateway, GatewayDeps
from gateway.intake.body import read_json_or_yaml_body, read_model
from gateway.intake.headers import require_local_caller
from gateway.intake.json_guard import parse, parse_json
from gateway.intake.query import Query, begin_read
from gateway.operation_client import keyless_name, requester
from gateway.registry_client import Author
from gateway.request_facts import facts_of
from gateway.resources.documents import ApplyRequest, MeshConfig, applied_body, members_body, page_body
from weft.api.registry.v1.declaration_service_pb2 import ApplyResult
from weft.api.registry.v1.registry_service_pb2 import ListEventsRequest, WatchEventsRequest
from weft.api.registry.v1.settings_pb2 import MeshSettings
from weft.dispatch.agents import name_asked_for, named
from weft.documents.codec import document_of, word_of
from weft.documents.kinds import DECLARED_KINDS, KINDS
from weft.documents.resource_kinds import ResourceKind, parse_kind
from weft.documents.resources import AnyDocument, PoolDocument, declared_document, plain, pool_document, to_declaration
from weft.documents.rights import require_declarable, require_deletable, stands_for, visible_pool
from weft.documents.selectors import parse_selector
from weft.documents.yaml_documents import SourcedDocument, parse_document, read_documents, refuse_repeats
from weft.kernel.access.principal import EDIT_MODELS, VIEW_MODELS, Principal, Resource
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field, renaming_fields
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import journal_mode_of
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.names import require_name_of_model

API = "/api/v1"
SURFACE = "api"
MAX_PAGE_SIZE = 1000

PAGE_PARAMETERS = ("pageSize", "pageToken")
DELETE_PARAMETERS = ("force",)

log = get_logger("weft.gateway")


def name_of(request: Request) -> str:
    """Returns the name in the path. Raises INVALID_ARGUMENT for an invalid one."""
    return require_name_of_model(request.path_params["name"], "name")


def known_name_of(request: Request, deps: GatewayDeps) -> str:
    """Returns the name in the path, with an id resolved. Raises INVALID_ARGUMENT for an invalid one."""
    return name_asked_for(named(deps.fleet.view, name_of(request)))


async def list_resources(kind: ResourceKind, deps: Gateway, request: Request) -> Response:
    """Lists resources, sorted by name, in pages."""
    query = begin_read(request, SURFACE, list_parameters(kind))
    size, token, labels = query.count("pageSize", MAX_PAGE_SIZE), query.text("pageToken"), query.text("labels")
    parse_selector(labels, "labels")
    if KINDS[kind].resource is not Resource.MODELS:
        return json_response(page_body(kind, await deps.registry.list_page(kind, size, token)))
    principal = facts_of(request.scope).principal
    principal.require_some(VIEW_MODELS)
    page = await deps.registry.list_page(kind, size, token, labels, principal.names_for(VIEW_MODELS))
    shown = [_visible(principal, document) for document in page.documents]
    return json_response(page_body(kind, replace(page, documents=shown)))


def _visible(principal: Principal, document: AnyDocument) -> AnyDocument:
    """Returns a document; of a pool, without the members that the caller may not see."""
    if not isinstance(document, PoolDocument) or document.observed is None:
        return document
    return pool_document(visible_pool(principal, document.observed))


def list_parameters(kind: ResourceKind) -> tuple[str, ...]:
    """Returns the parameters of a list of resources."""
    return (*PAGE_PARAMETERS, "labels") if KINDS[kind].has_labels else PAGE_PARAMETERS


async def get_resource(kind: ResourceKind, deps: Gateway, request: Request) -> Response:
    """Returns one resource."""
    begin_read(request, SURFACE)
    name, principal = known_name_of(request, deps), facts_of(request.scope).principal
    if KINDS[kind].resource is Resource.MODELS:
        principal.require_name(VIEW_MODELS, name)
    return json_response(plain(_visible(principal, await deps.registry.get(kind, name))))


async def get_members(deps: Gateway, request: Request) -> Response:
    """Returns the pool of a model with the documents of its members."""
    begin_read(request, SURFACE)
    name, principal = known_name_of(request, deps), facts_of(request.scope).principal
    principal.require_name(VIEW_MODELS, name)
    pool, members = await deps.registry.members(name)
    shown = [member for member in members if principal.may_name(VIEW_MODELS, member.name)]
    return json_response(members_body(visible_pool(principal, pool), shown))


async def delete_resource(kind: ResourceKind, deps: Gateway, request: Request) -> Response:
    """Deletes a resource of any owner. A live runner publishes its resources again in its next session.

    If a live runner has loaded the model, the answer is 409; with `force`, the model is unloaded first.
    """
    facts = facts_of(request.scope)
    facts.surface = SURFACE
    require_local_caller(request.scope)
    force = Query(request.scope, frozenset(DELETE_PARAMETERS)).flag("force")
    name, view = known_name_of(request, deps), deps.fleet.view
    unloads = force or (kind is ResourceKind.MODEL and view.is_added(name))
    require_deletable(facts.principal, kind, name, partial(stands_for, view), unloads=unloads)
    await deps.registry.delete(kind, name, force=force, requested_by=requester(request, keyless_name(request)))
    log.info("resource deleted", request_id=facts.request_id, kind=kind.value, name=name, force=force)
    return Response(status_code=204)


MAX_EVENTS = 1000

EVENT_PARAMETERS = ("kind", "name", "limit", "watch")


async def get_events(deps: Gateway, request: Request) -> Response:
    """Returns the newest events, oldest first; with `watch=1`, streams new events as server-sent events."""
    query = begin_read(request, SURFACE, EVENT_PARAMETERS)
    wanted = _events_of(query)
    wanted.name = name_asked_for(named(deps.fleet.view, wanted.name))
    if query.flag("watch"):
        if wanted.limit:
            raise invalid_field("limit", "is not allowed with a watch, which has no end")
        return EventStream(
            deps, encoded_events(deps.registry.watch_events(WatchEventsRequest(kind=wanted.kind, name=wanted.name)))
        )
    return json_response(document_of(await deps.registry.list_events(wanted)))


def _events_of(query: Query) -> ListEventsRequest:
    kind = parse_kind(query.text("kind"), "kind") if "kind" in query else None
    if "name" in query and kind is None:
        raise invalid_field("kind", "is required with name")
    name = require_name_of_model(query.text("name"), "name") if "name" in query else ""
    limit = query.count("limit", MAX_EVENTS)
    return ListEventsRequest(kind=kind or "", name=name, limit=limit)


async def get_config(deps: Gateway, request: Request) -> Response:
    """Returns the settings of the mesh."""
    begin_read(request, SURFACE)
    return json_response(_body(await deps.registry.settings()))


async def put_config(deps: Gateway, request: Request) -> Response:
    """Changes the settings of the mesh. Answers once they are stored; routers are notified immediately."""
    facts = facts_of(request.scope)
    facts.surface = SURFACE
    require_local_caller(request.scope)
    Query(request.scope)
    wanted = await read_model(request, MeshConfig, deps.config)
    changes = MeshSettings(
        allow_cloud_fallback=wanted.allow_cloud_fallback,
        journal=journal_mode_of(wanted.journal).value,  # type: ignore[arg-type]  # same numbers
    )
    settings = await deps.registry.update_settings(changes)
    log.info("settings changed", request_id=facts.request_id, allow_cloud_fallback=settings.allow_cloud_fallback)
    return json_response(_body(settings))


def _body(settings: MeshSettings) -> dict[str, object]:
    body: dict[str, object] = {"allowCloudFallback": settings.allow_cloud_fallback}
    return body | {"journal": word_of(settings, "journal")} if settings.journal else body


APPLY_PARAMETERS = ("dryRun", "adopt")


async def apply_resources(deps: Gateway, request: Request) -> Response:
    """Brings resources to their declared state. If one is refused, none is changed."""
    raw, is_yaml = await _body_of(request, deps)
    if is_yaml:
        query = Query(request.scope, frozenset(APPLY_PARAMETERS))
        dry_run, adopt, expected = query.flag("dryRun"), query.flag("adopt"), list[AnyDocument]()
        # In a thread, since a large file takes seconds.
        documents = await asyncio.to_thread(documents_of_yaml, raw)
    else:
        Query(request.scope)
        params = parse(ApplyRequest, raw, max_depth=deps.config.limits.max_json_depth)
        dry_run, adopt, documents = params.dry_run, params.adopt, documents_of_json(params.documents)
        expected = documents_of_json(params.expected, "expected")
    results = await _apply(request, deps, documents, dry_run=dry_run, adopt=adopt, expected=expected)
    return json_response(applied_body(results, dry_run=dry_run))


async def put_resource(kind: ResourceKind, deps: Gateway, request: Request) -> Response:
    """Creates or updates one resource. Answers 201 if it did not exist."""
    raw, is_yaml = await _body_of(request, deps)
    query = Query(request.scope, frozenset(APPLY_PARAMETERS))
    dry_run, adopt, name = query.flag("dryRun"), query.flag("adopt"), name_of(request)
    if is_yaml:
        document = the_only_document(await asyncio.to_thread(documents_of_yaml, raw), kind)
    else:
        document = parse_document(parse_json(raw, max_depth=deps.config.limits.max_json_depth), kind)
    if document.name != name:
        raise invalid_field("name", f"must be {name}, as in the path")
    with renaming_fields(lambda field: field.removeprefix("documents[0].")):
        results = await _apply(request, deps, [document], dry_run=dry_run, adopt=adopt)
    is_new = not dry_run and any(result.outcome == ApplyResult.OUTCOME_CREATED for result in results)
    return json_response(applied_body(results, dry_run=dry_run), 201 if is_new else 200)


async def _body_of(request: Request, deps: GatewayDeps) -> tuple[bytes, bool]:
    facts_of(request.scope).surface = SURFACE
    require_local_caller(request.scope)
    return await read_json_or_yaml_body(request.scope, request.receive, deps.config)


async def _apply(
    request: Request,
    deps: GatewayDeps,
    documents: Sequence[AnyDocument],
    *,
    dry_run: bool,
    adopt: bool,
    expected: Sequence[AnyDocument] = (),
) -> Sequence[ApplyResult]:
    principal = facts_of(request.scope).principal
    wanted = [_with_named_targets(deps, each) for each in documents]
    # The registry sees only the gateway's own key.
    require_declarable(principal, wanted, partial(stands_for, deps.fleet.view))
    results = await deps.registry.apply(
        documents, dry_run=dry_run, adopt=adopt, author=author_of(request), expected=expected
    )
    changed = [f"{result.kind}/{result.name}" for result in results if result.outcome != ApplyResult.OUTCOME_UNCHANGED]
    if changed and not dry_run:
        request_id = facts_of(request.scope).request_id
        log.info("resources applied", request_id=request_id, count=len(changed), first=changed[0])
    return results


def _with_named_targets(deps: GatewayDeps, document: AnyDocument) -> AnyDocument:
    """Returns a copy of a document that refers to names instead of ids."""
    found = declared_document(to_declaration(document))
    if found.kind in DECLARED_KINDS:
        DECLARED_KINDS[found.kind].rename_references(found.manifest, partial(named, deps.fleet.view))
    return found


def author_of(request: Request) -> Author:
    """Returns the author of declarations: the key of the request; callers without one own nothing."""
    principal = facts_of(request.scope).principal
    name = "" if principal.names_tenants else principal.name
    return Author(name=name, own_only=not principal.may(EDIT_MODELS))


_SOURCE = "body"


def documents_of_json(values: Sequence[Any], name: str = "documents") -> list[AnyDocument]:
    """Returns the documents of an apply request. Raises INVALID_ARGUMENT naming `documents[<index>]` and the field."""
    found = []
    for index, value in enumerate(values):
        where = f"{name}[{index}]"
        try:
            found.append(SourcedDocument(document=parse_document(value), where=where))
        except FieldError as error:
            field = where if error.field == "document" else f"{where}.{error.field}"
            raise invalid_field(field, error.message.removeprefix(f"{error.field}: ")) from None
    try:
        return _distinct(tuple(found))
    except FieldError as error:
        raise invalid_field(error.field.replace(": ", "."), error.message.removeprefix(f"{error.field}: ")) from None


def documents_of_yaml(raw: bytes) -> list[AnyDocument]:
    """Returns the documents of a YAML stream. Raises as `read_documents`, and MALFORMED_REQUEST if there is none."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise WeftError(Reason.MALFORMED_REQUEST, "the body is not valid UTF-8") from None
    documents = _distinct(read_documents(text, _SOURCE))
    if not documents:
        raise WeftError(Reason.MALFORMED_REQUEST, "the body has no document")
    return documents


def the_only_document(documents: Sequence[AnyDocument], kind: ResourceKind) -> AnyDocument:
    """Returns the document of a body that must contain exactly one. Raises MALFORMED_REQUEST or INVALID_ARGUMENT."""
    if len(documents) != 1:
        raise WeftError(Reason.MALFORMED_REQUEST, f"the body has {len(documents)} documents; one is expected")
    if documents[0].kind is not kind:
        raise invalid_field("kind", f"must be {kind.value} here")
    return documents[0]


def _distinct(documents: tuple[SourcedDocument, ...]) -> list[AnyDocument]:
    refuse_repeats(documents)
    return [sourced.document for sourced in documents]
