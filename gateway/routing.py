"""The ASGI application of a table of endpoints.

Bodies are read and parsed by `gateway.intake`, requests are routed here, and FastAPI builds the OpenAPI document;
`docs/decisions/0026-endpoint-table.md` has the reasons.
"""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from gateway.errors import EdgeError
from gateway.openapi import OperationDoc, Schema, add_schemas
from gateway.request_facts import ROUTE_KEY, facts_of
from weft.kernel.errors import WeftError
from weft.kernel.principal import Access
from weft.kernel.reasons import Reason

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
    """The access that a caller's key needs; None: callers need no key."""
    handler: Callable[[DepsT, Request], Awaitable[Response]]
    doc: OperationDoc = field(default_factory=OperationDoc)
    status: int | None = None
    """The status of success in the OpenAPI document; None: 200."""
    response_class: type[Response] = JSONResponse
    """The class of the answer in the OpenAPI document, where `doc` has none."""
    with_head: bool = False
    """Whether HEAD is answered like this GET; the OpenAPI document leaves it out."""
    name: str = ""
    """For the operation id and the summary of the OpenAPI document; empty: the handler's name."""
    summary: str | None = None
    """None: derived from the name."""
    operation_id: str | None = None
    """None: derived from name and path."""
    by_name: bool = False
    """Whether a scope that is limited to names suffices: then the handler checks the names that a request is about, or
    leaves out of the answer what the caller may not see."""
    needs_key: bool = False
    """Whether any valid key suffices, with `access` None: the handler requires the scopes that its request needs."""
    in_schema: bool = True
    """Whether it is in the OpenAPI document."""

    @property
    def methods(self) -> tuple[str, ...]:
        """All methods of the endpoint."""
        return (self.method, "HEAD") if self.with_head else (self.method,)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointGroup(Generic[DepsT]):
    """Endpoints whose handlers share their collaborators."""

    tag: str
    """Its tag in the OpenAPI document."""
    endpoints: tuple[Endpoint[DepsT], ...]


def _guarded(handler: BoundHandler, access: Access) -> BoundHandler:
    """Returns a handler that a scope limited to names does not suffice for."""

    async def guarded(request: Request) -> Response:
        facts_of(request.scope).principal.require(access)
        return await handler(request)

    return guarded


