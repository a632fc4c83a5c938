"""The load of one queue of a router."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolQueue:
    """The load of a pool or a route."""

    pool: str
    """The pool's name, or `route/` and the route's name."""
    waiting: int
    max_waiting: int
    """Maximum number of waiting requests."""
    running: int
    """Requests running on its models under any name."""
    average_wait_seconds: float | None = None
    """Average over recently placed requests; None: there were none."""
