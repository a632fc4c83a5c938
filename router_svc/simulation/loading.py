"""Models that are loaded and give way: what runners and the registry's book of memory do."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate

from router_svc.policy.decisions import WakeFailure
from router_svc.simulation.events import Events
from router_svc.simulation.hosts import Host, Instance, Phase
from router_svc.simulation.scenario import Delays
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority


class Loader:
    """Loads and unloads.

    Who gives way is decided as in the registry: idle, not pinned, of no higher band; lower bands first, then the
    longest unused.
    """

    def __init__(self, events: Events, delays: Delays, seed: int, changed: Callable[[Instance], None]) -> None:
        self._events = events
        self._delays = delays
        self._seed = seed
        self._changed = changed
        self.loads = 0
        """Loads that were begun."""
        self.swaps = 0
        """Loads for which another model had to give way."""

    def wake(self, instance: Instance, band: Priority) -> WakeFailure | None:
        """Begin to load it unless that is under way; returns why it cannot be. One that stops must have stopped."""
        assert instance.phase is not Phase.STOPPING, "who stops is woken afterwards"
        host = instance.host
        if not host.is_up:
            return WakeFailure(reason=Reason.WAKE_FAILED, message="its runner is gone")
        if instance.phase is not Phase.ASLEEP:
            return None
        victims = self.victims(instance, band)
        if victims is None:
            return WakeFailure(
                reason=Reason.INSUFFICIENT_MEMORY, message=f"{host.name} has no memory for {instance.name}"
            )
        self.loads += 1
        self.swaps += bool(victims)
        host.note(self._events.now)
        host.loading += 1
        self._move(instance, Phase.CLAIMING)
        host.claims.append(instance)
        for victim in victims:
            self.unload(victim)
        self._grant(host)
        return None

    def withdraw(self, instance: Instance) -> WakeFailure | None:
        """End its wait for memory; returns how its wake ends. None: it does not wait, and goes on."""
        host = instance.host
        if instance not in host.claims:
            return None
        host.claims.remove(instance)
        host.loading -= 1
        self._move(instance, Phase.ASLEEP)
        self._grant(host)
        return WakeFailure(reason=Reason.INSUFFICIENT_MEMORY, message=f"{instance.name} got no memory on {host.name}")

    def victims(self, instance: Instance, band: Priority) -> list[Instance] | None:
        """Who must give way so that it fits, besides those who already do; None: it would not fit even then."""
        host, wanted = instance.host, instance.kind.memory_bytes
        if not wanted or not host.has_book:
            return []
        missing = wanted - self._promised(host)
        if missing <= 0:
            return []
        idle = [
            other
            for other in host.instances
            if other.phase is Phase.READY
            and not other.active
            and not other.kind.pinned
            and other.kind.memory_bytes
            and other.last_band >= band
        ]
        idle.sort(key=lambda other: (-other.last_band, other.last_used_at, other.name))
        for count, given_up in enumerate(accumulate(other.kind.memory_bytes for other in idle), start=1):
            if given_up >= missing:
                return idle[:count]
        return None

    def unload(self, instance: Instance) -> None:
        """Put a loaded model that does nothing to sleep."""
        assert instance.phase is Phase.READY, "only a loaded model is unloaded"
        assert not instance.active, "only an idle model is unloaded"
        self._move(instance, Phase.STOPPING)
        self._events.after(self._delays.unload_seconds, partial(self._unloaded, instance, instance.life))

    def host_died(self, host: Host) -> None:
        """Nothing is loaded there any more."""
        host.loading = 0
        host.claims.clear()
        for instance in host.instances:
            instance.sessions.clear()
            self._move(instance, Phase.ASLEEP)

    def _promised(self, host: Host) -> int:
        """What is free, or will be without anybody's doing, and nobody claimed before."""
        leaving = sum(other.holds() for other in host.instances if other.phase is Phase.STOPPING)
        return host.free_bytes() + leaving - sum(other.kind.memory_bytes for other in host.claims)

    def _unloaded(self, instance: Instance, life: int) -> None:
        if instance.life == life:
            instance.sessions.clear()
            self._move(instance, Phase.ASLEEP)
            self._grant(instance.host)

    def _grant(self, host: Host) -> None:
        """Begin the loads whose memory is there, in the order in which they were asked for."""
        while host.claims:
            instance = host.claims[0]
            if host.has_book and instance.kind.memory_bytes > host.free_bytes():
                return
            host.claims.pop(0)
            self._begin(instance)

    def _begin(self, instance: Instance) -> None:
        seconds = instance.draw_load_seconds(self._seed) * instance.host.slowness
        instance.loads += 1
        self._move(instance, Phase.LOADING)
        self._events.after(seconds, partial(self._loaded, instance, instance.life, seconds))

    def _loaded(self, instance: Instance, life: int, seconds: float) -> None:
        if instance.life == life:
            instance.last_load_seconds = seconds
            instance.host.note(self._events.now)
            instance.host.loading -= 1
            instance.last_used_at = self._events.now
            self._move(instance, Phase.READY)

    def _move(self, instance: Instance, phase: Phase) -> None:
        instance.phase = phase
        instance.life += 1
        self._changed(instance)
