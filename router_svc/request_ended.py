"""The end of a request, as one event for everything that records, counts or measures it."""

from collections.abc import Callable

from router_svc.policy.request import Request
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.fleet import FleetView
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.value import value_class


@value_class(kw_only=True)
class RequestEnded:
    """The end of a request. The loop sends it to each of its subscribers, once."""

    request: Request
    at: float
    """Time on the router's monotonic clock."""
    view: FleetView
    reason: Reason
    """UNSPECIFIED: it completed."""
    receipt: receipt_pb2.Receipt | None = None
    """None: its dispatcher left without one."""
    refusal: WeftError | None = None
    """The error of a request that was refused before the scheduler, such as one above a rate limit."""
    last_error: Reason | None = None
    """The reason of the last error that its dispatcher got; None: none since its last grant."""
    was_placed: bool = False
    """Whether a runner may have worked on it."""
    is_closing: bool = False
    """Whether this router stops, so that the dispatcher continues without it."""


Subscriber = Callable[[RequestEnded], None]
"""Called from the event loop with the end of each request; never raises."""
