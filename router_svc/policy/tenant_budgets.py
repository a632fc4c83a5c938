"""The limits of tenants: what each counts, and which ones apply to a request. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from weft.kernel.values.names import matches
from weft.kernel.values.units import Rate


class LimitSubject(Enum):
    """What a limit counts separately."""

    TENANT = "tenant"
    KEY = "key"
    MODEL = "model"
    """Each name that its requests specify."""


@dataclass(frozen=True, slots=True)
class LimitScope:
    """The requests that a limit counts, and what has a separate window; rates of one scope share window keys."""

    subject: LimitSubject = LimitSubject.TENANT
    model: str = ""
    """Only requests for this name, or with a trailing `*` for this prefix; empty: all."""

    def concerns(self, model: str) -> bool:
        """Whether it counts requests for this name."""
        return not self.model or matches(self.model, model)


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """At most `rate` within `scope`."""

    rate: Rate
    scope: LimitScope = LimitScope()


def by_scope(limits: Sequence[TenantLimit]) -> dict[LimitScope, tuple[Rate, ...]]:
    """Returns the rates of each scope, in order."""
    found: dict[LimitScope, tuple[Rate, ...]] = {}
    for limit in limits:
        found[limit.scope] = (*found.get(limit.scope, ()), limit.rate)
    return found


def over_the_whole(rates: Sequence[Rate]) -> tuple[TenantLimit, ...]:
    """Returns rates as limits over all requests of a tenant."""
    return tuple(TenantLimit(rate) for rate in rates)
