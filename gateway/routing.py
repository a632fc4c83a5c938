"""FastAPI applications of weft's APIs, and routers whose routes declare the access that they need.

`gateway.intake` reads and parses bodies to bound their size, pace and depth: see `gateway/DESIGN.md`.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

from fastapi import APIRouter, Depends, FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from gateway.auth.authentication import Gate
from gateway.errors import EdgeError
from gateway.gateway_config import GatewayConfig
from gateway.http.disconnect import cut_off
from gateway.intake.body import JsonBody
from gateway.openapi import EVENT_STREAM, OperationDoc, Schema, add_schemas, json_body, shown_path, with_path
from gateway.request_facts import facts_of
from weft.extension import has_path
from weft.kernel.access.principal import USE_MODELS, Access
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.errors.removed_features import removed_path
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.cancellation import Interruptible
from weft.kernel.time.deadlines import Deadlines

log = get_logger("weft.gateway")
Handler = Callable[..., Awaitable[Response]]
"""Each of its parameters is the request, or a dependency that needs only the request."""
_Provide = Callable[[Request], Awaitable[Any]]
_NOTHING_MORE = OperationDoc()


@dataclass(frozen=True, slots=True)
class Needs:
    """The access that a route requires, and the dependency that admits its requests."""

    access: Access | None
    """None: no key."""
    by_name: bool = False
    """Whether a scope limited to names suffices. The handler then checks the requested names, or omits from the answer
    what the caller may not see."""
    key: bool = False
    """Whether any valid key suffices, with `access` None: the handler requires the scopes of its request."""

    @property
    def is_open(self) -> bool:
        """Whether callers need no key."""
        return self.access is None and not self.key

    async def __call__(self, request: Request) -> None:
        """Admits the caller. Raises as `Gate.admit`, and PERMISSION_DENIED."""
        if self.is_open:
            return
        principal = facts_of(request.scope).principal = request.scope["app"].gate.admit(request.scope)
        if self.access is not None:
            principal.require_some(self.access)
            if not self.by_name:
                principal.require(self.access)


def collaborator(key: Hashable) -> Any:
    """Returns a dependency on the collaborator that the application has under a class or a name."""

    # FastAPI would run a function that is not a coroutine in a thread.
    async def given(request: Request) -> Any:
        return request.scope["app"].collaborators[key]

    return Depends(given)


class _DirectRoute:
    """A route without path parameters, served without FastAPI's solver, which takes 100 us of CPU time per request."""

    __slots__ = ("_handler", "_needs", "_providers", "_route")

    def __init__(
        self, route: BaseRoute, needs: Needs, handler: Handler, providers: Mapping[str, _Provide | None]
    ) -> None:
        """`providers`: by parameter of the handler; None: the request."""
        self._route = route
        self._needs = needs
        self._handler = handler
        self._providers = tuple(providers.items())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self._route
        request = Request(scope, receive, send)
        await self._needs(request)
        given = {}
        for name, provide in self._providers:
            given[name] = request if provide is None else await provide(request)
        response = await self._handler(**given)
        await response(scope, receive, send)


