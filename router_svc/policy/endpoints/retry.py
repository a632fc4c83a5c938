"""The retry budget of a queue; `weft.kernel.errors.failover` defines which failures may be retried.

Retries on a candidate that has not failed recently are always allowed, so that requests of one broken runner continue
elsewhere. Other retries share a budget that grows with first attempts, like the retry budgets of Envoy and Finagle.
The free retries are charged to it too, so that attempts stay within the share in a full outage.
"""

from dataclasses import dataclass

from router_svc.policy.limits import SchedulerLimits

RETRY_RESERVE_SECONDS = 10.0
"""Time in which a pool or route with few requests gains one retry beyond RETRY_SHARE, up to `retry_reserve`."""
RETRY_SHARE = 0.2
"""Retries on recently failed runners per first attempt of a pool or route."""


@dataclass(slots=True)
class _Balance:
    """Retries that a queue has left, as of the last update of its reserve."""

    attempts: float
    looked_at: float | None = None

    def gain(self, now: float, limits: SchedulerLimits) -> float:
        """Return how much of the reserve was restored since the last call."""
        elapsed = 0.0 if self.looked_at is None else now - self.looked_at
        self.looked_at = now
        return max(0.0, min(elapsed / RETRY_RESERVE_SECONDS, limits.retry_reserve - self.attempts))


class RetryBudget:
    """Retry budgets by queue. The owner must call `forget` for queues that no longer exist."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._balances: dict[str, _Balance] = {}

    def note_first_attempt(self, queue: str, now: float) -> None:
        """Record the first attempt of a request of the queue."""
        limits = self._limits
        balance = self._balance(queue)
        if balance.attempts == limits.max_retry_balance:
            balance.looked_at = now
            return
        # The reserve is for queues with few requests, so it is not added to what requests bring.
        gained = max(RETRY_SHARE, balance.gain(now, limits))
        balance.attempts = min(balance.attempts + gained, limits.max_retry_balance)

    def allow(self, queue: str, candidate_is_clean: bool, now: float) -> bool:
        """Whether a request of the queue may be retried; if so, the retry is charged to the budget.

        `candidate_is_clean`: the retry goes to a candidate that has not failed recently.
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
        """Forget a queue that no longer exists."""
        self._balances.pop(queue, None)

    def _balance(self, queue: str) -> _Balance:
        """Return the balance of a queue; a new queue has its full reserve."""
        balance = self._balances.get(queue)
        if balance is None:
            balance = self._balances[queue] = _Balance(self._limits.retry_reserve)
        return balance
