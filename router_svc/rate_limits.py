"""The rate limits of a router: requests and tokens of tenants, keys, models and clients, counted on arrival."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from router_svc.policy.settings import RateLimitConfig
from router_svc.policy.tenant_limits import LimitScope, LimitSubject, TenantLimit, by_scope, over_the_whole
from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus
from weft.api.router.v1.request_service_pb2 import LimitUse
from weft.dispatch.rate_windows import Claim, RateWindows, TrackedKeys
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.placement_request import PlacementRequest
from weft.kernel.request import Priority
from weft.kernel.timestamps import duration_of
from weft.kernel.units import Rate, RateUnit
from weft.kernel.value import value_class

_TENANT, _CLIENT = "tenant/", "client/"
_BETWEEN = "\0"
"""Separates a tenant from its client, key or model; names cannot contain it."""
NO_KEY = "none"
"""Key of callers without one; ids of real keys have a prefix."""
MAX_LISTED_USES = 10_000


@value_class()
class Counted:
    """What was counted for a request, to be corrected at its end."""

    keys: tuple[tuple[str, Rate], ...]
    """The windows that counted it."""
    tokens: int
    counted_at: float
    """Seconds on the monotonic clock."""
    status: RateLimitStatus | None = None
    """What is left for its caller; None: no limit applies. Read-only."""


NOTHING_COUNTED = Counted((), 0, 0.0)


class _TenantWindows:
    def __init__(self, tenant: str, windows: RateWindows, config: RateLimitConfig, clock: Clock) -> None:
        self._tenant = tenant
        self._windows = windows
        self._max_subjects = config.max_subjects
        self._clock = clock
        self._rates: dict[LimitScope, tuple[Rate, ...]] = {}
        self._tracked: dict[LimitScope, TrackedKeys] = {}
        """Keys or models of each scope with a separate window per key or model."""

    def use(self, limits: Sequence[TenantLimit]) -> None:
        """Replaces the limits; windows with the same scope, unit and length keep their counts."""
        after = by_scope(limits)
        for scope, rates in self._rates.items():
            if scope not in self._tracked:
                kept = {(rate.unit, rate.window_seconds) for rate in after.get(scope, ())}
                for rate in rates:
                    if (rate.unit, rate.window_seconds) not in kept:
                        self._windows.forget(self._whole_key(scope), rate)
        for scope in [scope for scope in self._tracked if scope not in after]:
            self._tracked.pop(scope).forget_all()
        self._rates = after
        for scope, rates in after.items():
            if scope.subject is LimitSubject.TENANT:
                continue
            if scope in self._tracked:
                self._tracked[scope].use(rates)
            else:
                self._tracked[scope] = TrackedKeys(
                    self._windows, rates, self._max_subjects, self._prefix(scope), self._clock
                )

    def claims(self, request: PlacementRequest) -> Iterator[Claim]:
        """Yields what a request claims of each limit that counts it."""
        for scope, rates in self._rates.items():
            if not scope.concerns(request.model):
                continue
            who, about = f"Tenant {self._tenant}", {"per": scope.subject.value}
            if scope.subject is LimitSubject.KEY:
                caller = request.caller or NO_KEY
                key = self._prefix(scope) + self._within(scope, caller)
                who, about = f"{who} with {caller}", about | {"key": caller}
            elif scope.subject is LimitSubject.MODEL:
                key = self._prefix(scope) + self._within(scope, request.model)
                who, about = f"{who} with requests for {request.model}", about | {"model": request.model}
            else:
                key = self._whole_key(scope)
                if scope.model:
                    who, about = f"{who} with requests for {scope.model}", about | {"model": scope.model}
            yield from claims_of(rates, key, who, request.prompt_tokens, about)

    def uses(self) -> Iterator[LimitUse]:
        """Yields the use of each window; windows of keys and models only if they counted something."""
        for scope, rates in self._rates.items():
            tracked = self._tracked.get(scope)
            if tracked is None:
                for rate in rates:
                    yield use_of(self._windows, self._whole_key(scope), rate, tenant=self._tenant, model=scope.model)
                continue
            for name in sorted(tracked.names()):
                what = {"key": name, "model": scope.model} if scope.subject is LimitSubject.KEY else {"model": name}
                for rate in rates:
                    use = use_of(self._windows, self._prefix(scope) + name, rate, tenant=self._tenant, **what)
                    if use.used:
                        yield use

    def _within(self, scope: LimitScope, name: str) -> str:
        return self._tracked[scope].key_of(name).removeprefix(self._prefix(scope))

    def _whole_key(self, scope: LimitScope) -> str:
        # Without a model the key is the same as for a tenant without limits, so that its windows stay if it gets some.
        whole = _TENANT + self._tenant
        return f"{whole}{_BETWEEN}{scope.model}" if scope.model else whole

    def _prefix(self, scope: LimitScope) -> str:
        return f"{_TENANT}{self._tenant}{_BETWEEN}{scope.model}{_BETWEEN}{scope.subject.value}{_BETWEEN}"


class RateLimits:
    """Counts of tenants and clients on the leading router; the next leader begins with empty windows."""

    def __init__(
        self, config: RateLimitConfig, client_rates: Mapping[str, tuple[Rate, ...]], clock: Clock, *, max_clients: int
    ) -> None:
        """`client_rates`: rates of clients with a profile, applied per tenant."""
        self._config = config
        self._client_rates = client_rates
        self._max_clients = max_clients
        self._clock = clock
        self._windows = RateWindows(clock)
        self._tenants = self._tracked_tenants(config)
        self._clients = {client: self._tracked_client(client, rates) for client, rates in client_rates.items()}
        self._declared: Mapping[str, tuple[TenantLimit, ...] | None] = {}
        self._named: dict[str, _TenantWindows] = {}
        """Tenants with declared or configured limits; others have the default."""
        self._name_tenants()

    def reconfigure(self, config: RateLimitConfig, client_rates: Mapping[str, tuple[Rate, ...]]) -> None:
        """Replaces the rates. Windows that stay keep their counts."""
        before, self._config = self._config, config
        if before.max_tenants != config.max_tenants:
            self._tenants.forget_all()
            self._tenants = self._tracked_tenants(config)
        elif before.default != config.default:
            self._tenants.use(config.default)
        for client in [each for each in self._clients if each not in client_rates]:
            self._clients.pop(client).forget_all()
        for client, rates in client_rates.items():
            if client in self._clients:
                self._clients[client].use(rates)
            else:
                self._clients[client] = self._tracked_client(client, rates)
        self._client_rates = client_rates
        if before.max_subjects != config.max_subjects:
            for known in self._named.values():
                known.use(())
            self._named.clear()
        self._name_tenants()

    def declare(self, tenants: Mapping[str, tuple[TenantLimit, ...] | None]) -> None:
        """Overrides the configured limits of tenants; None: the default."""
        self._declared = tenants
        self._name_tenants()

    def _name_tenants(self) -> None:
        wanted: dict[str, tuple[TenantLimit, ...]] = {
            name: over_the_whole(rates) for name, rates in self._config.tenants.items() if name not in self._declared
        }
        wanted |= {name: limits for name, limits in self._declared.items() if limits is not None}
        for name in [name for name in self._named if name not in wanted]:
            # Its windows over the whole tenant keep counting if the default has windows of the same length.
            gone, own = self._named.pop(name), self._tenants.key_of(name) == _TENANT + name
            gone.use(over_the_whole(self._config.default) if own else ())
        for name, limits in wanted.items():
            known = self._named.get(name)
            if known is None:
                known = self._named[name] = _TenantWindows(name, self._windows, self._config, self._clock)
                known.use(over_the_whole(self._config.default if self._tenants.release(name) else ()))
            known.use(limits)

    def _tracked_tenants(self, config: RateLimitConfig) -> TrackedKeys:
        return TrackedKeys(self._windows, config.default, config.max_tenants, _TENANT, self._clock)

    def _tracked_client(self, client: str, rates: tuple[Rate, ...]) -> TrackedKeys:
        return TrackedKeys(self._windows, rates, self._max_clients, f"{_CLIENT}{client}{_BETWEEN}", self._clock)

    def take(self, request: PlacementRequest, *, with_client: bool = True) -> Counted:
        """Count a request and its estimated prompt tokens for its tenant and, with `with_client`, its client.

        Raises RATE_LIMIT_EXCEEDED naming the tenant, the limit and its window if it exceeds one; see
        `weft.dispatch.rate_windows`.
        """
        claims = self._claims(request, with_client=with_client)
        if not claims:
            return NOTHING_COUNTED
        try:
            counted_at = self._windows.take(claims)
        except WeftError as error:
            error.metadata["tenant"] = request.tenant
            raise
        keys = tuple((claim.key, claim.rate) for claim in claims)
        return Counted(keys, request.prompt_tokens, counted_at, self._windows.status(claims))

    def correct(self, counted: Counted, tokens: int) -> None:
        """Correct the count of a finished request to the tokens that it used."""
        if tokens != counted.tokens:
            for key, rate in counted.keys:
                if rate.unit is RateUnit.TOKENS:
                    self._windows.correct(key, rate, tokens - counted.tokens, counted_at=counted.counted_at)

    def give_back(self, counted: Counted) -> None:
        """Revert everything that was counted for a request."""
        for key, rate in counted.keys:
            amount = counted.tokens if rate.unit is RateUnit.TOKENS else 1
            self._windows.correct(key, rate, -amount, counted_at=counted.counted_at)

    def uses(self, tenant: str = "") -> list[LimitUse]:
        """Returns the use of a tenant's limits, or of all if empty; at most MAX_LISTED_USES."""
        return list(islice((use for use in self._uses() if tenant in ("", use.tenant)), MAX_LISTED_USES))

    def _uses(self) -> Iterator[LimitUse]:
        by_default = {name for name in self._tenants.names() if name not in self._named}
        for name in sorted({*by_default, *self._named}):
            if name in self._named:
                yield from self._named[name].uses()
            else:
                counted = (use_of(self._windows, _TENANT + name, rate, tenant=name) for rate in self._config.default)
                yield from (use for use in counted if use.used)
            for client, rates in sorted(self._client_rates.items()):
                key = f"{_CLIENT}{client}{_BETWEEN}{name}"
                own = (use_of(self._windows, key, rate, tenant=name, client=client) for rate in rates)
                yield from (use for use in own if use.used)

    def _claims(self, request: PlacementRequest, *, with_client: bool) -> list[Claim]:
        claims = self._tenant_claims(request)
        if request.priority is Priority.DURABLE:
            spared = self._config.spared_for_callers_percent / 100
            return [replace(claim, spare=int(claim.rate.amount * spared)) for claim in claims]
        return [*claims, *self._client_claims(request)] if with_client else claims

    def _tenant_claims(self, request: PlacementRequest) -> list[Claim]:
        named = self._named.get(request.tenant)
        if named is not None:
            return list(named.claims(request))
        if not self._config.default:
            return []
        key = self._tenants.key_of(request.tenant)
        who = f"Tenant {request.tenant}"
        return claims_of(self._config.default, key, who, request.prompt_tokens, {"per": "tenant"})

    def _client_claims(self, request: PlacementRequest) -> list[Claim]:
        client = request.client_id
        rates = self._client_rates.get(client) if client else None
        if not rates:
            return []
        key = self._clients[client].key_of(request.tenant)
        return claims_of(rates, key, f"Client {client}", request.prompt_tokens, {"per": "client"})


def claims_of(rates: Sequence[Rate], key: str, who: str, tokens: int, about: Mapping[str, str]) -> list[Claim]:
    """Returns what a request claims of rates with one key: 1, or its prompt tokens."""
    return [
        Claim(key=key, who=who, rate=rate, amount=tokens if rate.unit is RateUnit.TOKENS else 1, about=about)
        for rate in rates
    ]


def use_of(
    windows: RateWindows, window: str, rate: Rate, *, tenant: str, key: str = "", model: str = "", client: str = ""
) -> LimitUse:
    """Returns the use of a rate by the key of its window."""
    return LimitUse(
        tenant=tenant,
        key=key,
        model=model,
        client=client,
        window=duration_of(rate.window_seconds),
        unit=LimitUse.UNIT_TOKENS if rate.unit is RateUnit.TOKENS else LimitUse.UNIT_REQUESTS,
        limit=rate.amount,
        used=windows.counted(window, rate),
        reset=duration_of(windows.reset_seconds(window, rate)),
    )
