"""How much is asked of each line, for people who look."""

from dataclasses import dataclass

from router_svc.policy.candidate_index import CandidateIndex
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.lines import Lines


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLength:
    """One line at one moment."""

    pool: str
    """The pool, or ROUTE_PREFIX and a route's name."""
    waiting: int
    """Requests of callers; durable ones take none of their places."""
    max_waiting: int
    running: int
    """Requests in flight on its models that this router granted."""
    average_wait_seconds: float | None = None
    """Of the requests that were placed lately; None: none were."""


def queue_lengths(index: CandidateIndex, lines: Lines, limits: SchedulerLimits) -> list[QueueLength]:
    """Every pool with a member and every route, in order of their names."""
    return [_length(name, index, lines, limits) for name in sorted(index.lines())]


def _length(name: str, index: CandidateIndex, lines: Lines, limits: SchedulerLimits) -> QueueLength:
    line = lines.get(name)
    return QueueLength(
        pool=name,
        waiting=line.callers_waiting if line is not None else 0,
        max_waiting=limits.queue_depth_per_runner * len(index.members(name)),
        running=index.in_flight_of_line(name),
        average_wait_seconds=line.pace.average_wait_seconds if line is not None else None,
    )
