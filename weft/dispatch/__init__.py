"""Dispatch of requests: their placement by the router and their execution on a runner.

`placement` has the port to the router and its values, `remote_router` the router over gRPC, `dispatcher` the code that
gets a grant, calls the runner, fails over before the first content, and writes the receipt. `fleet` is the view of the
mesh, `agents` resolves `agent/<name>`, `tickets` has the tickets that a router signs and a runner checks.
"""

from weft.dispatch.dispatcher import Dispatcher, EmbeddingCall, GenerationCall, SpeechCall, UnaryCall
from weft.dispatch.placement import (
    Decision,
    Grant,
    LoadingModel,
    Placement,
    PlacementPort,
    PlacementRequest,
    WaitingInQueue,
)
from weft.dispatch.request_trace import RequestContext

__all__ = [
    "Decision",
    "Dispatcher",
    "EmbeddingCall",
    "GenerationCall",
    "Grant",
    "LoadingModel",
    "Placement",
    "PlacementPort",
    "PlacementRequest",
    "RequestContext",
    "SpeechCall",
    "UnaryCall",
    "WaitingInQueue",
]
