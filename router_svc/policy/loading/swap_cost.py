"""The cost and the value of a swap and the length of a model's turn, in seconds of waiting time.

A load's value is the time that the requests for it have waited; its cost is the time that other requests lose.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from router_svc.policy.endpoints.candidates import Candidate
from router_svc.policy.estimates import Estimates
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.loading.cold_start_plan import Demand, Resident
from router_svc.policy.router_request import MEDIA_UNITS, UNITS, WorkUnit
from weft.kernel.requests.request_values import CALLER_CLASSES, Priority

UNKNOWN_LOAD_SECONDS = 5.0
"""Assumed duration of a load that was never measured."""
PRIORITY_WEIGHTS = {
    Priority.SYSTEM: 16.0,
    Priority.HIGH: 4.0,
    Priority.NORMAL: 1.0,
    Priority.LOW: 0.25,
    Priority.DURABLE: 0.0625,
}
"""Per second of waiting. Those of callers count only among the requests of one tenant; otherwise all are normal."""


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Computes costs from estimated load and service times."""

    limits: SchedulerLimits
    estimates: Estimates

    def load_seconds(self, candidate: Candidate) -> float:
        """Return the duration of a load, or UNKNOWN_LOAD_SECONDS."""
        known = self.estimates.load_seconds(candidate)
        return UNKNOWN_LOAD_SECONDS if known is None else known

    def turn_seconds(self, candidate: Candidate) -> float:
        """Return how long a loaded model serves at least while it is wanted."""
        wanted = self.limits.swap_quantum_ratio * self.load_seconds(candidate)
        return max(self.limits.min_turn_seconds, min(wanted, self.limits.max_cold_wait_seconds))

    def turn_left(self, resident: Resident, demand: Demand | None, now: float) -> float:
        """Return how long it must not be evicted for a demand; 0: its turn has ended, or it is not needed.

        A request of a higher class waits only for the shortest turn. `demand`: None for a load under way.
        """
        if not resident.is_needed:
            return 0.0
        if resident.serves_durable_only:
            goes_first = demand is None or not demand.is_durable
        else:
            serves = None if demand is None else _class_against(demand, resident)
            goes_first = demand is not None and serves is not None and demand.priority < serves
        turn = self.limits.min_turn_seconds if goes_first else self.turn_seconds(resident.candidate)
        return max(0.0, resident.since + turn - now)

    def loss(self, resident: Resident, demand: Demand | None, now: float) -> float:
        """Return the cost of its eviction for a demand: its next load, and the time of the requests that wait for it.

        An unwanted model that was just used may be wanted again soon. It costs its next load, but no more than the
        shortest turn, less the time since its last grant; if results of an agent's tools are awaited, its whole load.
        """
        reload_seconds = self.load_seconds(resident.candidate)
        if not resident.is_wanted:
            if resident.is_needed:
                return reload_seconds
            kept_idle_seconds = min(reload_seconds, self.limits.min_turn_seconds)
            return max(0.0, kept_idle_seconds - (now - resident.last_granted_at))
        served = Priority.NORMAL if _is_of_another(demand, resident) else resident.priority
        weight = PRIORITY_WEIGHTS[Priority.NORMAL if served is None else served]
        tokens = resident.queued_tokens if resident.serves_callers else resident.durable_tokens
        return reload_seconds + weight * tokens / self._pace(resident.candidate)

    def cost(self, demand: Demand, candidate: Candidate, victims: Sequence[Resident], now: float) -> float:
        """Return the cost of loading `candidate` in place of `victims`.

        Its own load costs nothing unless other requests are delayed meanwhile, as the requests for it have no
        alternative. Durable requests' losses by a load for callers have their low weight, and their longer wait costs
        nothing.
        """
        lost = own_load_counts = 0.0
        for victim in victims:
            if victim.serves_durable_only and not demand.is_durable:
                counts = PRIORITY_WEIGHTS[Priority.DURABLE]
                lost += counts * self.load_seconds(victim.candidate)
            else:
                counts = 1.0 if victim.is_needed else 0.0
                lost += self.loss(victim, demand, now)
            own_load_counts = max(own_load_counts, counts)
        if demand.ready_slots > 0:
            own_load_counts = 1.0
        return lost + own_load_counts * self.load_seconds(candidate)

    def may_be_evicted_for(self, demand: Demand, resident: Resident, now: float) -> bool:
        """Whether it may be evicted for the demand; for a durable demand only after a time without callers."""
        if not demand.is_durable:
            return True
        return not resident.serves_callers and now - resident.idle_since() >= self.limits.durable_idle_seconds

    def value(self, demand: Demand, victims: Sequence[Resident]) -> float:
        """Return the value of the load for the waiting requests."""
        return _weight(demand, victims) * demand.waited_seconds

    def is_worth_it(self, demand: Demand, candidate: Candidate, victims: Sequence[Resident], now: float) -> bool:
        """Whether to swap before the bound: for the waiting time, or for fairness between tenants.

        Accounts are compared between tenants and within a priority class. A tenant that exceeds its share by a quantum
        waits for the bound.
        """
        rivals = _rivals(demand, victims)
        if rivals and demand.priority > min(rivals):
            return False
        cost = self.cost(demand, candidate, victims, now)
        same_class = [victim for victim in victims if _class_against(demand, victim) == demand.priority]
        if same_class:
            lead = min(victim.account for victim in same_class) - demand.account
            quantum = self.limits.swap_quantum_ratio * cost * max(self._pace(victim.candidate) for victim in same_class)
            if abs(lead) >= quantum:
                return lead > 0
        return self.value(demand, victims) >= cost

    def seconds_until_worth(
        self, demand: Demand, candidate: Candidate, victims: Sequence[Resident], now: float
    ) -> float | None:
        """Return in how many seconds the swap will be worth it without new requests; None: never, or unknown."""
        rivals = _rivals(demand, victims)
        if rivals and demand.priority >= min(rivals):
            return None
        missing = self.cost(demand, candidate, victims, now) - self.value(demand, victims)
        return max(0.0, missing / (_weight(demand, victims) * max(1, demand.waiting)))

    def _pace(self, candidate: Candidate) -> float:
        """Return the tokens per second of all its slots; for a media model, the tokens that its time is charged as."""
        if not any(UNITS.get(operation) is WorkUnit.TOKENS for operation in candidate.operations) and any(
            operation in MEDIA_UNITS for operation in candidate.operations
        ):
            return self.estimates.tokens_per_device_second(candidate)
        return self.estimates.tokens_per_second(candidate) * max(1, candidate.slots)


def _is_of_another(demand: Demand | None, resident: Resident) -> bool:
    """Whether the resident next serves callers of a tenant that is not the demand's."""
    return resident.priority in CALLER_CLASSES and (demand is None or resident.tenant != demand.tenant)


def _class_against(demand: Demand, resident: Resident) -> Priority | None:
    """Return the class of the resident's next request as it counts against the demand; None: no request waits."""
    return demand.priority if _is_of_another(demand, resident) else resident.priority


def _weight(demand: Demand, victims: Sequence[Resident]) -> float:
    is_normal = any(_is_of_another(demand, victim) for victim in victims)
    return PRIORITY_WEIGHTS[Priority.NORMAL if is_normal else demand.priority]


def _rivals(demand: Demand, victims: Sequence[Resident]) -> list[Priority]:
    return [found for victim in victims if (found := _class_against(demand, victim)) is not None]
