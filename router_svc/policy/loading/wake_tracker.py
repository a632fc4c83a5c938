"""The wakes under way and what is known of earlier ones.

A model lives on one runner at a time, and which one may change while it wakes: the host comes back, its runner has
another incarnation, or a name for the first time. So wakes go by model, and there is at most one of each.
"""

from collections.abc import Callable
from dataclasses import dataclass

from router_svc.policy.decisions import Wakes
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from weft.kernel.request import Priority

MAX_ESTIMATED_PROGRESS = 0.95
"""An estimate never says that it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeStatus:
    """How far a wake is, in whole seconds, so that telling it over and over says something new once per second."""

    elapsed_seconds: int
    max_wait_seconds: float
    progress: float | None
    """Estimated from how long the model's last wake took, or what it usually takes; None: nobody knows that."""
    eta_seconds: float | None
    """The same estimate; None also when this wake takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledWakes:
    """Wakes that were said to have succeeded, and what the fleet shows of them."""

    ready: tuple[tuple[Candidate, float], ...] = ()
    """What became ready, as it slept, and in how many seconds."""
    unsettled: tuple[str, ...] = ()
    """Models that are not ready in time."""
    loading: tuple[str, ...] = ()
    """Models that still load when they should be ready. They are waited for like any other that loads."""


@dataclass(slots=True, kw_only=True)
class _Wake:
    candidate: Candidate
    started_at: float
    woken_at: float | None = None
    """When it was said to have succeeded, which the fleet still has to confirm."""


class WakeTracker:
    """Remembers; the scheduler decides. Holds one entry per model of the fleet at most."""

    def __init__(self, settle_seconds: float) -> None:
        self._settle_seconds = settle_seconds
        self._under_way: dict[str, _Wake] = {}
        self._woken: set[str] = set()
        """Of those, the ones that were said to have succeeded."""
        self._last_took_seconds: dict[str, float] = {}
        self._failed_last: set[str] = set()

    def is_waking(self, candidate: Candidate) -> bool:
        """Whether its model is being woken, or was and is not reported ready yet."""
        return candidate.readiness is not Readiness.READY and candidate.model in self._under_way

    def is_under_way(self, model: str) -> bool:
        """Whether a wake of this model has not ended, or is not confirmed by the fleet."""
        return model in self._under_way

    def began_at(self, model: str) -> float | None:
        """When the wake of this model that is under way was begun; None: none is."""
        wake = self._under_way.get(model)
        return None if wake is None else wake.started_at

    @property
    def under_way(self) -> tuple[Candidate, ...]:
        """All of them, as they were when their wakes were begun."""
        return tuple(wake.candidate for wake in self._under_way.values())

    def failed_last(self, model: str) -> bool:
        """Whether the model's last wake failed: another one is preferred."""
        return model in self._failed_last

    def begin(
        self,
        candidate: Candidate,
        now: float,
        *,
        doubted: bool = False,
        priority: Priority = Priority.NORMAL,
        why: str = "",
    ) -> Wakes:
        """Wake it; it must not be waking already. `doubted`, `priority`, `why`: see Wakes."""
        assert candidate.model not in self._under_way, "a model is woken once at a time"
        self._under_way[candidate.model] = _Wake(candidate=candidate, started_at=now)
        return Wakes(
            model=candidate.model,
            runner=candidate.runner,
            max_wait_seconds=candidate.max_wake_seconds,
            doubted=doubted,
            priority=priority,
            why=why,
        )

    def note_woken(self, model: str, now: float) -> None:
        """It was woken. From here on the fleet must show it ready within the settle time."""
        wake = self._under_way.get(model)
        if wake is not None and wake.woken_at is None:
            wake.woken_at = now
            self._woken.add(model)

    def note_failed(self, model: str) -> None:
        """It was not woken, and sleeps on."""
        self._woken.discard(model)
        if self._under_way.pop(model, None) is not None:
            self._failed_last.add(model)

    def note_put_off(self, model: str) -> None:
        """It could not be woken for now, which says nothing about it."""
        self._woken.discard(model)
        self._under_way.pop(model, None)

    def settle(self, readiness_of: Callable[[str], Readiness | None], now: float) -> SettledWakes | None:
        """End what was woken and is ready, or is not ready in time; None: nothing of the kind."""
        if not self._woken:
            return None
        ready: list[tuple[Candidate, float]] = []
        unsettled: list[str] = []
        loading: list[str] = []
        for model in tuple(self._woken):
            wake = self._under_way[model]
            assert wake.woken_at is not None, "only what was woken settles"
            state = readiness_of(model)
            if state is Readiness.READY:
                took = wake.woken_at - wake.started_at
                self._last_took_seconds[model] = took
                self._failed_last.discard(model)
                ready.append((wake.candidate, took))
            elif now < wake.woken_at + self._settle_seconds:
                continue
            else:
                (loading if state is Readiness.LOADING else unsettled).append(model)
            self._woken.discard(model)
            if model not in unsettled:
                del self._under_way[model]
        if not (ready or unsettled or loading):
            return None
        return SettledWakes(ready=tuple(ready), unsettled=tuple(unsettled), loading=tuple(loading))

    def status(self, model: str, now: float, usual_seconds: float | None = None) -> WakeStatus:
        """How far the wake of this model is; it must be waking. `usual_seconds`: of a load, for one never woken."""
        wake = self._under_way[model]
        elapsed = max(0, int(now - wake.started_at))
        took = self._last_took_seconds.get(model) if usual_seconds is None else usual_seconds
        return WakeStatus(
            elapsed_seconds=elapsed,
            max_wait_seconds=wake.candidate.max_wake_seconds,
            progress=None if took is None else min(MAX_ESTIMATED_PROGRESS, elapsed / max(took, 1.0)),
            eta_seconds=took - elapsed if took is not None and took > elapsed else None,
        )

    def forget(self, model: str) -> None:
        """Drop the history of a model that is gone. A wake under way stays until its end is told."""
        self._failed_last.discard(model)
        self._last_took_seconds.pop(model, None)
