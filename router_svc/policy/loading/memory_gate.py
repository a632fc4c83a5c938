"""The memory gate: whether a load fits on a host, which models would be evicted for it, and messages about that.

It only counts bytes; the ledger decides, by the same rule (weft.gpu.eviction).
"""

from collections.abc import Callable, Container, Iterable, Sequence

from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, HostMemory, MemoryHolder
from router_svc.policy.loading.cold_start_plan import Resident
from weft.gpu.eviction import NEVER, Standing, victims
from weft.kernel.requests.request_values import Priority
from weft.kernel.values.units import size_words


class HostSpace:
    """A host's memory while loads are planned. Memory reserved for one load is not available to the next.

    The ledger's figures are seconds old, so ready models that it does not show yet count as holders. `doubted`: models
    that did not get memory that the ledger showed as free, as their runner may not use all devices of the host.
    """

    def __init__(
        self,
        memory: HostMemory,
        residents: Sequence[Resident],
        doubted: Container[str] = frozenset(),
        loading: Container[str] = frozenset(),
    ) -> None:
        self.memory = memory
        self.loading = loading
        """Models whose runners report that they are loading."""
        self._models = {holder.name: holder for holder in memory.holders if holder.is_model}
        self._residents = {resident.candidate.model: resident for resident in residents}
        self._doubted = doubted
        self._reserved: set[CandidateKey] = set()
        self.free_bytes = memory.free_bytes - sum(
            resident.candidate.memory_bytes for resident in residents if resident.candidate.model not in self._models
        )

    @property
    def host(self) -> str:
        """Name of the host."""
        return self.memory.host

    def bytes_of(self, resident: Resident) -> int:
        """Return the memory that evicting a resident frees."""
        return self._held_by(resident.candidate.model)

    def is_evictable(self, resident: Resident) -> bool:
        """Whether it may be evicted and no other load relies on its memory."""
        return resident.candidate.key not in self._reserved and self._standing(resident).may_leave(Priority.SYSTEM)

    def _standing(self, resident: Resident, turn_left: float = 0.0, loss: float = 0.0) -> Standing:
        """Return what counts for it: its use as the router knows it, the rest as the ledger does."""
        model = resident.candidate.model
        holder = self._models.get(model)
        return Standing(
            name=model,
            priority=Priority.NORMAL if holder is None else holder.priority,
            last_used_at=NEVER if holder is None else holder.last_used_at,
            in_use=resident.is_wanted,
            pinned=resident.candidate.pinned or (holder is not None and holder.pinned),
            turn_left=turn_left,
            loss=loss,
        )

    def fits(self, candidate: Candidate) -> bool:
        """Whether it probably fits beside all holders."""
        is_known = candidate.model not in self._doubted or not self._residents
        return candidate.memory_bytes <= self.free_bytes and is_known

    def could_ever_fit(self, candidate: Candidate) -> bool:
        """Whether it would fit on an empty host."""
        return candidate.memory_bytes <= self.memory.total_bytes

    def victims(
        self, candidate: Candidate, among: Iterable[Resident], price: Callable[[Resident], tuple[float, float]]
    ) -> tuple[Resident, ...] | None:
        """Return those of `among` to evict for it, none needlessly; None: all together are not enough.

        `price`: the time left of a resident's turn, and what its eviction costs.
        """
        if candidate.model in self._doubted:
            return self._all_on_its_devices(candidate, among)
        return victims(
            among,
            self.free_bytes,
            standing=lambda each: self._standing(each, *price(each)),
            fits=lambda free: candidate.memory_bytes <= free,
            freed=lambda free, each, sign: free + sign * self.bytes_of(each),
        )

    def _all_on_its_devices(self, candidate: Candidate, among: Iterable[Resident]) -> tuple[Resident, ...]:
        """Return its runner's residents if they hold enough, else all; the ledger evicts only as many as needed."""
        able = [resident for resident in among if self.bytes_of(resident) > 0]
        own = [resident for resident in able if resident.candidate.runner == candidate.runner]
        held_by_own = sum(self.bytes_of(resident) for resident in own)
        return tuple(own if held_by_own >= candidate.memory_bytes else able)

    def has_booked(self, candidate: Candidate) -> bool:
        """Whether the ledger has a lease for it that is not being released."""
        holder = self._models.get(candidate.model)
        return holder is not None and not holder.is_leaving

    def reserve(self, candidate: Candidate, victims: Iterable[CandidateKey], *, is_booked: bool = False) -> None:
        """Reserve memory from its victims and from free memory; a load with a lease needs none."""
        victims = tuple(victims)
        self._reserved.update(victims)
        if not is_booked:
            given = sum(self._held_by(model) for model, _, _ in victims)
            self.free_bytes -= max(0, candidate.memory_bytes - given)

    def _held_by(self, model: str) -> int:
        """Return the memory that a victim holds, even while it is being released."""
        resident, holder = self._residents.get(model), self._models.get(model)
        if holder is not None:
            return holder.held_bytes
        return 0 if resident is None else resident.candidate.memory_bytes

    def unevictable(self) -> list[MemoryHolder]:
        """Return the holders that are never evicted (programs, pinned and unowned models), the largest first."""
        pinned = {model for model, resident in self._residents.items() if self._standing(resident).pinned}
        kept = [
            each
            for each in self.memory.holders
            if not each.is_leaving and (not each.is_model or each.pinned or each.unowned or each.name in pinned)
        ]
        return sorted(kept, key=lambda holder: (-holder.held_bytes, holder.name))

    def is_blocked_for_good(self, candidate: Candidate) -> bool:
        """Whether it would not fit even if every evictable model were evicted."""
        kept = sum(holder.held_bytes for holder in self.unevictable())
        return candidate.memory_bytes > self.memory.total_bytes - kept - self.unleased_bytes()

    def in_transition(self) -> list[MemoryHolder]:
        """Return the holders that are not ready: models that load, and holders that release their memory."""
        return [
            holder
            for holder in self.memory.holders
            if holder.is_leaving
            or (holder.is_model and not holder.pinned and not holder.unowned and holder.name not in self._residents)
        ]

    def unleased_bytes(self) -> int:
        """Return the memory of processes without a lease."""
        held = sum(holder.held_bytes for holder in self.memory.holders)
        return max(0, self.memory.total_bytes - self.memory.free_bytes - held)


