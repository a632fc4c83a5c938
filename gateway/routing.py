"""The ASGI application of a table of endpoints: FastAPI as the router, with a shortcut past it for fixed paths.

Bodies are read and parsed by `gateway.intake`, and the OpenAPI document is fed from the table; why FastAPI does neither
is in `docs/decisions/0026-endpoint-table.md`.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from gateway.openapi import OperationDoc, add_schemas
from weft.kernel.principal import Access

DepsT = TypeVar("DepsT")
BoundHandler = Callable[[Request], Awaitable[Response]]
RouteTable = dict[tuple[str, str], BoundHandler]
"""Handlers by method and path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[DepsT]):
    """One method of one path: a row of `gateway.endpoints`."""

    method: str
    path: str
    access: Access | None
    """What the caller's key must allow; None: callers need no key."""
    handler: Callable[[DepsT, Request], Awaitable[Response]]
    doc: OperationDoc = field(default_factory=OperationDoc)
    status: int | None = None
    """The status of success in the OpenAPI document; None: 200."""
    response_class: type[Response] = JSONResponse
    """What the OpenAPI document says of the answer, where `doc` says nothing."""
    with_head: bool = False
    """Whether HEAD is answered like this GET; the OpenAPI document leaves it out."""
    name: str = ""
    """For the operation id and the summary of the OpenAPI document; empty: the handler's name."""
    summary: str | None = None
    """None: made from the name."""
    operation_id: str | None = None
    """None: made from name and path."""
    in_schema: bool = True
    """Whether the OpenAPI document has it."""

    @property
    def methods(self) -> tuple[str, ...]:
        """Every method that is answered."""
        return (self.method, "HEAD") if self.with_head else (self.method,)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointGroup(Generic[DepsT]):
    """Endpoints whose handlers share their collaborators."""

    tag: str
    """In the OpenAPI document."""
    endpoints: tuple[Endpoint[DepsT], ...]


class StaticRoutes:
    """Calls the handler of a fixed path itself; every request that comes here has one."""

    def __init__(self, table: RouteTable) -> None:
        """`table` may be filled later."""
        self._table = table

    def has(self, scope: Scope) -> bool:
        """Whether this is a request for one of the paths."""
        return scope["type"] == "http" and (scope["method"], scope["path"]) in self._table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        handler = self._table[scope["method"], scope["path"]]
        response = await handler(Request(scope, receive))
        await response(scope, receive, send)


class EndpointApp(FastAPI):
    """FastAPI over endpoints of the table. Requests for fixed paths go past its router and its middleware stack.

    Measured: the router walks over all routes for each request, which was a tenth of the CPU time of a chat request in
    the gateway; FastAPI's own layers, which only pass on what ours lets through, cost each stream 1 KB.
    """

    def __init__(
        self, layer: Callable[[ASGIApp], ASGIApp], *, schemas: Sequence[type[BaseModel]] = (), **options: Any
    ) -> None:
        """`layer` is put around the static routes; the builder of the application adds it as a middleware, too.

        `schemas` are published in the OpenAPI document.
        """
        # The document is an endpoint of the table.
        super().__init__(**options, openapi_url=None)
        self._schemas = schemas
        self._document_lock = asyncio.Lock()
        self.static_routes: RouteTable = {}
        """Handlers of the fixed paths."""
        self._static = StaticRoutes(self.static_routes)
        self._shortcut = layer(self._static)

    def add_group(self, group: EndpointGroup[DepsT], deps: DepsT) -> None:
        """Serve the endpoints of a group with these collaborators."""
        for endpoint in group.endpoints:
            handler: BoundHandler = partial(endpoint.handler, deps)
            for method in endpoint.methods:
                self._add_route(endpoint, method, handler, group.tag)
            if "{" not in endpoint.path:
                self.static_routes.update({(method, endpoint.path): handler for method in endpoint.methods})

    def _add_route(self, endpoint: Endpoint[Any], method: str, handler: BoundHandler, tag: str) -> None:
        name = endpoint.name or _name_of(endpoint.handler)
        self.add_api_route(
            endpoint.path,
            handler,
            methods=[method],
            tags=[tag],
            name=name,
            summary=endpoint.summary,
            description=_description_of(endpoint.handler),
            operation_id=endpoint.operation_id,
            status_code=endpoint.status,
            response_class=endpoint.response_class,
            include_in_schema=endpoint.in_schema and method == endpoint.method,
            openapi_extra=endpoint.doc.extra or None,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._static.has(scope):
            scope["app"] = self
            await self._shortcut(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    @override
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            add_schemas(document, self._schemas)
        return super().openapi()

    async def document(self) -> dict[str, Any]:
        """The OpenAPI document. It is made for the first caller, in a thread: that takes about 85 ms."""
        async with self._document_lock:
            return await asyncio.to_thread(self.openapi)


async def get_openapi(app: EndpointApp, _request: Request) -> Response:
    """The OpenAPI document."""
    return JSONResponse(await app.document())


def _inner(handler: Callable[..., object]) -> Any:
    return handler.func if isinstance(handler, partial) else handler


def _name_of(handler: Callable[..., object]) -> str:
    name: str = _inner(handler).__name__
    return name


def _description_of(handler: Callable[..., object]) -> str:
    return inspect.cleandoc(_inner(handler).__doc__ or "")
