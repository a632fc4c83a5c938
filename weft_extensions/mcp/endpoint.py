"""The endpoint of the MCP server. Its SDK takes 22 MiB and 0.5 s to import, which the first admitted call does."""

import asyncio
from importlib import import_module
from typing import Annotated

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway.deps import GatewayDeps
from gateway.http.disconnect import WhileConnected
from gateway.http_api import HttpApi
from gateway.intake.body import body_of
from gateway.intake.headers import timeout_seconds
from gateway.intake.query import begin_read
from gateway.openapi import OperationDoc
from gateway.ports import GatewayPorts
from gateway.request_facts import headers_of
from gateway.routing import ApiRouter, collaborator
from weft.kernel.access.principal import VIEW_REQUESTS
from weft_extensions.mcp.caller import Caller

Mesh = Annotated[tuple[GatewayDeps, GatewayPorts], collaborator("mcp")]


class McpMessage(BaseModel, extra="allow"):
    """One message of JSON-RPC, as the Model Context Protocol defines it."""

    method: str | None = None
    """Such as `initialize`, `tools/list` or `tools/call`, with `params`."""


async def call_mcp(mesh: Mesh, request: Request, message: Annotated[McpMessage, body_of(McpMessage)]) -> Response:
    """Answers a message of an MCP client over streamable HTTP: without sessions and streams, so by one JSON object.

    The tools do what the key may do at the endpoints of the gateway.
    """
    begin_read(request, "mcp")
    server = await asyncio.to_thread(import_module, "weft_extensions.mcp.server")
    caller, body = Caller(request.scope, *mesh), message.model_dump_json(exclude_unset=True).encode()
    seconds = timeout_seconds(headers_of(request.scope), mesh[0].config)
    with WhileConnected(request.scope, request.receive, cut_off_seconds=seconds):
        found: Response = await server.answer(caller, body)
        return found


_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_DOC = {"200": {"description": "The answer", "content": _OBJECT}, "202": {"description": "It was a notification"}}
_FAILURE = {"description": "An error of JSON-RPC or of weft", "content": _OBJECT}
MCP = ApiRouter("mcp")
# What a tool needs, the endpoint requires that it calls.
MCP.add_post("/mcp", VIEW_REQUESTS, call_mcp, OperationDoc({"responses": _DOC | {"default": _FAILURE}}), by_name=True)
API = HttpApi(router=MCP, collaborators=lambda *mesh: {"mcp": mesh})
