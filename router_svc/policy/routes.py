"""Routes: ladders of models for one kind of task."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A ladder, best first."""

    name: str
    candidates: tuple[str, ...]
    """Models or pools, by name; the first is the primary."""
    budget_seconds: float | None = None
    """Who would take longer from arrival to end is refused, who has begun is not; None: the request's own deadline."""
    keep_alive_seconds: float | None = None
    """How long the model stays loaded after a request; negative: until it is unloaded; None: as it is configured."""
    pin_primary: bool = False
    """Whether the primary is waited for as long as it is there at all."""
