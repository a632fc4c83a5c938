"""What those who wait can hope for: the members of their line that could serve them, by what these do now."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router_svc.policy.endpoints.candidates import Candidate, Readiness

MAX_TAKERS = 64
"""Members that take requests whose running work is looked at for an estimate."""
MAX_ASLEEP = 16
"""Sleeping members that are looked at for a load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Members that are up or asleep, permitted, and not tried in vain."""

    count: int = 0
    slots: int = 0
    """Of those that take requests, as many as their runners work on at once."""
    ready: Candidate | None = None
    """One that takes requests; None: none does."""
    taker_count: int = 0
    """How many do."""
    takers: tuple[Candidate, ...] = ()
    """Those that take requests, at most MAX_TAKERS."""
    loading: tuple[str, ...] = ()
    """Models that will take requests without anybody's doing, at most MAX_ASLEEP."""
    loading_slots: int = 0
    """Of those that load, at least one each."""
    waking: tuple[str, ...] = ()
    """Models that are being woken."""
    asleep: tuple[Candidate, ...] = ()
    """Those that sleep, being woken or not: those that are first, then the one to prefer. At most MAX_ASLEEP."""

    @property
    def is_cold(self) -> bool:
        """Whether none takes requests."""
        return self.ready is None


def capacity_of(
    members: Iterable[Candidate],
    is_waking: Callable[[Candidate], bool],
    preference: Callable[[Candidate], tuple[object, ...]],
) -> Capacity:
    """Look at the members of a line that those who wait may go to."""
    count = slots = loading_slots = 0
    takers: list[Candidate] = []
    taker_count = 0
    loading: list[str] = []
    waking: list[Candidate] = []
    asleep: list[Candidate] = []
    for member in members:
        count += 1
        if member.readiness is Readiness.READY:
            slots += min(member.slots, member.runner_max_requests or member.slots)
            taker_count += 1
            if len(takers) < MAX_TAKERS:
                takers.append(member)
        elif is_waking(member):
            waking.append(member)
        elif member.readiness is Readiness.LOADING:
            if len(loading) < MAX_ASLEEP:
                loading.append(member.model)
            loading_slots += max(1, member.slots)
        else:
            asleep.append(member)
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
