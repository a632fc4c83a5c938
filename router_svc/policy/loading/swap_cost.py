"""What a swap costs, what it is worth, and how long a model's turn is. All in seconds.

Seconds are what everybody who waits loses: the value of a load is what those who wait for it have waited, the cost is
what the others lose by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from router_svc.policy.endpoints.candidates import Candidate
from router_svc.policy.estimates import Estimates
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.loading.load_plan import Demand, Resident
from weft.kernel.request import Priority

UNKNOWN_LOAD_SECONDS = 5.0
"""What a load counts for that was never measured."""
PRIORITY_WEIGHTS = {
    Priority.SYSTEM: 16.0,
    Priority.HIGH: 4.0,
    Priority.NORMAL: 1.0,
    Priority.LOW: 0.25,
    Priority.DURABLE: 0.0625,
}
"""What a second of waiting counts for."""


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Reckons with what is known of loads and service times."""

    limits: SchedulerLimits
    estimates: Estimates

    def load_seconds(self, candidate: Candidate) -> float:
        """How long a load takes, or what it counts for when nobody knows."""
        known = self.estimates.load_seconds(candidate)
        return UNKNOWN_LOAD_SECONDS if known is None else known

    def turn_seconds(self, candidate: Candidate) -> float:
        """How long it serves at least while it is wanted, once it was loaded."""
        wanted = self.limits.swap_quantum_ratio * self.load_seconds(candidate)
        return max(self.limits.min_turn_seconds, min(wanted, self.limits.max_cold_wait_seconds))

    def turn_left(self, resident: Resident, priority: Priority, now: float) -> float:
        """How long it need not give way yet for a request of this band; 0: it is over, or nobody wants it.

        Whoever goes first waits for the shortest turn only.
        """
        if not resident.is_wanted:
            return 0.0
        serves = Priority.DURABLE if resident.serves_durable_only else resident.priority
        goes_first = serves is not None and priority < serves
        turn = self.limits.min_turn_seconds if goes_first else self.turn_seconds(resident.candidate)
        return max(0.0, resident.since + turn - now)

    def loss(self, resident: Resident, now: float) -> float:
        """What is lost when it gives way: its next load, and the time of those who wait for it.

        A model that nobody wants may be wanted again soon where it was just now. So it is worth its next load, but no
        more than the shortest turn, less the time since a request last went there.
        """
        reload_seconds = self.load_seconds(resident.candidate)
        if not resident.is_wanted:
            kept_idle_seconds = min(reload_seconds, self.limits.min_turn_seconds)
            return max(0.0, kept_idle_seconds - (now - resident.last_granted_at))
        weight = PRIORITY_WEIGHTS[Priority.NORMAL if resident.priority is None else resident.priority]
        tokens = resident.queued_tokens if resident.serves_callers else resident.durable_tokens
        return reload_seconds + weight * tokens / self._pace(resident.candidate)

    def cost(self, demand: Demand, candidate: Candidate, victims: Sequence[Resident], now: float) -> float:
        """What it costs to load `candidate` in place of `victims`.

        Its own load costs nobody anything where nobody is served less meanwhile: those who wait have nothing else. What
        only durable requests lose by a load for callers counts as little as they do, and that they wait longer nothing.
        """
        lost = own_load_counts = 0.0
        for victim in victims:
            if victim.serves_durable_only and not demand.is_durable:
                counts = PRIORITY_WEIGHTS[Priority.DURABLE]
                lost += counts * self.load_seconds(victim.candidate)
            else:
                counts = 1.0 if victim.is_wanted else 0.0
                lost += self.loss(victim, now)
            own_load_counts = max(own_load_counts, counts)
        if demand.ready_slots > 0:
            own_load_counts = 1.0
        return lost + own_load_counts * self.load_seconds(candidate)

    def may_be_evicted_for(self, demand: Demand, resident: Resident, now: float) -> bool:
        """Whether it may give way: to durable requests only if no caller wants it, nor has for a while."""
        if not demand.is_durable:
            return True
        return not resident.serves_callers and now - resident.idle_since() >= self.limits.durable_idle_seconds

    def value(self, demand: Demand) -> float:
        """What it is worth to those who wait."""
        return PRIORITY_WEIGHTS[demand.priority] * demand.waited_seconds

    def is_worth_it(self, demand: Demand, candidate: Candidate, victims: Sequence[Resident], now: float) -> bool:
        """Whether the swap is begun for its own sake: what waits is worth it, or fairness between tenants is.

        Accounts count only within one band. A tenant that had more than its share by a quantum waits for its bound.
        """
        rivals = _rivals(victims)
        if rivals and demand.priority > min(rivals):
            return False
        cost = self.cost(demand, candidate, victims, now)
        same_class = [victim for victim in victims if victim.priority == demand.priority]
        if same_class:
            lead = min(victim.account for victim in same_class) - demand.account
            quantum = self.limits.swap_quantum_ratio * cost * max(self._pace(victim.candidate) for victim in same_class)
            if abs(lead) >= quantum:
                return lead > 0
        return self.value(demand) >= cost

    def seconds_until_worth(
        self, demand: Demand, candidate: Candidate, victims: Sequence[Resident], now: float
    ) -> float | None:
        """When what waits will be worth the swap, if nobody else comes; None: never, or nobody can tell."""
        rivals = _rivals(victims)
        if rivals and demand.priority >= min(rivals):
            return None
        missing = self.cost(demand, candidate, victims, now) - self.value(demand)
        return max(0.0, missing / (PRIORITY_WEIGHTS[demand.priority] * max(1, demand.waiting)))

    def _pace(self, candidate: Candidate) -> float:
        """Tokens per second of all its slots together."""
        return self.estimates.tokens_per_second(candidate) * max(1, candidate.slots)


def _rivals(victims: Sequence[Resident]) -> list[Priority]:
    return [victim.priority for victim in victims if victim.priority is not None]