class ApiRouter(APIRouter):
    """The routes of one API. All documentation of an operation besides path and handler is in its `OperationDoc`."""

    def __init__(self, tag: str, *, error: str = "Error", stream: str = EVENT_STREAM) -> None:
        """`error`: the schema of its failures, `stream`: the media type of its streams."""
        super().__init__(tags=[tag], redirect_slashes=False)
        self._error = error
        self._stream = stream
        self.schemas: list[Schema] = []
        """Schemas that the documentation of its operations references."""
        self.direct: dict[tuple[str, str], ASGIApp] = {}
        """Its routes without path parameters, by method and path."""

    def add_get(
        self, path: str, access: Access | None, handler: Handler, doc: OperationDoc = _NOTHING_MORE, **fields: Any
    ) -> None:
        """Adds a GET."""
        self._add("GET", path, access, handler, doc, **fields)

    def add_post(
        self, path: str, access: Access, handler: Handler, doc: OperationDoc = _NOTHING_MORE, **fields: Any
    ) -> None:
        """Adds a POST."""
        # `gateway.intake.headers.request_context` checks the name of each request to a model; an upload names none.
        fields.setdefault("by_name", access == USE_MODELS)
        self._add("POST", path, access, handler, doc, **fields)

    def add_put(self, path: str, access: Access, handler: Handler, doc: OperationDoc, **fields: Any) -> None:
        """Adds a PUT."""
        self._add("PUT", path, access, handler, doc, **fields)

    def add_delete(
        self, path: str, access: Access, handler: Handler, doc: OperationDoc = _NOTHING_MORE, **fields: Any
    ) -> None:
        """Adds a DELETE."""
        self._add("DELETE", path, access, handler, doc, **fields)

    def _add(  # noqa: PLR0913 - what FastAPI documents of a route
        self,
        method: str,
        path: str,
        access: Access | None,
        handler: Handler,
        doc: OperationDoc,
        *,
        by_name: bool = False,
        needs_key: bool = False,
        with_head: bool = False,
        in_schema: bool = True,
        response_class: type[Response] = JSONResponse,
        **documented: Any,
    ) -> None:
        """`by_name`, `needs_key`: see `Needs`. `with_head`: HEAD is answered like this GET, undocumented."""
        function, needs = handler.func if isinstance(handler, partial) else handler, Needs(access, by_name, needs_key)
        add = partial(
            self.add_api_route,
            path,
            handler,
            dependencies=[Depends(needs)],
            name=documented.pop("name", "") or function.__name__,
            response_class=response_class,
        )
        hints = get_type_hints(function, include_extras=True)
        providers = {name: _provider(hints[name]) for name in inspect.signature(handler).parameters}
        for provide in providers.values():
            if isinstance(provide, JsonBody):
                doc = json_body(provide.schema, error=self._error, stream=self._stream) | doc
        self.schemas += doc.models
        add(
            methods=[method],
            status_code=doc.status,
            description=inspect.cleandoc(function.__doc__ or ""),
            openapi_extra=with_path(doc.extra, path) or None,
            include_in_schema=in_schema,
            **documented,
        )
        if with_head:
            add(methods=["HEAD"], include_in_schema=False)
        if "{" not in path:
            direct = _DirectRoute(self.routes[-1], needs, handler, providers)
            self.direct |= {(each, path): direct for each in (method, "HEAD")[: 1 + with_head]}


def _provider(hint: Any) -> _Provide | None:
    """Returns what provides a handler's parameter of this type; None: it is the request."""
    return None if hint is Request else next(each.dependency for each in hint.__metadata__)


def needs_of(route: APIRoute) -> Needs:
    """Returns the access that a route requires."""
    return next(each.dependency for each in route.dependencies if isinstance(each.dependency, Needs))


def routes_of(routers: Iterable[APIRouter]) -> Iterator[APIRoute]:
    """Yields the routes of routers, one for each path and method."""
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute):
                yield route


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredApi:
    """An API that is imported at its first request."""

    name: str
    paths: tuple[str, ...]
    """Its paths, see `weft.extension.ApiHook`."""
    load: Callable[[], "Callable[[EdgeApp], None]"]
    """Imports it, in any thread, and returns a function that adds it to an application."""

    def has(self, path: str) -> bool:
        """Whether a path is one of this API."""
        return has_path(self.paths, path)


