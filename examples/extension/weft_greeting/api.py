"""`GET /x/greeting`: says who asks."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.http_api import HttpApi
from gateway.request_facts import facts_of
from gateway.routing import ApiRouter
from weft.kernel.access.principal import VIEW_MODELS

GREETING = ApiRouter("greeting")


async def greet(request: Request) -> Response:
    """Returns a greeting of the caller."""
    return JSONResponse({"greeting": f"hello, {facts_of(request.scope).principal.name}"})


GREETING.add_get("/x/greeting", VIEW_MODELS, greet)
API = HttpApi(router=GREETING)