class EndpointApp:
    """The ASGI application of endpoints of the table: its routes inside one layer, which answers what they raise.

    Fixed paths are looked up in a dictionary. Measured: a walk over all routes for each request was a tenth of the CPU
    time of a chat request in the gateway.
    """

    def __init__(
        self, layer: Callable[[ASGIApp], ASGIApp], *, title: str, version: str, schemas: Sequence[Schema] = ()
    ) -> None:
        """`title`, `version` and `schemas` are published in the OpenAPI document."""
        self._serve = layer(self._route)
        self._title = title
        self._version = version
        self._schemas = schemas
        self._documented: list[tuple[Endpoint[Any], BoundHandler, str]] = []
        """Endpoints of the OpenAPI document, with their tags."""
        self._document: dict[str, Any] | None = None
        self._document_lock = asyncio.Lock()
        self.static_routes: RouteTable = {}
        """Handlers of the fixed paths."""
        self.routes: list[Route] = []
        """One route per path and method, those of the fixed paths included."""

    def add_group(self, group: EndpointGroup[DepsT], deps: DepsT) -> None:
        """Serve the endpoints of a group with these collaborators."""
        for endpoint in group.endpoints:
            handler: BoundHandler = partial(endpoint.handler, deps)
            documented = handler
            if endpoint.access is not None and not endpoint.by_name:
                handler = _guarded(handler, endpoint.access)
            for method in endpoint.methods:
                route = Route(endpoint.path, handler, methods=[method])
                # Starlette adds HEAD to each GET.
                route.methods = {method}
                self.routes.append(route)
                if "{" not in endpoint.path:
                    self.static_routes[method, endpoint.path] = handler
            if endpoint.in_schema:
                self._documented.append((endpoint, documented, group.tag))

    # Programs know an ASGI application by a coroutine function, so that this only waits.
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._serve(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the handler of a request. Raises NOT_FOUND for an unknown path, METHOD_NOT_ALLOWED for its method."""
        handler = self.static_routes.get((scope["method"], scope["path"]))
        if handler is not None:
            scope[ROUTE_KEY] = scope["path"]
            response = await handler(Request(scope, receive))
            await response(scope, receive, send)
            return
        allowed: set[str] = set()
        for route in self.routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                scope.update(found)
                scope[ROUTE_KEY] = shown_path(route.path)
                await route.handle(scope, receive, send)
                return
            if match is Match.PARTIAL:
                allowed |= route.methods or set()
        if not allowed:
            raise WeftError(Reason.NOT_FOUND, self._unknown_path_words(scope))
        allow = (b"allow", ", ".join(sorted(allowed)).encode())
        message = f"{scope['method']} is not allowed at this path"
        raise EdgeError(405, Reason.METHOD_NOT_ALLOWED, message, headers=(allow,))

    def _unknown_path_words(self, scope: Scope) -> str:
        """Returns the message for an unknown path; it names the endpoint that a wrong base URL has missed."""
        for path in possible_paths(scope["path"]):
            named = {**scope, "path": path, "root_path": ""}
            found = {route.path: route.matches(named)[0] for route in self.routes}
            meant = max(found, key=lambda each: found[each].value, default="")
            if meant and found[meant] is not Match.NONE:
                return f"no endpoint has this path; did you mean {shown_path(meant)}? Check the client's base URL"
        return f"no endpoint has this path; {OPENAPI} lists those that exist"

    def openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI document; the first call builds it."""
        if self._document is None:
            self._document = self._make_document()
        return self._document

    def _make_document(self) -> dict[str, Any]:
        # Only this document needs FastAPI, whose import takes 0.2 s of CPU time and 15 MB.
        from fastapi import FastAPI  # noqa: PLC0415

        # Its telemetry would send URLs to the address in an environment variable.
        silent = {"auto_configure": False, "tracing": False, "metrics": False, "logs": False}
        app = FastAPI(title=self._title, version=self._version, telemetry=silent)  # type: ignore[arg-type]
        for endpoint, handler, tag in self._documented:
            inner: Any = endpoint.handler.func if isinstance(endpoint.handler, partial) else endpoint.handler
            app.add_api_route(
                endpoint.path,
                handler,
                methods=[endpoint.method],
                tags=[tag],
                name=endpoint.name or inner.__name__,
                summary=endpoint.summary,
                description=inspect.cleandoc(inner.__doc__ or ""),
                operation_id=endpoint.operation_id,
                status_code=endpoint.status,
                response_class=endpoint.response_class,
                openapi_extra=endpoint.doc.extra or None,
            )
        document = app.openapi()
        add_schemas(document, self._schemas)
        return document

    async def document(self) -> dict[str, Any]:
        """Returns the OpenAPI document. The first call builds it in a thread, which takes about 0.3 s."""
        async with self._document_lock:
            return await asyncio.to_thread(self.openapi)


_MAX_SEGMENTS = 12
"""Paths of more segments than any endpoint and base URL have together are not searched."""
_PREFIXES = ("", "/v1", "/api")
"""What clients append to a base URL, or expect in it."""


class _NameConvertor(Convertor[str]):
    """The type `name` of a parameter in a path: the name of a model, which may have slashes."""

    regex = "[^/]+(?:/[^/]+)*"

    @override
    def convert(self, value: str) -> str:
        return value

    @override
    def to_string(self, value: str) -> str:
        return value


register_url_convertor("name", _NameConvertor())
_PARAMETER_TYPE = re.compile(r":[a-z]+\}")


def shown_path(path: str) -> str:
    """Returns the path of an endpoint for people: parameters without their types."""
    return _PARAMETER_TYPE.sub("}", path)


def possible_paths(path: str) -> list[str]:
    """Returns the paths that a client may have meant, the likeliest first.

    A base URL may have a prefix too many (`/v1/v1/models`) or too few (`/models`), and slashes too many.
    """
    segments = [segment for segment in path.split("/") if segment]
    if len(segments) > _MAX_SEGMENTS:
        return []
    ends = ["/" + "/".join(segments[start:]) for start in range(len(segments))]
    return [prefix + end for end in ends for prefix in _PREFIXES]


OPENAPI = "/openapi.json"
"""Path of the OpenAPI document."""
_DOCS = f"The description of this API is the OpenAPI document at {OPENAPI}; its pages are in the folder docs of weft.\n"


async def get_openapi(app: EndpointApp, _request: Request) -> Response:
    """Returns the OpenAPI document."""
    return JSONResponse(await app.document())


async def get_docs(_app: EndpointApp, _request: Request) -> Response:
    """Leads to the OpenAPI document, which has no page: its scripts would come from elsewhere."""
    return PlainTextResponse(_DOCS, status_code=307, headers={"location": OPENAPI})
