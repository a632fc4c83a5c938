"""Tracks wakes under way and the results of earlier ones.

A model's runner may change or become known while it wakes, so wakes are identified by model, at most one per model.
"""

from collections.abc import Callable
from dataclasses import dataclass

from router_svc.policy.endpoints.candidates import Candidate, Readiness

MAX_ESTIMATED_PROGRESS = 0.95
"""An estimate never shows completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeStatus:
    """Progress of a wake, in whole seconds so that its status changes at most once per second."""

    elapsed_seconds: int
    max_wait_seconds: float
    progress: float | None
    """Estimated from the model's last wake or its usual load time; None: unknown."""
    eta_seconds: float | None
    """From the same estimate; None also if the wake takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledWakes:
    """Wakes reported as successful, by what the registry's view shows."""

    ready: tuple[tuple[Candidate, float], ...] = ()
    """Models that became ready, as they were asleep, with the seconds that it took."""
    unsettled: tuple[str, ...] = ()
    """Models that did not become ready in time."""
    loading: tuple[str, ...] = ()
    """Models that are still loading after the settle time; they are treated like any loading model."""


@dataclass(slots=True, kw_only=True)
class _Wake:
    candidate: Candidate
    started_at: float
    woken_at: float | None = None
    """When success was reported; the registry's view has to confirm it."""


class WakeTracker:
    """State of all wakes, at most one per model. It makes no decisions."""

    def __init__(self, settle_seconds: float) -> None:
        self._settle_seconds = settle_seconds
        self.by_model: dict[str, _Wake] = {}
        """Wakes under way. Read-only."""
        self._woken: set[str] = set()
        """Models under way whose wake was reported as successful."""
        self._last_took_seconds: dict[str, float] = {}
        self._failed_last: set[str] = set()

    def is_waking(self, candidate: Candidate) -> bool:
        """Whether its model is being woken, or was woken and is not yet reported ready."""
        return candidate.readiness is not Readiness.READY and candidate.model in self.by_model

    def is_under_way(self, model: str) -> bool:
        """Whether a wake of this model has not ended or is not yet confirmed by the registry's view."""
        return model in self.by_model

    def began_at(self, model: str) -> float | None:
        """Return when the current wake of this model began; None: there is none."""
        wake = self.by_model.get(model)
        return None if wake is None else wake.started_at

    @property
    def under_way(self) -> tuple[Candidate, ...]:
        """The models with a wake under way, as they were when it began."""
        return tuple(wake.candidate for wake in self.by_model.values())

    def failed_last(self, model: str) -> bool:
        """Whether the model's last wake failed, so that others are preferred."""
        return model in self._failed_last

    def begin(self, candidate: Candidate, now: float) -> None:
        """Begin a wake; the model must not have one under way."""
        assert candidate.model not in self.by_model, "a model is woken once at a time"
        self.by_model[candidate.model] = _Wake(candidate=candidate, started_at=now)

    def note_woken(self, model: str, now: float) -> None:
        """Record a reported success, which the registry's view must confirm within the settle time."""
        wake = self.by_model.get(model)
        if wake is not None and wake.woken_at is None:
            wake.woken_at = now
            self._woken.add(model)

    def note_failed(self, model: str) -> None:
        """Record a failed wake."""
        self._woken.discard(model)
        if self.by_model.pop(model, None) is not None:
            self._failed_last.add(model)

    def note_put_off(self, model: str) -> None:
        """Record a wake that is currently impossible, which is no failure of the model."""
        self._woken.discard(model)
        self.by_model.pop(model, None)

    def settle(self, readiness_of: Callable[[str], Readiness | None], now: float) -> SettledWakes | None:
        """End the wakes of models that are ready, or not ready in time; None: there are none."""
        if not self._woken:
            return None
        ready: list[tuple[Candidate, float]] = []
        unsettled: list[str] = []
        loading: list[str] = []
        for model in tuple(self._woken):
            wake = self.by_model[model]
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
                del self.by_model[model]
        if not (ready or unsettled or loading):
            return None
        return SettledWakes(ready=tuple(ready), unsettled=tuple(unsettled), loading=tuple(loading))

    def status(self, model: str, now: float, usual_seconds: float | None = None) -> WakeStatus:
        """Return the progress of a model's wake under way.

        `usual_seconds`: usual load time of a model that was never woken.
        """
        wake = self.by_model[model]
        elapsed = max(0, int(now - wake.started_at))
        took = self._last_took_seconds.get(model) if usual_seconds is None else usual_seconds
        return WakeStatus(
            elapsed_seconds=elapsed,
            max_wait_seconds=wake.candidate.max_wake_seconds,
            progress=None if took is None else min(MAX_ESTIMATED_PROGRESS, elapsed / max(took, 1.0)),
            eta_seconds=took - elapsed if took is not None and took > elapsed else None,
        )

    def forget(self, model: str) -> None:
        """Remove the history of a model that left. A wake under way stays until its end is reported."""
        self._failed_last.discard(model)
        self._last_took_seconds.pop(model, None)
