"""Placing a request and running it: the one place where router, runner and edge meet.

`port` holds the placement port and its values, `remote` the port over gRPC, `dispatcher` the code that gets a grant,
calls the runner itself, fails over before the first content, and writes the receipt. `fleet` is what is known of the
mesh, `agents` what a request for `agent/<name>` becomes. `tickets` is the permit that a
router signs and a runner checks.
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
