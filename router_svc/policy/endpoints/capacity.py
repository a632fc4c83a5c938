"""The capacity of a queue's members for waiting requests: ready, loading, waking and sleeping candidates."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router_svc.policy.endpoints.candidates import Candidate, EngineKey, Readiness

MAX_TAKERS = 64
"""Ready members whose running requests an estimate examines."""
_READY_SOON = (Readiness.READY, Readiness.LOADING)
"""States of an engine in which its adapters are ready as soon as its runner reports them."""
MAX_ASLEEP = 16
"""Maximum sleeping members considered for a load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Members of a queue that are up or asleep, permitted, and not excluded after a failed attempt."""

    count: int = 0
    slots: int = 0
    """Slots of the ready members, limited by their runners' request limits."""
    ready: Candidate | None = None
    """Any ready member; None: none is ready."""
    taker_count: int = 0
    takers: tuple[Candidate, ...] = ()
    """Ready members, at most MAX_TAKERS."""
    loading: tuple[str, ...] = ()
    """Models that become ready without further action, at most MAX_ASLEEP."""
    loading_slots: int = 0
    """Slots of the loading members, at least one each."""
    waking: tuple[str, ...] = ()
    asleep: tuple[Candidate, ...] = ()
    """Sleeping members, at most MAX_ASLEEP: those with a wake under way, then the others in order of preference."""

    @property
    def is_cold(self) -> bool:
        """Whether no member is ready."""
        return self.ready is None


def capacity_of(
    members: Iterable[Candidate],
    is_waking: Callable[[Candidate], bool],
    preference: Callable[[Candidate], tuple[object, ...]],
    engine_of: Callable[[Candidate], Candidate] = lambda candidate: candidate,
) -> Capacity:
    """Summarise the members of a queue that waiting requests may use.

    `engine_of` returns the model whose engine serves a member: an adapter needs its base model loaded.
    """
    engines: set[EngineKey] = set()
    count = slots = loading_slots = 0
    takers: list[Candidate] = []
    taker_count = 0
    loading: list[str] = []
    waking: list[Candidate] = []
    asleep: list[Candidate] = []
    for member in members:
        count += 1
        engine = engine_of(member) if member.base_model else member
        is_counted = member.engine_key in engines
        engines.add(member.engine_key)
        if member.readiness is Readiness.READY:
            slots += 0 if is_counted else min(member.slots, member.runner_max_requests or member.slots)
            taker_count += 1
            if len(takers) < MAX_TAKERS:
                takers.append(member)
        elif is_counted:
            continue
        elif is_waking(engine):
            waking.append(engine)
        elif member.readiness is Readiness.LOADING or engine.readiness in _READY_SOON:
            if len(loading) < MAX_ASLEEP:
                loading.append(member.model)
            loading_slots += max(1, member.slots)
        else:
            asleep.append(engine)
    asleep.sort(key=preference)
    return Capacity(
        count=count,
        slots=slots,
        ready=takers[0] if takers else None,
        taker_count=taker_count,
        takers=tuple(takers),
        loading=tuple(loading),
        loading_slots=loading_slots,
        waking=tuple(member.model for member in waking),
        asleep=tuple([*waking, *asleep][:MAX_ASLEEP]),
    )