class EdgeApp(FastAPI):
    """An application without routes, with what all of weft's APIs share."""

    def __init__(
        self,
        title: str,
        version: str,
        *,
        gate: Gate,
        config: GatewayConfig,
        edge: Callable[[ASGIApp], Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]],
        routers: Sequence[ApiRouter] = (),
    ) -> None:
        """`edge`: returns the middleware around the routes, which answers errors.

        `routers`: what the API can have. The OpenAPI document has the schemas of these and of those that are served.
        """
        super().__init__(
            title=title,
            version=version,
            openapi_url=None,  # served by a route of weft, which needs a key
            redirect_slashes=False,
            exception_handlers={HTTPException: self._refuse_unrouted},
            # FastAPI's telemetry would send URLs to the address in an environment variable.
            telemetry={"auto_configure": False, "tracing": False, "metrics": False, "logs": False},
        )
        self._edge = edge(self._routed)
        self._routers = routers
        self.served: list[ApiRouter] = []
        """Its routers, in lookup order."""
        self._direct: dict[tuple[str, str], ASGIApp] = {}
        self.off_paths: Mapping[str, str] = {}
        """Why paths of extensions are not served."""
        self._deferred: list[DeferredApi] = []
        self._unusable: list[DeferredApi] = []
        """Those that could not be imported, which is not tried again."""
        self._loading = asyncio.Lock()
        self._document_lock = asyncio.Lock()
        self._document: bytes | None = None
        # Not in `state`, whose attributes each cost a call.
        self.gate = gate
        self.config = config
        self.decoding = asyncio.Lock()
        self.cut_offs = Deadlines[Interruptible](cut_off)
        """Of the requests that are answered."""
        self.collaborators: dict[Hashable, object] = {}

    def serve(self, router: ApiRouter, collaborators: Mapping[Any, object] | None = None) -> None:
        """Adds the routes of a router, and the collaborators of its handlers by key."""
        self.served.append(router)
        self.include_router(router)
        self._direct = router.direct | self._direct
        self.collaborators.update(collaborators or {})

    def defer(self, api: "DeferredApi") -> None:
        """Serves an API from the first request to one of its paths on."""
        self._deferred.append(api)

    async def load_deferred(self, path: str | None = None) -> None:
        """Imports the deferred APIs with a path, off the event loop; None: all. One that fails is logged once."""
        async with self._loading:
            for api in [each for each in self._deferred if path is None or each.has(path)]:
                try:
                    serve = await asyncio.to_thread(api.load)
                except Exception:
                    log.exception("cannot import an API", api=api.name)
                    self._unusable.append(api)
                else:
                    serve(self)
                self._deferred.remove(api)
                self._document = self.openapi_schema = None

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A coroutine function, by which programs tell an ASGI application from a WSGI one.
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        await self._edge(scope, receive, send)

    def _routed(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serves a request: by FastAPI, unless its path alone finds the route."""
        direct = self._direct.get((scope["method"], scope["path"]))
        if direct is None and any(each.has(scope["path"]) for each in (*self._deferred, *self._unusable)):
            return self._serve_deferred(scope, receive, send)
        return (direct or super().__call__)(scope, receive, send)

    async def _serve_deferred(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request to an API that was deferred. Raises INTERNAL if it cannot be imported."""
        await self.load_deferred(scope["path"])
        for api in self._unusable:
            if api.has(scope["path"]):
                raise WeftError(Reason.INTERNAL, f"the API {api.name} cannot be imported")
        await (self._direct.get((scope["method"], scope["path"])) or super().__call__)(scope, receive, send)

    @override
    def build_middleware_stack(self) -> ASGIApp:
        """Returns FastAPI's middleware, without the outermost, which would answer errors before `edge` does."""
        handlers: Any = self.exception_handlers
        return ExceptionMiddleware(AsyncExitStackMiddleware(self.router), handlers=handlers)

    async def _refuse_unrouted(self, request: Request, error: Exception) -> Response:
        """Raises NOT_FOUND for an unknown path, METHOD_NOT_ALLOWED for its method."""
        assert isinstance(error, HTTPException)
        found = [route for route in routes_of(self.served) if route.matches(request.scope)[0] is not Match.NONE]
        if not any(needs_of(route).is_open for route in found):
            facts_of(request.scope).principal = self.gate.admit(request.scope)
        if not found:
            # The caller may have meant one of their paths.
            await self.load_deferred()
            raise WeftError(Reason.NOT_FOUND, self._unknown_path_words(request.scope))
        allowed = sorted({method for route in found for method in route.methods or ()})
        message = f"{request.method} is not allowed at this path"
        raise EdgeError(405, Reason.METHOD_NOT_ALLOWED, message, headers=((b"allow", ", ".join(allowed).encode()),))

    def _unknown_path_words(self, scope: Scope) -> str:
        """Returns the message for an unknown path: its replacement, or the endpoint that a wrong base URL missed."""
        if removed := removed_path(scope["path"]):
            return removed
        for path, why in self.off_paths.items():
            if has_path((path,), scope["path"]):
                return f"no endpoint has this path: {why}"
        for path in possible_paths(scope["path"]):
            named = {**scope, "path": path, "root_path": ""}
            found = {route.path: route.matches(named)[0] for route in routes_of(self.served)}
            meant = max(found, key=lambda each: found[each].value, default="")
            if meant and found[meant] is not Match.NONE:
                return f"no endpoint has this path; did you mean {shown_path(meant)}? Check the client's base URL"
        return f"no endpoint has this path; {OPENAPI} lists those that exist"

    @override
    def openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI document; the first call builds it, in about 0.1 s."""
        if self.openapi_schema is None:
            document = super().openapi()
            add_schemas(document, published_schemas((*self._routers, *self.served)))
        return super().openapi()

    async def document(self) -> bytes:
        """Returns the OpenAPI document as JSON. The first call builds it in a thread.

        Each call takes a turn of the event loop: it is large, and other requests are served between two answers.
        """
        await self.load_deferred()
        async with self._document_lock:
            if self._document is None:
                self._document = await asyncio.to_thread(lambda: bytes(JSONResponse(self.openapi()).body))
            await asyncio.sleep(0)
            return self._document


def published_schemas(routers: Iterable[ApiRouter]) -> tuple[Schema, ...]:
    """Returns the schemas of the OpenAPI document, each once."""
    return tuple(dict.fromkeys(schema for router in routers for schema in router.schemas))


_MAX_SEGMENTS = 12
"""Longer paths are not searched: no endpoint and base URL together have more segments."""
_PREFIXES = ("", "/v1", "/api")
"""Prefixes that clients append to a base URL, or expect in it."""


class _NameConvertor(Convertor[str]):
    """The type `name` of a path parameter: a model's name, which may have slashes."""

    regex = "[^/]+(?:/[^/]+)*"

    @override
    def convert(self, value: str) -> str:
        return value

    @override
    def to_string(self, value: str) -> str:
        return value


register_url_convertor("name", _NameConvertor())


def possible_paths(path: str) -> list[str]:
    """Returns the paths that a client may have meant, the likeliest first.

    A base URL may have a prefix too many (`/v1/v1/models`) or too few (`/models`), and too many slashes.
    """
    segments = [segment for segment in path.split("/") if segment]
    if len(segments) > _MAX_SEGMENTS:
        return []
    ends = ["/" + "/".join(segments[start:]) for start in range(len(segments))]
    return [prefix + end for end in ends for prefix in _PREFIXES]


OPENAPI = "/openapi.json"
"""Path of the OpenAPI document."""
_DOCS = f"The description of this API is the OpenAPI document at {OPENAPI}; its pages are in the folder docs of weft.\n"


async def get_openapi(request: Request) -> Response:
    """Returns the OpenAPI document."""
    return Response(await request.app.document(), media_type="application/json")


async def get_docs() -> Response:
    """Redirects to the OpenAPI document. It has no page, because the scripts would come from another host."""
    return PlainTextResponse(_DOCS, status_code=307, headers={"location": OPENAPI.removeprefix("/")})
