"""The wakes under way and what is known of earlier ones.

A model lives on one runner at a time, and which one may change while it wakes: the host comes back, its runner has
another incarnation, or a name for the first time. So wakes go by model, and there is at most one of each.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router_svc.policy.candidates import Candidate, Fleet, Readiness
from router_svc.policy.decisions import Wakes
from weft.kernel.request import Priority

MAX_ESTIMATED_PROGRESS = 0.95
"""An estimate never says that it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeStatus:
    """How far a wake is, in whole seconds, so that telling it over and over says something new once per second."""

    elapsed_seconds: int
    max_wait_seconds: float
    progress: float | None
    """Estimated from how long the model's last wake took; None before its first one succeeded."""
    eta_seconds: float | None
    """The same estimate; None also when this wake takes longer than the last one."""


@dataclass(slots=True, kw_only=True)
class _Wake:
    candidate: Candidate
    started_at: float
    woken_at: float | None = None
    """When it was said to have succeeded, which the fleet still has to confirm."""


class WakeBook:
    """Remembers; the scheduler decides. Holds one entry per model of the fleet at most."""

    def __init__(self, settle_seconds: float) -> None:
        self._settle_seconds = settle_seconds
        self._under_way: dict[str, _Wake] = {}
        self._last_took_seconds: dict[str, float] = {}
        self._failed_last: set[str] = set()

    def is_waking(self, candidate: Candidate) -> bool:
        """Whether its model is being woken, or was and is not reported ready yet."""
        return candidate.readiness is not Readiness.READY and candidate.model in self._under_way

    def preferred(self, asleep: Iterable[Candidate], on_runner: Callable[[Candidate], int]) -> Candidate:
        """Whom to wake: one whose last wake did not fail, then the one on the least loaded runner, then by name."""
        return min(asleep, key=lambda c: (c.model in self._failed_last, on_runner(c), c.model, c.runner))

    def begin(
        self, candidate: Candidate, now: float, *, doubted: bool = False, priority: Priority = Priority.NORMAL
    ) -> Wakes:
        """Wake it; it must not be waking already. `doubted`, `priority`: see Wakes."""
        assert candidate.model not in self._under_way, "a model is woken once at a time"
        self._under_way[candidate.model] = _Wake(candidate=candidate, started_at=now)
        return Wakes(
            model=candidate.model,
            runner=candidate.runner,
            max_wait_seconds=candidate.max_wake_seconds,
            doubted=doubted,
            priority=priority,
        )

    def note_woken(self, model: str, now: float) -> None:
        """It was woken. From here on the fleet must show it ready within the settle time."""
        wake = self._under_way.get(model)
        if wake is not None and wake.woken_at is None:
            wake.woken_at = now

    def note_failed(self, model: str) -> None:
        """It was not woken, and sleeps on."""
        if self._under_way.pop(model, None) is not None:
            self._failed_last.add(model)

    def settle(self, fleet: Fleet, now: float) -> list[str]:
        """End what was woken and is ready; returns the models that were woken but are not ready in time."""
        readiness = {candidate.model: candidate.readiness for candidate in fleet}
        unsettled: list[str] = []
        for model, wake in tuple(self._under_way.items()):
            if wake.woken_at is None:
                continue
            state = readiness.get(model)
            if state is Readiness.READY:
                self._last_took_seconds[model] = wake.woken_at - wake.started_at
                self._failed_last.discard(model)
                del self._under_way[model]
            elif now >= wake.woken_at + self._settle_seconds:
                # One that loads is waited for like any other that loads.
                if state is Readiness.LOADING:
                    del self._under_way[model]
                else:
                    unsettled.append(model)
        return unsettled

    def status(self, model: str, now: float) -> WakeStatus:
        """How far the wake of this model is; it must be waking."""
        wake = self._under_way[model]
        elapsed = max(0, int(now - wake.started_at))
        took = self._last_took_seconds.get(model)
        return WakeStatus(
            elapsed_seconds=elapsed,
            max_wait_seconds=wake.candidate.max_wake_seconds,
            progress=None if took is None else min(MAX_ESTIMATED_PROGRESS, elapsed / max(took, 1.0)),
            eta_seconds=took - elapsed if took is not None and took > elapsed else None,
        )

    def forget_others(self, models: Iterable[str]) -> None:
        """Drop the history of models that are gone. A wake under way stays until its end is told."""
        known = set(models)
        self._failed_last &= known
        self._last_took_seconds = {model: took for model, took in self._last_took_seconds.items() if model in known}
