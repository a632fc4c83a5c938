"""Who waits for a target of which nothing is loaded, and how long until a load begins for it."""

from dataclasses import dataclass, field

from router_svc.policy.arrival import Arrival
from router_svc.simulation.hosts import Instance, Phase
from router_svc.simulation.tallies import Tallies
from router_svc.simulation.targets import Targets
from weft.kernel.request import Priority

_AWAKE = frozenset({Phase.CLAIMING, Phase.LOADING, Phase.READY})


@dataclass(slots=True, eq=False)
class _Line:
    members: tuple[Instance, ...]
    awake: int
    wanted_since: float = 0.0
    """While nothing of it is loaded and somebody waits: since when that is so, whoever it was who waited."""
    waiting: set[int] = field(default_factory=set)
    """Who waits, by key."""


class ColdLines:
    """One line for each target, apart for those who may leave the premises and those who may not."""

    def __init__(self, targets: Targets, tallies: Tallies) -> None:
        self._targets = targets
        self._tallies = tallies
        self._lines: dict[tuple[str, bool], _Line] = {}
        self._lines_of: dict[str, list[_Line]] = {}
        self._awake: dict[str, bool] = {}

    def waits(self, arrival: Arrival, now: float) -> None:
        """A request waits from now on. For durable ones there is no bound on the wait for a load."""
        if arrival.priority is Priority.DURABLE:
            return
        line = self._line(arrival)
        if not line.waiting:
            line.wanted_since = now
        line.waiting.add(arrival.key)

    def no_longer_waits(self, arrival: Arrival) -> None:
        """It runs, or is over."""
        self._line(arrival).waiting.discard(arrival.key)

    def woken(self, instance: Instance, now: float) -> None:
        """A load of it begins."""
        for line in self._lines_of.get(instance.name, ()):
            if not line.awake and line.waiting:
                self._tallies.cold_waits.append(now - line.wanted_since)

    def changed(self, instance: Instance, now: float) -> None:
        """It is in another state."""
        awake = _is_awake(instance)
        if self._awake.get(instance.name, awake) != awake:
            for line in self._lines_of.get(instance.name, ()):
                line.awake += 1 if awake else -1
                if not line.awake:
                    line.wanted_since = now
        self._awake[instance.name] = awake

    def _line(self, arrival: Arrival) -> _Line:
        key = (arrival.target, arrival.needs.allow_remote)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = self._make(arrival)
        return line

    def _make(self, arrival: Arrival) -> _Line:
        members = self._targets.members(arrival.target)
        if not arrival.needs.allow_remote:
            members = tuple(member for member in members if not member.kind.remote)
        line = _Line(members, sum(map(_is_awake, members)))
        for member in members:
            self._lines_of.setdefault(member.name, []).append(line)
            self._awake[member.name] = _is_awake(member)
        return line


def _is_awake(instance: Instance) -> bool:
    return instance.host.is_up and instance.phase in _AWAKE
