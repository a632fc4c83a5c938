"""Whether a load fits on a host, and who would have to give way for it. Counts bytes; the ledger has the last word."""

from collections.abc import Callable, Container, Iterable, Sequence

from router_svc.policy.endpoints.candidates import Candidate, CandidateKey
from router_svc.policy.endpoints.host_memory import HostMemory, MemoryHolder
from router_svc.policy.loading.load_plan import Resident
from weft.kernel.units import size_words


class HostSpace:
    """The memory of one host while loads are planned. What is reserved for one load is not there for the next.

    The book is seconds old: what takes requests and is not in it yet counts as held. `doubted`: models that did not get
    what it said was free, since their runner may not use all devices of the host.
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
        """Models that load, by their runners' word."""
        self._models = {holder.name: holder for holder in memory.holders if holder.is_model}
        self._residents = {resident.candidate.model: resident for resident in residents}
        self._doubted = doubted
        self._spoken_for: set[CandidateKey] = set()
        self.free_bytes = memory.free_bytes - sum(
            resident.candidate.memory_bytes for resident in residents if resident.candidate.model not in self._models
        )

    @property
    def host(self) -> str:
        """Its name."""
        return self.memory.host

    def bytes_of(self, resident: Resident) -> int:
        """What comes free when it gives way."""
        return self._held_by(resident.candidate.model)

    def is_evictable(self, resident: Resident) -> bool:
        """Whether it may be asked to, and no other load counts on its memory already."""
        return resident.candidate.key not in self._spoken_for and not self.is_pinned(resident)

    def is_pinned(self, resident: Resident) -> bool:
        """By its runner's word or by the book's."""
        holder = self._models.get(resident.candidate.model)
        return resident.candidate.pinned or (holder is not None and holder.pinned)

    def fits(self, candidate: Candidate) -> bool:
        """Whether it fits beside everything that is there, as far as that is known."""
        is_known = candidate.model not in self._doubted or not self._residents
        return candidate.memory_bytes <= self.free_bytes and is_known

    def could_ever_fit(self, candidate: Candidate) -> bool:
        """Whether it would fit if nobody held anything."""
        return candidate.memory_bytes <= self.memory.total_bytes

    def victims(
        self, candidate: Candidate, among: Iterable[Resident], price: Callable[[Resident], tuple[float, float]]
    ) -> tuple[Resident, ...] | None:
        """Who of `among` gives way for it: the cheapest, and nobody in vain. None: not even all of them are enough."""
        if candidate.model in self._doubted:
            return self._whoever_may_be_on_its_devices(candidate, among)
        missing = candidate.memory_bytes - self.free_bytes
        chosen: list[Resident] = []
        for resident in sorted(among, key=lambda each: (price(each), each.candidate.model)):
            if missing <= 0:
                break
            if self.bytes_of(resident) > 0:
                chosen.append(resident)
                missing -= self.bytes_of(resident)
        if missing > 0:
            return None
        for resident in chosen[::-1]:
            if missing + self.bytes_of(resident) <= 0:
                chosen.remove(resident)
                missing += self.bytes_of(resident)
        return tuple(chosen)

    def _whoever_may_be_on_its_devices(self, candidate: Candidate, among: Iterable[Resident]) -> tuple[Resident, ...]:
        """Those of its runner if they hold enough, else everybody; the ledger evicts only whom it needs."""
        able = [resident for resident in among if self.bytes_of(resident) > 0]
        own = [resident for resident in able if resident.candidate.runner == candidate.runner]
        held_by_own = sum(self.bytes_of(resident) for resident in own)
        return tuple(own if held_by_own >= candidate.memory_bytes else able)

    def has_booked(self, candidate: Candidate) -> bool:
        """Whether the book has a lease for it that it keeps."""
        holder = self._models.get(candidate.model)
        return holder is not None and not holder.is_leaving

    def reserve(self, candidate: Candidate, victims: Iterable[CandidateKey], *, is_booked: bool = False) -> None:
        """Keep room for it, made of what its victims hold and of free memory; one that is in the book needs none."""
        victims = tuple(victims)
        self._spoken_for.update(victims)
        if not is_booked:
            given = sum(self._held_by(model) for model, _, _ in victims)
            self.free_bytes -= max(0, candidate.memory_bytes - given)

    def _held_by(self, model: str) -> int:
        """What a victim holds, also when it takes no requests any more and its memory is on its way back."""
        resident, holder = self._residents.get(model), self._models.get(model)
        if holder is not None:
            return holder.held_bytes
        return 0 if resident is None else resident.candidate.memory_bytes

    def unevictable(self) -> list[MemoryHolder]:
        """Holders that give way for nobody: programs, pinned and unowned models, the largest first."""
        pinned = {model for model, resident in self._residents.items() if self.is_pinned(resident)}
        kept = [
            each
            for each in self.memory.holders
            if not each.is_leaving and (not each.is_model or each.pinned or each.unowned or each.name in pinned)
        ]
        return sorted(kept, key=lambda holder: (-holder.held_bytes, holder.name))

    def is_blocked_for_good(self, candidate: Candidate) -> bool:
        """Whether it would not fit even if all gave way that ever do."""
        kept = sum(holder.held_bytes for holder in self.unevictable())
        return candidate.memory_bytes > self.memory.total_bytes - kept - self.unleased_bytes()

    def in_transition(self) -> list[MemoryHolder]:
        """Who holds memory and takes no requests: models that load, and whoever is on its way out."""
        return [
            holder
            for holder in self.memory.holders
            if holder.is_leaving
            or (holder.is_model and not holder.pinned and not holder.unowned and holder.name not in self._residents)
        ]

    def unleased_bytes(self) -> int:
        """What processes hold that have no lease."""
        held = sum(holder.held_bytes for holder in self.memory.holders)
        return max(0, self.memory.total_bytes - self.memory.free_bytes - held)


