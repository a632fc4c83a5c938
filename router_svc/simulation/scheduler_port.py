"""What the simulation asks of a scheduler. `router_svc.policy.scheduler.Scheduler` has it, and so has every control."""

from typing import Protocol

from router_svc.policy.arrival import Arrival
from router_svc.policy.decisions import Decision, Served, WakeFailure
from router_svc.policy.endpoints.cluster_view import MeshChange
from weft.kernel.reasons import Reason


class SchedulerPort(Protocol):
    """See Scheduler, method by method."""

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        ...

    @property
    def running(self) -> int:
        """How many requests hold a slot."""
        ...

    def apply(self, change: MeshChange, now: float) -> list[Decision]:
        """The mesh changed."""
        ...

    def submit(self, arrival: Arrival, now: float) -> list[Decision]:
        """A request arrived."""
        ...

    def report_first_content(self, key: int, now: float) -> None:
        """Its caller has seen something of its answer."""
        ...

    def report_failed(self, key: int, attempt: int, reason: Reason, now: float) -> list[Decision]:
        """An attempt failed before that."""
        ...

    def finish(
        self, key: int, now: float, served: Served | None = None, failure: Reason | None = None
    ) -> list[Decision]:
        """It is over, however."""
        ...

    def wake_finished(
        self, model: str, failure: WakeFailure | None, now: float, *, self_reported: bool = False
    ) -> list[Decision]:
        """A wake ended."""
        ...

    def tick(self, now: float) -> list[Decision]:
        """Time passed."""
        ...
