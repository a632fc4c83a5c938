"""Ends of requests, for testing subscribers."""

from typing import Any

from router_svc.observer import RequestEnded
from router_svc.policy.router_request import Request
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.fleet import FleetView
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft.kernel.values.names import DEFAULT_TENANT


def ending(
    asked: int | PlacementRequest,
    at: float = 0.0,
    reason: Reason = Reason.CANCELLED,
    receipt: receipt_pb2.Receipt | None = None,
    **more: Any,
) -> RequestEnded:
    """Returns the end of a request, or of one with this key. `more`: fields of RequestEnded, or `cancelled_by`."""
    key, spec = 1, asked
    if isinstance(spec, int):
        key = spec
        spec = PlacementRequest(request_id="r", tenant=DEFAULT_TENANT, model="m", operation=Operation.CHAT)
    request = Request.of(key, spec, 0.0)
    request.cancelled_by = more.pop("cancelled_by", "")
    fields = {"view": FleetView(), **more}
    return RequestEnded(request=request, at=at, reason=reason, receipt=receipt, **fields)