MAX_HOLDERS_NAMED = 4
MAX_HOLDER_CHARS = 64
"""What is told of a holder's name; programs call themselves what they like."""


def held_until_idle(candidate: Candidate, host: str, victims: Sequence[Resident]) -> str:
    """Others hold it that give way in time."""
    names = _some([victim.candidate.model for victim in victims])
    return f"{_needs(candidate, host)}, held by {names} until idle"


def held_for_good(candidate: Candidate, space: HostSpace) -> str:
    """Others hold it that give way for nobody."""
    words = [f"{_short(holder.name)} ({_why_kept(holder)})" for holder in space.unevictable()]
    unleased = space.unleased_bytes()
    if unleased:
        words.append(f"processes without a lease ({size_words(unleased)})")
    return f"{_needs(candidate, space.host)}, held by {_some(words)}"


def held_by_other_loads(candidate: Candidate, space: HostSpace, before: Sequence[str]) -> str:
    """Loads that were decided earlier come first (`before`: their models), or somebody is still on its way out."""
    moving = [holder for holder in space.in_transition() if holder.name not in before]
    words = [f"{model} (loaded before it)" for model in before]
    words += [f"{_short(holder.name)} ({_doing(holder, space)})" for holder in moving]
    if not words:
        return f"{_needs(candidate, space.host)}, promised to models that are loaded before it"
    return f"{_needs(candidate, space.host)}, held by {_some(words)}"


def _doing(holder: MemoryHolder, space: HostSpace) -> str:
    """What a model that takes no requests does with its memory, as far as it is known; see `_doing` of the registry."""
    if holder.is_leaving:
        return "unloading"
    if holder.is_lost:
        return "not heard of"
    if holder.name in space.loading:
        return "loading"
    return "busy" if holder.active_requests else "idle"


def refused_lately(candidate: Candidate, seconds: float) -> str:
    """Its host had no room after all."""
    again = f"asked for again in {seconds:.0f} s"
    if not candidate.memory_bytes:
        return f"VRAM: {candidate.model} did not fit on {candidate.host or candidate.runner} a moment ago; {again}"
    return f"{_needs(candidate, candidate.host)}, which were not there a moment ago; {again}"


def _why_kept(holder: MemoryHolder) -> str:
    if not holder.is_model:
        return "a program"
    if holder.is_lost:
        return "not heard of"
    return "unowned" if holder.unowned else "pinned"


def _needs(candidate: Candidate, host: str) -> str:
    return f"VRAM: needs {size_words(candidate.memory_bytes)} on {host}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_HOLDERS_NAMED} more" if len(names) > MAX_HOLDERS_NAMED else ""
    return ", ".join(names[:MAX_HOLDERS_NAMED]) + more


def _short(name: str) -> str:
    return name if len(name) <= MAX_HOLDER_CHARS else name[: MAX_HOLDER_CHARS - 3] + "..."
