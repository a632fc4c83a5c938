"""How far off the moments of tasks can lie."""

from collections.abc import Sequence

from sqlalchemy import func

from router_svc.store.tables import tasks
from router_svc.tasks.sql_claims import IS_OVER, IS_PENDING, IS_RUNNING
from weft.sql.moments import BoundedMoment

UNSAID_LEASE_SECONDS = 60.0
"""Length of a lease that an earlier release wrote, which did not say it; longer than its default."""


def moments_of(now: float, longest_pause_seconds: float) -> Sequence[BoundedMoment]:
    """Of all tasks; `longest_pause_seconds`: the longest that a task pauses after an attempt."""
    c = tasks.c
    lease = func.coalesce(c.lease_seconds, UNSAID_LEASE_SECONDS)
    has_window = c.window_ends_at.is_not(None)
    return (
        BoundedMoment(key=c.seq, column=c.lease_until, latest=now + lease, where=IS_RUNNING),
        BoundedMoment(key=c.seq, column=c.ready_at, latest=now + longest_pause_seconds, where=IS_PENDING),
        BoundedMoment(
            key=c.seq,
            column=c.expires_at,
            latest=now + c.pending_limit_seconds,
            where=IS_PENDING & c.window_ends_at.is_(None),
        ),
        # A window was counted from when its batch was made.
        BoundedMoment(
            key=c.seq,
            column=c.created_at,
            latest=now,
            where=(IS_PENDING | IS_RUNNING) & has_window,
            along=(c.window_ends_at, c.expires_at),
        ),
        BoundedMoment(key=c.seq, column=c.ended_at, latest=now, where=IS_OVER),
    )
