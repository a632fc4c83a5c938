"""Routes without a parameter in their path, found by one look: the framework walks over all routes for each request.

Measured: a tenth of the CPU time of a chat request in the gateway was spent between its own layer and the endpoint.
"""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]
Table = dict[tuple[str, str], Endpoint]
"""By method and path."""


class StaticRoutes:
    """Asks the endpoint itself where there is one, and the framework otherwise: it knows what a 404 and a 405 are."""

    def __init__(self, app: ASGIApp, *, table: Table) -> None:
        """`table` may be filled later, see `publish_static_routes`."""
        self._app = app
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        endpoint = self._table.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)


def publish_static_routes(app: FastAPI, table: Table) -> None:
    """Put every route of the application whose path is fixed into the table.

    Ours all take the request and return a response, and nothing that the framework would have to inject or to convert.
    """
    for route in app.routes:
        if isinstance(route, APIRoute) and not route.param_convertors:
            table.update({(method, route.path): route.endpoint for method in route.methods or ()})
