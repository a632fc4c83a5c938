"""How many further attempts the requests of a line may have together, so that an outage is not made worse by retries.

An attempt on a candidate that has not failed lately is always allowed: when one of many breaks, all of its requests go
on elsewhere. The others share a budget that grows with first attempts, as Envoy's and Finagle's retry budgets do; what
was allowed freely is taken off it too, so that in an outage of everybody the attempts stay within the share in the end.
"""

from dataclasses import dataclass

from router_svc.policy.limits import SchedulerLimits


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

    def note_first_attempt(self, line: str, now: float) -> None:
        """A request of the line has its first attempt."""
        limits = self._limits
        balance = self._balance(line)
        if balance.attempts == limits.max_retry_balance:
            balance.looked_at = now
            return
        # The reserve is for lines with few requests: what comes back of it is not on top of what requests bring.
        gained = max(limits.retry_share, balance.gain(now, limits))
        balance.attempts = min(balance.attempts + gained, limits.max_retry_balance)

    def allow(self, line: str, candidate_is_clean: bool, now: float) -> bool:
        """Whether a request of the line may have one more attempt, which is then taken off its budget.

        `candidate_is_clean`: whether it would go to somebody who has not failed lately.
        """
        balance = self._balance(line)
        balance.attempts += balance.gain(now, self._limits)
        if candidate_is_clean:
            balance.attempts = max(balance.attempts - 1, -self._limits.max_retry_debt)
            return True
        if balance.attempts < 1:
            return False
        balance.attempts -= 1
        return True

    def forget(self, line: str) -> None:
        """There is no such line any more."""
        self._balances.pop(line, None)

    def _balance(self, line: str) -> _Balance:
        """A new line has all of its reserve."""
        balance = self._balances.get(line)
        if balance is None:
            balance = self._balances[line] = _Balance(self._limits.retry_reserve)
        return balance
