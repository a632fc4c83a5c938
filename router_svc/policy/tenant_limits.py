"""The limits of tenants: what each counts, and which of them count a request. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from weft.kernel.alias_rules import matches
from weft.kernel.units import Rate


class LimitSubject(Enum):
    """What has its own window."""

    TENANT = "tenant"
    KEY = "key"
    """Each API key of the tenant."""
    MODEL = "model"
    """Each name that its requests ask for."""


@dataclass(frozen=True, slots=True)
class LimitScope:
    """What a limit is of: the rates of one scope have the same windows' keys."""

    subject: LimitSubject = LimitSubject.TENANT
    model: str = ""
    """Only requests for this name, or with `*` at its end for all that begin so; empty: all."""

    def concerns(self, model: str) -> bool:
        """Whether it is of requests for this name."""
        return not self.model or matches(self.model, model)


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """At most `rate` of what `scope` says."""

    rate: Rate
    scope: LimitScope = LimitScope()


def by_scope(limits: Sequence[TenantLimit]) -> dict[LimitScope, tuple[Rate, ...]]:
    """Returns the rates of each scope, in order."""
    found: dict[LimitScope, tuple[Rate, ...]] = {}
    for limit in limits:
        found[limit.scope] = (*found.get(limit.scope, ()), limit.rate)
    return found


def over_the_whole(rates: Sequence[Rate]) -> tuple[TenantLimit, ...]:
    """Returns rates of all requests of a tenant as its limits."""
    return tuple(TenantLimit(rate) for rate in rates)
