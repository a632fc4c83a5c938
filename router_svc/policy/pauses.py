"""How long a candidate is left alone after an attempt there that failed."""

from collections.abc import Iterable

from router_svc.policy.candidates import Candidate
from router_svc.policy.failover import FailureKind
from router_svc.policy.limits import SchedulerLimits

MAX_DOUBLINGS = 16
"""More change nothing and would only overflow in the end."""


class PauseBook:
    """Candidates that get no requests for the moment. A new incarnation starts with a clean record."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._until: dict[tuple[str, str, str], float] = {}
        self._busy_in_a_row: dict[tuple[str, str, str], int] = {}

    def over(self, candidate: Candidate, now: float) -> bool:
        """Whether it may be asked."""
        return self._until.get(candidate.key, now) <= now

    def note_failure(self, candidate: Candidate, kind: FailureKind, now: float) -> None:
        """An attempt there failed like this."""
        match kind:
            case FailureKind.BUSY:
                self._until[candidate.key] = now + self._busy_pause(candidate)
            case FailureKind.BOUNCED:
                self._until[candidate.key] = now + self._limits.bounce_pause_seconds
            case FailureKind.BROKE:
                self._until[candidate.key] = now + self._limits.break_pause_seconds
            case FailureKind.LACKS | FailureKind.FINAL:
                pass

    def note_content(self, candidate: Candidate) -> None:
        """An answer from there has begun: it is not full."""
        self._busy_in_a_row.pop(candidate.key, None)

    def forget_others(self, alive: Iterable[tuple[str, str, str]]) -> None:
        """Drop candidates that are gone."""
        until, busy = self._until, self._busy_in_a_row
        keys = set(alive)
        self._until = {key: until[key] for key in keys if key in until}
        self._busy_in_a_row = {key: busy[key] for key in keys if key in busy}

    def _busy_pause(self, candidate: Candidate) -> float:
        in_a_row = self._busy_in_a_row.get(candidate.key, 0)
        self._busy_in_a_row[candidate.key] = in_a_row + 1
        doublings = min(in_a_row, MAX_DOUBLINGS)
        return min(self._limits.busy_pause_seconds * 2.0**doublings, self._limits.max_busy_pause_seconds)
