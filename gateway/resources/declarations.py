"""POST /api/v1/apply, and PUT of one model, agent or route."""

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import json_response
from gateway.deps import GatewayDeps
from gateway.intake.body import read_json_or_yaml_body
from gateway.intake.headers import require_local_caller
from gateway.intake.json_guard import parse, parse_json
from gateway.intake.query import Query
from gateway.ports import AppliedResource
from gateway.request_facts import facts_of
from gateway.resources.documents import ApplyRequest, applied_body
from gateway.resources.handlers import SURFACE, name_of
from weft.documents.document_base import ResourceKind
from weft.documents.documents import Document
from weft.documents.files import SourcedDocument, parse_document, read_documents, refuse_repeats
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.reasons import Reason

APPLY_PARAMETERS = ("dryRun", "adopt")
_PUTTABLE = (ResourceKind.MODEL, ResourceKind.AGENT, ResourceKind.ROUTE)

log = structlog.get_logger("weft.gateway")


async def apply_resources(deps: GatewayDeps, request: Request) -> Response:
    """Bring resources to their declared state: all of them, or none when any is refused."""
    raw, is_yaml = await _body_of(request, deps)
    if is_yaml:
        query = Query(request.scope, frozenset(APPLY_PARAMETERS))
        dry_run, adopt = query.flag("dryRun"), query.flag("adopt")
        # In a thread: a large file takes seconds.
        documents = await asyncio.to_thread(documents_of_yaml, raw)
    else:
        Query(request.scope)
        params = parse(ApplyRequest, raw, max_depth=deps.config.limits.max_json_depth)
        dry_run, adopt, documents = params.dry_run, params.adopt, documents_of_json(params.documents)
    results = await _apply(request, deps, documents, dry_run=dry_run, adopt=adopt)
    return json_response(applied_body(results, dry_run=dry_run))


async def put_resource(kind: ResourceKind, deps: GatewayDeps, request: Request) -> Response:
    """Bring one resource to its declared state; 201 when it did not exist."""
    raw, is_yaml = await _body_of(request, deps)
    query = Query(request.scope, frozenset(APPLY_PARAMETERS))
    dry_run, adopt, name = query.flag("dryRun"), query.flag("adopt"), name_of(request)
    if is_yaml:
        document = the_only_document(await asyncio.to_thread(documents_of_yaml, raw), kind)
    else:
        document = parse_document(parse_json(raw, max_depth=deps.config.limits.max_json_depth), kind)
    if document.name != name:
        raise invalid_field("name", f"must be {name}, as in the path")
    results = await _apply(request, deps, [document], dry_run=dry_run, adopt=adopt)
    is_new = not dry_run and any(result.outcome == "created" for result in results)
    return json_response(applied_body(results, dry_run=dry_run), 201 if is_new else 200)


async def _body_of(request: Request, deps: GatewayDeps) -> tuple[bytes, bool]:
    facts_of(request.scope).surface = SURFACE
    require_local_caller(request.scope)
    return await read_json_or_yaml_body(request.scope, request.receive, deps.config)


async def _apply(
    request: Request, deps: GatewayDeps, documents: Sequence[Document], *, dry_run: bool, adopt: bool
) -> Sequence[AppliedResource]:
    results = await deps.registry.apply(documents, dry_run=dry_run, adopt=adopt)
    changed = [f"{result.kind}/{result.name}" for result in results if result.outcome != "unchanged"]
    if changed and not dry_run:
        request_id = facts_of(request.scope).request_id
        log.info("resources applied", request_id=request_id, count=len(changed), first=changed[0])
    return results


_SOURCE = "body"


def documents_of_json(values: Sequence[Any]) -> list[Document]:
    """The documents of an apply request. Raises INVALID_ARGUMENT naming `documents[<index>]` and the field in it."""
    found = []
    for index, value in enumerate(values):
        where = f"documents[{index}]"
        try:
            found.append(SourcedDocument(document=parse_document(value), where=where))
        except FieldError as error:
            field = where if error.field == "document" else f"{where}.{error.field}"
            raise invalid_field(field, error.message.removeprefix(f"{error.field}: ")) from None
    try:
        return _distinct(tuple(found))
    except FieldError as error:
        raise invalid_field(error.field.replace(": ", "."), error.message.removeprefix(f"{error.field}: ")) from None


def documents_of_yaml(raw: bytes) -> list[Document]:
    """Returns the documents of a YAML stream. Raises as `read_documents`, and MALFORMED_REQUEST when there is none."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise WeftError(Reason.MALFORMED_REQUEST, "the body is not valid UTF-8") from None
    documents = _distinct(read_documents(text, _SOURCE))
    if not documents:
        raise WeftError(Reason.MALFORMED_REQUEST, "the body has no document")
    return documents


def the_only_document(documents: Sequence[Document], kind: ResourceKind) -> Document:
    """Returns the document of a body that must contain exactly one. Raises MALFORMED_REQUEST or INVALID_ARGUMENT."""
    if len(documents) != 1:
        raise WeftError(Reason.MALFORMED_REQUEST, f"the body has {len(documents)} documents; one is expected")
    if documents[0].kind != kind.value:
        raise invalid_field("kind", f"must be {kind.value} here")
    return documents[0]


def _distinct(documents: tuple[SourcedDocument, ...]) -> list[Document]:
    refuse_repeats(documents)
    return [sourced.document for sourced in documents]
