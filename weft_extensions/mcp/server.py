"""The MCP server on the official SDK. A server lives as long as one message, so it belongs to one caller."""

import logging
from functools import partial
from importlib.metadata import version
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.responses import Response

from gateway.errors import code_of, internal_error, public_message
from gateway.intake.json_guard import parse
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.telemetry.log import get_logger
from weft.kernel.text.json_lines import encode_json
from weft.kernel.values.unknown_names import unknown_name
from weft_extensions.mcp.caller import Caller, Document, collected
from weft_extensions.mcp.mesh_tools import Explain, Ps, Quote, Requests, Tool, Usage
from weft_extensions.mcp.runner_tools import CallTool, SearchTools, may_call_tools

log = get_logger("weft.gateway")
# The SDK's own log has words of callers.
logging.getLogger("mcp").addHandler(logging.NullHandler())
_OF_MESH: dict[str, type[Tool]] = {"ps": Ps, "explain": Explain, "requests": Requests, "quote": Quote, "usage": Usage}
_TOOLS: dict[str, type[Tool]] = {**_OF_MESH, "search_tools": SearchTools, "call_tool": CallTool}
_INSTRUCTIONS = "The mesh of models that answers you. If an answer was slow or failed, call explain, then ps and usage."


async def answer(caller: Caller, message: bytes) -> Response:
    """Answers one message. Refusals of tools are results with `isError`."""
    lists, calls = partial(_list_tools, caller), partial(_call_tool, caller)
    server: Server[Any] = Server(
        "weft", version=version("weft"), instructions=_INSTRUCTIONS, on_list_tools=lists, on_call_tool=calls
    )
    # The gateway has checked Host and Origin.
    manager = StreamableHTTPSessionManager(
        server, json_response=True, stateless=True, max_request_body_size=caller.deps.config.max_body_bytes
    )
    async with manager.run():
        return await collected(manager.handle_request, caller.scope, message)


async def _list_tools(
    caller: Caller, _: ServerRequestContext[Any], _page: types.PaginatedRequestParams | None
) -> types.ListToolsResult:
    usable = _TOOLS if may_call_tools(caller) else _OF_MESH
    return types.ListToolsResult(tools=[_SHOWN[name] for name in usable])


def _shown(name: str, tool: type[Tool]) -> types.Tool:
    schema, acts = tool.model_json_schema(), tool is CallTool
    hints = types.ToolAnnotations(read_only_hint=not acts, destructive_hint=acts, open_world_hint=acts)
    return types.Tool(name=name, description=schema.pop("description"), input_schema=schema, annotations=hints)


_SHOWN = {name: _shown(name, tool) for name, tool in _TOOLS.items()}


async def _call_tool(
    caller: Caller, _: ServerRequestContext[Any], params: types.CallToolRequestParams
) -> types.CallToolResult:
    try:
        text, failed = await _run(caller, params.name, params.arguments or {}), False
    except WeftError as error:
        text, failed = f"{public_message(error)} ({code_of(error)})", True
    except Exception:
        log.exception("tool of the MCP server failed", tool=params.name)
        text, failed = public_message(internal_error()), True
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=failed)


async def _run(caller: Caller, name: str, arguments: Document) -> str:
    if name not in _TOOLS:
        raise unknown_name("tool", name, _TOOLS)
    call = parse(_TOOLS[name], encode_json(arguments), max_depth=caller.deps.config.limits.max_json_depth)
    return await call.run(caller)
