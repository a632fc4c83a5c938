"""The contract of the scheduler: events in, decisions out.

An event is a method of `SchedulerPort`. The loop (`router_svc.loop`, or the simulator) calls one method at a time and
passes the time. It carries out the returned decisions (`decisions.py`) in order:

- `Placed`: sign a ticket and grant it to the dispatcher; `report_first_content`, `report_failed` or `finish` follows.
- `Waits`, `Loads`: send a status message.
- `Rejects`: refuse the request, which has left the scheduler.
- `Wakes`: load a model; `wake_finished` follows.
- `StopsWaking`: end a load that waits for memory; `wake_finished` follows.

`Scheduler` and the simulator's FIFO baseline and negative controls implement the port. A policy is a function of values
and `now`: a rank of free endpoints in `endpoints/load_balancer.py`, an order in `queue/`, a plan in `loading/`.
"""

from typing import Protocol

from router_svc.policy.decisions import Decision, Served, WakeFailure
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.router_request import Request
from weft.kernel.errors.reasons import Reason


class SchedulerPort(Protocol):
    """The events of a scheduler."""

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        ...

    @property
    def running(self) -> int:
        """Number of requests that hold a slot."""
        ...

    def apply(self, change: MeshChange, now: float) -> list[Decision]:
        """Apply a change of the mesh."""
        ...

    def submit(self, arrival: Request, now: float) -> list[Decision]:
        """Submit a request."""
        ...

    def report_first_content(self, key: int, now: float) -> list[Decision]:
        """Report the first content of an answer."""
        ...

    def report_failed(self, key: int, attempt: int, reason: Reason, now: float) -> list[Decision]:
        """Report an attempt that failed before any content."""
        ...

    def finish(
        self, key: int, now: float, served: Served | None = None, failure: Reason | None = None
    ) -> list[Decision]:
        """Report the end of a request, served or not."""
        ...

    def wake_finished(
        self, model: str, failure: WakeFailure | None, now: float, *, self_reported: bool = False
    ) -> list[Decision]:
        """Report the end of a wake."""
        ...

    def opens_at(self, now: float) -> float | None:
        """Return when `proceed` places a waiting request, as an engine is soon done with its prompts; None: unknown."""
        ...

    def proceed(self, now: float) -> list[Decision]:
        """Place waiting requests, when `opens_at` is reached."""
        ...

    def tick(self, now: float) -> list[Decision]:
        """Let the scheduler act on passed time."""
        ...
