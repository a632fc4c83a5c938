"""The server on the official SDK: tools that answer, hang, crash, return large results or images, or appear later."""

import asyncio
import base64
import os
import socket
import sys
from typing import Any

import mcp_types as types
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp.shared.exceptions import MCPError

PAGE = 100
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
_SIZE: dict[str, Any] = {"type": "object", "properties": {"bytes": {"type": "integer"}}, "required": ["bytes"]}
_PIXEL = base64.b64encode(b"not really a picture").decode()


class ScriptedServer:
    """The tools and their behaviour."""

    def __init__(self, *, bad_schemas: bool, many: int) -> None:
        self.changes = InMemorySubscriptionBus()
        self._tools = [
            _tool("echo", _TEXT),
            _tool("slow", _NO_ARGUMENTS),
            _tool("huge", _SIZE),
            _tool("crash", _NO_ARGUMENTS),
            _tool("picture", _NO_ARGUMENTS),
            _tool("fail", _NO_ARGUMENTS),
            _tool("structured", _NO_ARGUMENTS),
            _tool("headers", _NO_ARGUMENTS),
            _tool("grow", _NO_ARGUMENTS),
            *(_tool(f"extra_{number}", _NO_ARGUMENTS) for number in range(many)),
        ]
        if bad_schemas:
            self._tools += [
                _tool("elsewhere", {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}}),
                _tool("large", {"type": "object", "description": "x" * 70_000}),
                _tool("not a name", _NO_ARGUMENTS),
            ]

    async def list_tools(
        self, _: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        """Returns a page of the tools."""
        first = int(params.cursor) if params is not None and params.cursor else 0
        more = first + PAGE < len(self._tools)
        return types.ListToolsResult(
            tools=self._tools[first : first + PAGE], next_cursor=str(first + PAGE) if more else None
        )

    async def call_tool(  # noqa: PLR0911 - one answer per tool
        self, context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        """Executes a tool."""
        arguments = params.arguments or {}
        match params.name:
            case "slow":
                await asyncio.sleep(600)
            case "crash":
                os._exit(7)
            case "huge":
                return _text_result("x" * int(arguments["bytes"]))
            case "picture":
                return types.CallToolResult(
                    content=[
                        types.TextContent(type="text", text="Here it is:"),
                        types.ImageContent(type="image", data=_PIXEL, mime_type="image/png"),
                    ]
                )
            case "fail":
                return types.CallToolResult(
                    content=[types.TextContent(type="text", text="The disk is full.")], is_error=True
                )
            case "structured":
                return types.CallToolResult(content=[], structured_content={"answer": 42})
            case "headers":
                request = context.request
                return _text_result(str(dict(request.headers)) if request is not None else "{}")
            case "grow":
                self._tools.append(_tool("grown", _NO_ARGUMENTS))
                await context.session.send_tool_list_changed()
                await self.changes.publish(ToolsListChanged())
                return _text_result("grown")
        return _text_result(str(arguments.get("text", "")))


def serve(*, http: bool, bad_schemas: bool, many: int, modern_only: bool) -> None:
    """Serves until the input ends or a signal arrives."""
    script = ScriptedServer(bad_schemas=bad_schemas, many=many)
    server: Server[Any] = Server(
        "scripted",
        on_list_tools=script.list_tools,
        on_call_tool=script.call_tool,
        on_subscriptions_listen=ListenHandler(script.changes),
    )
    if modern_only:
        server.middleware.append(_refuse_handshake)
    asyncio.run(_serve_http(server) if http else _serve_stdio(server))


async def _refuse_handshake(ctx: ServerRequestContext[Any], call_next: CallNext) -> HandlerResult:
    if ctx.method == "initialize":
        raise MCPError(types.METHOD_NOT_FOUND, "Method not found")
    return await call_next(ctx)


async def _serve_stdio(server: Server[Any]) -> None:
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


async def _serve_http(server: Server[Any]) -> None:
    import uvicorn  # noqa: PLC0415 - only here

    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"port {listener.getsockname()[1]}\n")
    sys.stdout.flush()
    program = uvicorn.Server(
        uvicorn.Config(server.streamable_http_app(), log_level="error", timeout_graceful_shutdown=0)
    )
    await program.serve(sockets=[listener])


def _tool(name: str, schema: dict[str, Any]) -> types.Tool:
    return types.Tool(name=name, description=f"The {name} tool.", input_schema=schema)


def _text_result(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)])
