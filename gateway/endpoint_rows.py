"""Rows of a table of endpoints, by their method; see `gateway.endpoints` and `gateway.runner_api.endpoints`."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.openapi import OperationDoc
from gateway.routing import DepsT, Endpoint
from weft.kernel.principal import USE_MODELS, Access

Handler = Callable[[DepsT, Request], Awaitable[Response]]
_NOTHING_MORE = OperationDoc()


def get_row(
    path: str, access: Access | None, handler: Handler[DepsT], doc: OperationDoc = _NOTHING_MORE, **fields: Any
) -> Endpoint[DepsT]:
    """Returns the row of a GET."""
    return Endpoint(method="GET", path=path, access=access, handler=handler, doc=doc, **fields)


def post_row(path: str, access: Access, handler: Handler[DepsT], doc: OperationDoc, **fields: Any) -> Endpoint[DepsT]:
    """Returns the row of a POST."""
    # `gateway.intake.headers.request_context` checks the name of each request to a model; an upload is about none.
    fields.setdefault("by_name", access == USE_MODELS)
    return Endpoint(method="POST", path=path, access=access, handler=handler, doc=doc, **fields)


def put_row(path: str, access: Access, handler: Handler[DepsT], doc: OperationDoc, **fields: Any) -> Endpoint[DepsT]:
    """Returns the row of a PUT."""
    return Endpoint(method="PUT", path=path, access=access, handler=handler, doc=doc, **fields)


def delete_row(
    path: str, access: Access, handler: Handler[DepsT], doc: OperationDoc = _NOTHING_MORE, **fields: Any
) -> Endpoint[DepsT]:
    """Returns the row of a DELETE."""
    return Endpoint(method="DELETE", path=path, access=access, handler=handler, doc=doc, **fields)
