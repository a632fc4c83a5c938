"""The port through which captures and trials follow the run of a request. It can neither delay nor fail a request."""

from typing import Any, Protocol

from weft.api.common.v1 import receipt_pb2
from weft.dispatch.fleet import FleetView
from weft.dispatch.frames import Frame
from weft.dispatch.request_receipt import RequestContext


class ObservedRun(Protocol):
    """A followed request. Its methods return immediately and never raise."""

    stores_text: bool
    """Whether its receipt says that prompt and answer are captured."""

    def add(self, frame: Frame) -> None:
        """Adds what is sent to the caller next."""

    def end(self, receipt: receipt_pb2.Receipt) -> None:
        """Ends it with the request's receipt."""


class RunObserver(Protocol):
    """Follows requests."""

    def observe(self, view: FleetView, context: RequestContext, payload: Any) -> ObservedRun | None:
        """Returns a request to follow; None: this one is not followed."""
