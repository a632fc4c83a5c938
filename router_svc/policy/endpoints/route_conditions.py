"""Which requests a candidate of a route accepts. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from annotated_types import Ge, Le, MaxLen

from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Skill


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteCondition:
    """The requests that a candidate accepts: those for which everything that is set holds when they arrive."""

    candidate: str
    min_prompt_tokens: Annotated[int, Ge(0)] = 0
    max_prompt_tokens: Annotated[int, Ge(0)] = 0
    """0: no maximum."""
    tools: bool | None = None
    """Whether the request offers tools; None: either."""
    images: bool | None = None
    allow_remote: bool | None = None
    tenants: Annotated[tuple[str, ...], MaxLen(64)] = ()
    """Empty: all."""
    from_hour: Annotated[int, Ge(0), Le(23)] = 0
    """First hour of the day, in UTC ..."""
    to_hour: Annotated[int, Ge(0), Le(24)] = 24
    """... and the hour at which it ends; a lower one is on the next day."""
    labels: frozenset[str] = frozenset()
    """Labels of the request, as KEY=VALUE."""
    runner_labels: frozenset[str] = frozenset()
    """Labels that the candidate's model or runner must have. They choose among runners, so `unmet` ignores them."""
    min_budget: Annotated[float, Ge(0), Le(1)] = 0.0
    """Minimum share of the tightest rate limit window that must be left."""

    def unmet(self, spec: PlacementRequest, arrived: datetime, *, allow_remote: bool, budget_left: float = 1.0) -> str:
        """Return what does not hold for a request that arrived at this time (UTC), as text; empty: it is accepted."""
        if budget_left < self.min_budget:
            return f"takes requests while at least {self.min_budget:.0%} of the rate limit is left"
        return next(self._unmet(spec, arrived, allow_remote=allow_remote), "")

    def _unmet(self, spec: PlacementRequest, arrived: datetime, *, allow_remote: bool) -> Iterator[str]:
        if not self.labels <= spec.labels:
            yield f"takes requests labeled {', '.join(sorted(self.labels))}"
        if spec.prompt_tokens < self.min_prompt_tokens:
            yield f"takes prompts of at least {self.min_prompt_tokens} tokens"
        if self.max_prompt_tokens and spec.prompt_tokens > self.max_prompt_tokens:
            yield f"takes prompts of at most {self.max_prompt_tokens} tokens"
        if self.tools not in (None, Skill.TOOLS in spec.skills or bool(spec.tools)):
            yield f"takes requests {'with' if self.tools else 'without'} tools"
        if self.images not in (None, Skill.IMAGE in spec.skills):
            yield f"takes requests {'with' if self.images else 'without'} images"
        if self.allow_remote not in (None, allow_remote):
            yield f"takes requests that {'allow' if self.allow_remote else 'do not allow'} remote models"
        if self.tenants and spec.tenant not in self.tenants:
            yield f"takes requests of {', '.join(self.tenants)}"
        if not self._is_open_at(arrived.hour):
            yield f"takes requests from {self.from_hour}:00 to {self.to_hour}:00 UTC"

    def _is_open_at(self, hour: int) -> bool:
        if self.from_hour < self.to_hour:
            return self.from_hour <= hour < self.to_hour
        return hour >= self.from_hour or hour < self.to_hour
