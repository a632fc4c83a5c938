"""The parts of uvicorn that serve HTTP, without its command line and its watch of files, which need 2 MB."""

# ruff: noqa: E402, TID251
from weft.kernel.bare_package import place_bare

place_bare("uvicorn")

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

__all__ = ["Config", "FlowControl", "HttpToolsProtocol", "RequestResponseCycle", "Server", "ServerState"]
