"""The port of a scheduler under simulation: the router's `Scheduler`, the FIFO baseline and every negative control."""

from typing import Protocol

from router_svc.policy.decisions import Decision, Served, WakeFailure
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.request import Request
from weft.kernel.reasons import Reason


class SchedulerPort(Protocol):
    """The methods of `Scheduler` that the simulation calls."""

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        ...

    @property
    def running(self) -> int:
        """Number of requests that hold a slot."""
        ...

    def apply(self, change: MeshChange, now: float) -> list[Decision]:
        """Applies a change of the mesh."""
        ...

    def submit(self, arrival: Request, now: float) -> list[Decision]:
        """Submits a request."""
        ...

    def report_first_content(self, key: int, now: float) -> None:
        """Reports the first content of an answer."""
        ...

    def report_failed(self, key: int, attempt: int, reason: Reason, now: float) -> list[Decision]:
        """Reports an attempt that failed before any content."""
        ...

    def finish(
        self, key: int, now: float, served: Served | None = None, failure: Reason | None = None
    ) -> list[Decision]:
        """Reports the end of a request, served or not."""
        ...

    def wake_finished(
        self, model: str, failure: WakeFailure | None, now: float, *, self_reported: bool = False
    ) -> list[Decision]:
        """Reports the end of a wake."""
        ...

    def tick(self, now: float) -> list[Decision]:
        """Lets the scheduler act on passed time."""
        ...
