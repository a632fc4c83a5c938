"""The rate limits of a router: requests and tokens of tenants, keys, models and clients, counted on arrival."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from router_svc.policy.pool_settings import RateLimitConfig
from router_svc.policy.tenant_budgets import LimitScope, LimitSubject, TenantLimit, by_scope, over_the_whole
from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus
from weft.api.router.v1.request_service_pb2 import LimitUse
from weft.dispatch.rate_windows import Amount, RateWindows, TrackedKeys
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import duration_of
from weft.kernel.values.fast_dataclass import fast_dataclass
from weft.kernel.values.units import Rate, RateUnit

_TENANT, _CLIENT = "tenant/", "client/"
_BETWEEN = "\0"
"""Separates a tenant from its client, key or model; names cannot contain it."""
NO_KEY = "none"
"""Key of callers without one; ids of real keys have a prefix."""
MAX_LISTED_USES = 10_000


@fast_dataclass()
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


class RateLimits:
    """Counts of tenants and clients on the leading router; the next leader begins with empty windows.

    Windows are known by key, unit and length, so that they keep their counts when amounts change.
    """

    def __init__(
        self, config: RateLimitConfig, client_rates: Mapping[str, tuple[Rate, ...]], clock: Clock, *, max_clients: int
    ) -> None:
        """`client_rates`: rates of clients with a profile, applied per tenant."""
        self._max_clients = max_clients
        self._windows = RateWindows(clock)
        self._tracked: dict[str, TrackedKeys] = {}
        """Names with a separate window each, by the prefix of their keys."""
        self._declared: Mapping[str, tuple[TenantLimit, ...] | None] = {}
        self._named: dict[str, dict[LimitScope, tuple[Rate, ...]]] = {}
        """Tenants with declared or configured limits; others have the default."""
        self.reconfigure(config, client_rates)

    def reconfigure(self, config: RateLimitConfig, client_rates: Mapping[str, tuple[Rate, ...]]) -> None:
        """Replaces the rates."""
        self._config, self._client_rates = config, client_rates
        self._name_tenants()

    def declare(self, tenants: Mapping[str, tuple[TenantLimit, ...] | None]) -> None:
        """Overrides the configured limits of tenants; None: the default."""
        self._declared = tenants
        self._name_tenants()

    def _name_tenants(self) -> None:
        configured = {name: over_the_whole(rates) for name, rates in self._config.tenants.items()}
        limits = {**configured, **self._declared}
        self._named = {name: by_scope(each) for name, each in limits.items() if each is not None}
        prefixes = {_TENANT, *map(_client_prefix, self._client_rates)}
        prefixes |= {_prefix(name, scope) for name, scopes in self._named.items() for scope in scopes}
        for prefix in self._tracked.keys() - prefixes:
            self._tracked.pop(prefix).forget()
        for prefix in prefixes - self._tracked.keys():
            self._tracked[prefix] = TrackedKeys(self._windows, prefix)

    def take(self, request: PlacementRequest, *, with_client: bool = True) -> Counted:
        """Count a request and its estimated prompt tokens for its tenant and, with `with_client`, its client.

        Raises RATE_LIMIT_EXCEEDED naming the tenant, the limit and its window if it exceeds one; see
        `weft.dispatch.rate_windows`.
        """
        amounts = self._amounts(request, with_client=with_client)
        if not amounts:
            return NOTHING_COUNTED
        try:
            counted_at = self._windows.take(amounts)
        except WeftError as error:
            error.metadata["tenant"] = request.tenant
            raise
        keys = tuple((wanted.key, wanted.rate) for wanted in amounts)
        return Counted(keys, request.prompt_tokens, counted_at, self._windows.status(amounts))

    def status(self, request: PlacementRequest) -> RateLimitStatus | None:
        """Return what is left for a request without counting it; None: no limit applies."""
        return self._windows.status(self._amounts(request, with_client=True))

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
        by_default = {name for name in self._tracked[_TENANT].names() if name not in self._named}
        for name in sorted({*by_default, *self._named}):
            if name in self._named:
                for scope, rates in self._named[name].items():
                    yield from self._uses_of(name, scope, rates)
            else:
                counted = (use_of(self._windows, _TENANT + name, rate, tenant=name) for rate in self._config.default)
                yield from (use for use in counted if use.used)
            for client, rates in sorted(self._client_rates.items()):
                key = _client_prefix(client) + name
                own = (use_of(self._windows, key, rate, tenant=name, client=client) for rate in rates)
                yield from (use for use in own if use.used)

    def _uses_of(self, tenant: str, scope: LimitScope, rates: Sequence[Rate]) -> Iterator[LimitUse]:
        """Yields the use of each window; windows of keys and models only if they counted something."""
        if scope.subject is LimitSubject.TENANT:
            for rate in rates:
                yield use_of(self._windows, _whole_key(tenant, scope), rate, tenant=tenant, model=scope.model)
            return
        prefix = _prefix(tenant, scope)
        for name in sorted(self._tracked[prefix].names()):
            what = {"key": name, "model": scope.model} if scope.subject is LimitSubject.KEY else {"model": name}
            for rate in rates:
                use = use_of(self._windows, prefix + name, rate, tenant=tenant, **what)
                if use.used:
                    yield use

    def _amounts(self, request: PlacementRequest, *, with_client: bool) -> list[Amount]:
        if not (self._named or self._config.default or self._client_rates):
            return []
        amounts = self._tenant_amounts(request)
        if request.priority is Priority.DURABLE:
            spared = self._config.spared_for_callers_percent / 100
            return [replace(wanted, spare=int(wanted.rate.amount * spared)) for wanted in amounts]
        rates = self._client_rates.get(request.client_id) if with_client and request.client_id else None
        if rates:
            client = request.client_id
            key = self._tracked[_client_prefix(client)].key_of(request.tenant, self._max_clients)
            amounts += amounts_of(rates, key, f"Client {client}", request.prompt_tokens, {"per": "client"})
        return amounts

    def _tenant_amounts(self, request: PlacementRequest) -> list[Amount]:
        tenant, tokens = request.tenant, request.prompt_tokens
        named, who = self._named.get(tenant), f"Tenant {tenant}"
        if named is None:
            if not self._config.default:
                return []
            key = self._tracked[_TENANT].key_of(tenant, self._config.max_tenants)
            return amounts_of(self._config.default, key, who, tokens, {"per": "tenant"})
        amounts: list[Amount] = []
        for scope, rates in named.items():
            if scope.concerns(request.model):
                key, of_scope, about = self._counted_by(scope, request)
                amounts += amounts_of(rates, key, who + of_scope, tokens, {"per": scope.subject.value, **about})
        return amounts

    def _counted_by(self, scope: LimitScope, request: PlacementRequest) -> tuple[str, str, Mapping[str, str]]:
        """Returns the window key of a request in a scope, which part of the tenant it is in words, and as metadata."""
        if scope.subject is LimitSubject.TENANT:
            key, model = _whole_key(request.tenant, scope), scope.model
            return (key, f" with requests for {model}", {"model": model}) if model else (key, "", {})
        tracked, most = self._tracked[_prefix(request.tenant, scope)], self._config.max_subjects
        if scope.subject is LimitSubject.KEY:
            caller = request.caller or NO_KEY
            return tracked.key_of(caller, most), f" with {caller}", {"key": caller}
        model = request.model
        return tracked.key_of(model, most), f" with requests for {model}", {"model": model}


def _client_prefix(client: str) -> str:
    return f"{_CLIENT}{client}{_BETWEEN}"


def _prefix(tenant: str, scope: LimitScope) -> str:
    return f"{_TENANT}{tenant}{_BETWEEN}{scope.model}{_BETWEEN}{scope.subject.value}{_BETWEEN}"


def _whole_key(tenant: str, scope: LimitScope) -> str:
    # Without a model the key is the same as for a tenant without limits, so that its windows stay if it gets some.
    whole = _TENANT + tenant
    return f"{whole}{_BETWEEN}{scope.model}" if scope.model else whole


def amounts_of(rates: Sequence[Rate], key: str, who: str, tokens: int, about: Mapping[str, str]) -> list[Amount]:
    """Returns what a request counts on rates with one key: 1, or its prompt tokens."""
    return [
        Amount(key=key, who=who, rate=rate, amount=tokens if rate.unit is RateUnit.TOKENS else 1, about=about)
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