MAX_HOLDERS_NAMED = 4
MAX_HOLDER_CHARS = 64
"""Maximum length of a holder's name in a message; programs choose their own names."""


def held_until_idle(candidate: Candidate, host: str, victims: Sequence[Resident]) -> str:
    """Return the message for memory whose holders are evicted once they are idle, and no results of tools are due."""
    names = _some([victim.candidate.model for victim in victims])
    is_for_tools = bool(victims) and all(each.awaits_tools and not each.is_wanted for each in victims)
    until = "for an agent whose tools run" if is_for_tools else "until idle"
    return f"{_needs(candidate, host)}, held by {names} {until}"


def held_for_good(candidate: Candidate, space: HostSpace) -> str:
    """Return the message for memory whose holders are never evicted."""
    holders = [f"{_short(holder.name)} ({_why_kept(holder)})" for holder in space.unevictable()]
    unleased = space.unleased_bytes()
    if unleased:
        holders.append(f"processes without a lease ({size_words(unleased)})")
    return f"{_needs(candidate, space.host)}, held by {_some(holders)}"


def held_by_other_loads(candidate: Candidate, space: HostSpace, before: Sequence[str]) -> str:
    """Return the message for memory that earlier loads (of the models `before`) get, or that is being released."""
    moving = [holder for holder in space.in_transition() if holder.name not in before]
    holders = [f"{model} (loaded before it)" for model in before]
    holders += [f"{_short(holder.name)} ({_doing(holder, space)})" for holder in moving]
    if not holders:
        return f"{_needs(candidate, space.host)}, promised to models that are loaded before it"
    return f"{_needs(candidate, space.host)}, held by {_some(holders)}"


def _doing(holder: MemoryHolder, space: HostSpace) -> str:
    """Return what a model that is not ready does with its memory; see `_doing` of the registry."""
    if holder.is_leaving:
        return "unloading"
    if holder.is_lost:
        return "no heartbeat"
    if holder.name in space.loading:
        return "loading"
    return "busy" if holder.active_requests else "idle"


def refused_lately(candidate: Candidate, seconds: float) -> str:
    """Return the message for a host that recently had no memory for the model."""
    again = f"requested again in {seconds:.0f} s"
    if not candidate.memory_bytes:
        return f"VRAM: {candidate.model} did not fit on {candidate.host or candidate.runner} a moment ago, {again}"
    return f"{_needs(candidate, candidate.host)}; not available a moment ago, {again}"


def _why_kept(holder: MemoryHolder) -> str:
    if not holder.is_model:
        return "a program"
    if holder.is_lost:
        return "no heartbeat"
    return "unowned" if holder.unowned else "pinned"


def _needs(candidate: Candidate, host: str) -> str:
    return f"VRAM: needs {size_words(candidate.memory_bytes)} on {host}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_HOLDERS_NAMED} more" if len(names) > MAX_HOLDERS_NAMED else ""
    return ", ".join(names[:MAX_HOLDERS_NAMED]) + more


def _short(name: str) -> str:
    return name if len(name) <= MAX_HOLDER_CHARS else name[: MAX_HOLDER_CHARS - 3] + "..."
