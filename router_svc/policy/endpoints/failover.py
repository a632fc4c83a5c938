"""Whether an attempt that failed before its first content may be tried elsewhere, and what its runner is worth."""

from dataclasses import dataclass
from enum import Enum

from router_svc.policy.limits import SchedulerLimits
from weft.kernel.reasons import Reason


class FailureKind(Enum):
    """What a failed attempt says about the request and the runner."""

    BUSY = "busy"
    """The runner is full with work this router does not know of (it restarted, or is not the only one)."""
    BOUNCED = "bounced"
    """The runner did not take it: nothing was tried, the request goes back into the queue."""
    BROKE = "broke"
    """The runner or its backend failed: another runner may succeed."""
    LACKS = "lacks"
    """The runner has not what this request needs: another runner may, and this one is none the worse for it."""
    FINAL = "final"
    """It would fail anywhere, or the caller is gone."""


_BOUNCES = frozenset(
    {
        Reason.BACKEND_NOT_READY,
        Reason.SHUTTING_DOWN,
        # A runner that restarted between the grant and the call knows neither the incarnation nor the key.
        Reason.TICKET_INVALID,
        Reason.TICKET_EXPIRED,
        Reason.MODEL_NOT_FOUND,
        # It was evicted between the grant and the call, and there is no room to load it again.
        Reason.INSUFFICIENT_MEMORY,
    }
)
_LACKS = frozenset({Reason.TOOL_UNAVAILABLE, Reason.CLOCK_OFF})
_BREAKS = frozenset(
    {
        Reason.CONNECT_FAILED,
        Reason.HEADERS_TIMEOUT,
        Reason.SERVER_DIED,
        Reason.WORKER_RESTARTED,
        Reason.WORKER_LOST,
        Reason.STALL_TIMEOUT,
        Reason.LOAD_STALLED,
        Reason.OUT_OF_MEMORY,
        Reason.BACKEND_ERROR,
        Reason.BACKEND_PROTOCOL_ERROR,
    }
)


def may_be_the_requests(reason: Reason) -> bool:
    """Whether the engine lives and answered with an error of its own, which what was asked may have caused.

    Engines have many words for a request that they cannot take, and not all of them are known.
    """
    return reason is Reason.BACKEND_ERROR


def classify(reason: Reason) -> FailureKind:
    """What a failure with this reason means. A refusal of the request itself is final: siblings would refuse it too."""
    if reason is Reason.NO_SLOT_AVAILABLE:
        return FailureKind.BUSY
    if reason in _BOUNCES:
        return FailureKind.BOUNCED
    if reason in _LACKS:
        return FailureKind.LACKS
    return FailureKind.BROKE if reason in _BREAKS else FailureKind.FINAL


@dataclass(slots=True)
class _Balance:
    """Attempts that a line may still have, as of when its reserve was last looked at."""

    attempts: float
    looked_at: float | None = None

    def gain(self, now: float, limits: SchedulerLimits) -> float:
        """How much of the reserve came back since this was asked last."""
        elapsed = 0.0 if self.looked_at is None else now - self.looked_at
        self.looked_at = now
        return max(0.0, min(elapsed / limits.retry_reserve_seconds, limits.retry_reserve - self.attempts))


class RetryBudget:
    """One balance for each line that had requests. Lines that are gone are to be forgotten."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._balances: dict[str, _Balance] = {}

    def note_first_attempt(self, queue: str, now: float) -> None:
        """A request of the line has its first attempt."""
        limits = self._limits
        balance = self._balance(queue)
        if balance.attempts == limits.max_retry_balance:
            balance.looked_at = now
            return
        # The reserve is for lines with few requests: what comes back of it is not on top of what requests bring.
        gained = max(limits.retry_share, balance.gain(now, limits))
        balance.attempts = min(balance.attempts + gained, limits.max_retry_balance)

    def allow(self, queue: str, candidate_is_clean: bool, now: float) -> bool:
        """Whether a request of the line may have one more attempt, which is then taken off its budget.

        `candidate_is_clean`: whether it would go to somebody who has not failed lately.
        """
        balance = self._balance(queue)
        balance.attempts += balance.gain(now, self._limits)
        if candidate_is_clean:
            balance.attempts = max(balance.attempts - 1, -self._limits.max_retry_debt)
            return True
        if balance.attempts < 1:
            return False
        balance.attempts -= 1
        return True

    def forget(self, queue: str) -> None:
        """There is no such line any more."""
        self._balances.pop(queue, None)

    def _balance(self, queue: str) -> _Balance:
        """A new line has all of its reserve."""
        balance = self._balances.get(queue)
        if balance is None:
            balance = self._balances[queue] = _Balance(self._limits.retry_reserve)
        return balance
