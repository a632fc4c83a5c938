"""How much busier an endpoint is than its granted slots show, by its engine's own figures.

- Requests that others sent to the engine count like granted ones.
- A slot whose request waits inside the engine does not count as a slot.
- An engine has no more slots than its KV cache has room for: 8 if 6 requests use 75 % of it.

So no request counts twice. Missing or old figures change nothing. Figures only order endpoints: they never cause a
refusal or close an endpoint.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """The last reported figures of an engine that has requests."""

    sampled_at: float
    """Seconds on the runner's clock. Compared only with its other samples: a newer one renews the figures."""
    running: int = 0
    """Requests that the engine computes, from all senders."""
    waiting: int = 0
    """Requests that wait in the engine, from all senders."""
    others: int = 0
    """Running and waiting requests from senders other than its runner."""
    cache_share: float = 0.0
    """Used share of its KV cache; 0: also if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine's figures mean for the load of its endpoint."""

    others: int = 0
    """Requests that count in addition to granted ones."""
    waiting: int = 0
    """Slots that do not count."""
    room: int | None = None
    """Requests for which its KV cache has room; None: unknown."""

    def slots(self, slots: int) -> int:
        """Return how many of an endpoint's slots count, at least 1."""
        counted = slots - self.waiting
        return max(1, counted if self.room is None else min(counted, self.room))

    def used_share(self, granted: int, slots: int) -> float:
        """Return the used share of an endpoint's slots."""
        return (granted + self.others) / self.slots(slots)

    def explanation(self, slots: int) -> str:
        """Return why an endpoint counts as busier than its slots show, as text; empty: it does not."""
        if self is NO_ENGINE_LOAD:
            return ""
        facts = (
            _counted(self.waiting, "waits in its engine", "wait in its engine"),
            _counted(self.others, "of others is in its engine", "of others are in its engine"),
            f"its KV cache has room for {self.room}" if self.room is not None and self.room < slots else "",
        )
        return ", ".join(fact for fact in facts if fact)


NO_ENGINE_LOAD = EngineLoad()


def engine_load(figures: EngineFigures | None) -> EngineLoad:
    """Return the load that an engine's figures show; none without figures."""
    if figures is None:
        return NO_ENGINE_LOAD
    share = figures.cache_share
    room = max(1, int(figures.running / share)) if share > 0 and figures.running else None
    return EngineLoad(others=figures.others, waiting=figures.waiting, room=room)


def _counted(count: int, one: str, several: str) -> str:
    if not count:
        return ""
    return f"1 request {one}" if count == 1 else f"{count} requests {several}"
