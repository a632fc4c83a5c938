"""In words: which memory a line waits for, and who holds it."""

from collections.abc import Sequence

from router_svc.policy.candidates import Candidate
from router_svc.policy.host_memory import MemoryHolder
from router_svc.policy.load_plan import Resident
from router_svc.policy.memory_gate import HostSpace
from weft.kernel.units import size_words

MAX_HOLDERS_NAMED = 4
MAX_HOLDER_CHARS = 64
"""What is told of a holder's name; programs call themselves what they like."""


def held_until_idle(candidate: Candidate, host: str, victims: Sequence[Resident]) -> str:
    """Others hold it that give way in time."""
    names = _some([victim.candidate.model for victim in victims])
    return f"{_needs(candidate, host)}, held by {names} until idle"


def held_for_good(candidate: Candidate, space: HostSpace) -> str:
    """Others hold it that give way for nobody."""
    words = [f"{_short(holder.name)} ({_why_kept(holder)})" for holder in space.kept_for_good()]
    unleased = space.unleased_bytes()
    if unleased:
        words.append(f"processes without a lease ({size_words(unleased)})")
    return f"{_needs(candidate, space.host)}, held by {_some(words)}"


def held_by_other_loads(candidate: Candidate, space: HostSpace, before: Sequence[str]) -> str:
    """Loads that were decided earlier come first (`before`: their models), or somebody is still on its way out."""
    moving = [holder for holder in space.in_motion() if holder.name not in before]
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
