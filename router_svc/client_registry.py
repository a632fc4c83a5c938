"""Clients of a router: their profiles, usage, rate limits and cooldowns."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from router_svc.observer import RequestEnded
from router_svc.policy.cooldown import Cooldown
from router_svc.policy.pool_settings import ClientProfile, RateLimitConfig
from router_svc.policy.tenant_budgets import TenantLimit
from router_svc.rate_limits import NOTHING_COUNTED, Counted, RateLimits
from router_svc.usage import MAX_COUNTED_GPU_NANOSECONDS, MAX_COUNTED_MILLIJOULES
from weft.api.common.v1 import receipt_pb2
from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus
from weft.api.router.v1 import request_pb2 as pb
from weft.api.router.v1.request_service_pb2 import LimitUse
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason, traits
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import datetime_of, seconds_of
from weft.kernel.values.names import AUTO_MODEL, ROUTE_PREFIX
from weft.kernel.values.units import Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientsConfig:
    """Configuration of the clients of one router."""

    profiles: Mapping[str, ClientProfile] = field(default_factory=dict)
    default: ClientProfile = field(default_factory=ClientProfile)
    """Profile of clients without one."""
    max_clients: int = 1024
    """Maximum remembered clients; the least recently seen is dropped first."""


def _rates_of(config: ClientsConfig) -> dict[str, tuple[Rate, ...]]:
    return {client: profile.rates for client, profile in config.profiles.items() if profile.rates}


def _has_run(receipt: receipt_pb2.Receipt | None) -> bool:
    """Whether an attempt used anything; one that was withdrawn or lost its claim or runner is offered again."""
    return receipt is not None and (receipt.outcome == receipt_pb2.OUTCOME_COMPLETED or receipt.HasField("usage"))


def _is_counted(request: PlacementRequest) -> bool:
    """Whether the limits count it on arrival."""
    return request.priority is not Priority.SYSTEM and not request.is_counted


@dataclass(frozen=True, slots=True)
class KeptClient:
    """A client as stored for a restart."""

    tenant: str
    record: pb.ClientRecord
    """As shown, with every counted target, and the end of its last cooldown even if that has passed."""
    cooldown_seconds: float
    """Length of its last cooldown; 0: none."""


MAX_TARGETS_COUNTED = 32
"""Maximum targets counted per client; a new one replaces the least requested."""
MAX_TARGETS_TOLD = 8
INTERVAL_WEIGHT = 0.2
"""Weight of the newest interval in the usual interval: about ten requests determine it."""


@dataclass(slots=True)
class _Client:
    """A client's state. Times are seconds on the router's monotonic clock."""

    tenant: str
    record: pb.ClientRecord
    """Its id, counts, usual interval and energy; the rest is filled in when it is shown."""
    first_seen_at: float
    last_seen_at: float
    cooldown: Cooldown = field(default_factory=Cooldown)
    targets: dict[str, int] = field(default_factory=dict)

    def note_arrival(self, target: str, now: float) -> None:
        record, targets = self.record, self.targets
        if record.request_count:
            interval = max(0.0, now - self.last_seen_at)
            usual = seconds_of(record.usual_interval) if record.HasField("usual_interval") else interval
            record.usual_interval.FromNanoseconds(int((usual + INTERVAL_WEIGHT * (interval - usual)) * 1e9))
        record.request_count += 1
        record.running_count += 1
        self.last_seen_at = now
        if target not in targets and len(targets) >= MAX_TARGETS_COUNTED:
            del targets[min(targets, key=targets.__getitem__)]
        targets[target] = targets.get(target, 0) + 1

    def note_end(self, usage: receipt_pb2.DeviceUsage | None, *, refused: bool, tokens: int) -> None:
        """`usage`: its share of the accelerators' work, if measured; `tokens`: the tokens it used."""
        record = self.record
        record.running_count -= 1
        record.refused_count += refused
        record.token_count += tokens
        if usage is None or not usage.HasField("device_time"):
            return
        took = min(max(0, usage.device_time.ToNanoseconds()), MAX_COUNTED_GPU_NANOSECONDS)
        record.measured_count += 1
        record.device_time.FromNanoseconds(record.device_time.ToNanoseconds() + took)
        if usage.HasField("energy_millijoules"):
            record.energy_millijoules += min(max(0, usage.energy_millijoules), MAX_COUNTED_MILLIJOULES)


@dataclass(slots=True)
class _UnderWay:
    client: _Client | None
    counted: Counted
    was_refused: bool = False
    is_durable: bool = False


class ClientRegistry:
    """Admits or refuses requests of clients. Called only from the router's event loop.

    Clients are separate per tenant, so that no tenant's requests affect another tenant.
    """

    def __init__(self, config: ClientsConfig, limits: RateLimitConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._limits = RateLimits(limits, _rates_of(config), clock, max_clients=config.max_clients)
        self._clients: OrderedDict[tuple[str, str], _Client] = OrderedDict()
        """By tenant and id; the most recently seen is last."""
        self._under_way: dict[int, _UnderWay] = {}
        self._changed: set[tuple[str, str]] = set()
        """Clients that changed since `take_changed`."""

    @property
    def max_clients(self) -> int:
        """Maximum number of remembered clients."""
        return self._config.max_clients

    def take_changed(self) -> list[KeptClient]:
        """Return the clients to store that changed since the last call."""
        changed, self._changed = self._changed, set()
        now, wall = self._clock.monotonic(), self._clock.utc_now()
        return [self._kept(self._clients[key], now, wall) for key in sorted(changed) if key in self._clients]

    def give_back(self, taken: Iterable[KeptClient]) -> None:
        """Return these clients again from the next `take_changed`, as they could not be stored."""
        self._changed.update((kept.tenant, kept.record.client_id) for kept in taken)

    def restore(self, kept: Iterable[KeptClient]) -> None:
        """Restore clients from before a restart, the last seen one last. Call it once, before the first request."""
        now, wall = self._clock.monotonic(), self._clock.utc_now()
        for each in kept:
            record = each.record
            seen = (record.first_seen_time, record.last_seen_time)
            first, last = (now - max(0.0, (wall - datetime_of(at)).total_seconds()) for at in seen)
            client = _Client(each.tenant, record, first, last)
            if record.HasField("cooldown_end_time"):
                ends_at = now + (datetime_of(record.cooldown_end_time) - wall).total_seconds()
                # A clock that was set back must not make a cooldown longer.
                ends_at = min(ends_at, now + each.cooldown_seconds)
                client.cooldown = Cooldown(ends_at=ends_at, length_seconds=each.cooldown_seconds)
            client.targets = {target.target: target.request_count for target in record.targets}
            self._clients[each.tenant, record.client_id] = client

    def _kept(self, client: _Client, now: float, wall: datetime) -> KeptClient:
        record = self._record([client], now, wall)
        record.running_count = 0
        del record.targets[:]
        for target, count in client.targets.items():
            record.targets.add(target=target, request_count=count)
        seconds = client.cooldown.length_seconds
        if seconds:
            record.cooldown_end_time.FromDatetime(wall + timedelta(seconds=client.cooldown.ends_at - now))
        return KeptClient(client.tenant, record, seconds)

    def reconfigure(self, config: ClientsConfig, limits: RateLimitConfig) -> None:
        """Replace the profiles and rates; the clients' state stays."""
        self._config = config
        self._limits.reconfigure(limits, _rates_of(config))

    def declare(self, tenants: Mapping[str, tuple[TenantLimit, ...] | None]) -> None:
        """Override the configured limits of tenants; None: the default."""
        self._limits.declare(tenants)

    def limit_uses(self, tenant: str = "") -> list[LimitUse]:
        """Return the used part of a tenant's limits; empty: of all tenants."""
        return self._limits.uses(tenant)

    def resolve(self, request: PlacementRequest) -> PlacementRequest:
        """Return the request with the defaults of its client's profile."""
        profile = self._config.profiles.get(request.client_id) if request.client_id else None
        if profile is None:
            return request
        is_durable = request.priority is Priority.DURABLE
        if not request.names_priority and profile.priority is not request.priority and not is_durable:
            request = replace(request, priority=profile.priority)
        if request.model == AUTO_MODEL and profile.route:
            request = replace(request, model=ROUTE_PREFIX + profile.route)
        return request

    def admit(self, key: int, request: PlacementRequest) -> RateLimitStatus | None:
        """Count an arrived request; its end is reported under the same key. Returns what is left for its caller.

        Raises RATE_LIMIT_EXCEEDED for a tenant or client above its rate; the end of such a request must not be
        reported. The mesh's own requests and repeated placements are not counted. Durable requests count for their
        tenant each time they are offered; if they did not run, the count is reverted.
        """
        now = self._clock.monotonic()
        is_durable = request.priority is Priority.DURABLE
        client = self._client(request, now) if request.client_id and not is_durable else None
        if client is not None:
            client.note_arrival(request.model, now)
        counts = _is_counted(request)
        try:
            counted = self._counted(request, client, now) if counts else NOTHING_COUNTED
        except WeftError:
            if client is not None:
                client.note_end(None, refused=True, tokens=0)
            raise
        self._under_way[key] = _UnderWay(client, counted, is_durable=is_durable)
        return counted.status

    def limits_left(self, request: PlacementRequest) -> RateLimitStatus | None:
        """Return what is left for a request's caller without counting it; None: no limit applies."""
        return self._limits.status(request)

    def note_rejected(self, key: int, reason: Reason) -> None:
        """Record that the scheduler refused a request. Without output it used no tokens, whatever its receipt says."""
        found = self._under_way.get(key)
        if found is not None:
            found.was_refused = traits(reason).safe_to_retry

    def note_end(self, ended: RequestEnded) -> None:
        """Record the end of a request; without a token count in a receipt the estimate stands. Idempotent."""
        found, receipt, counts = self._under_way.pop(ended.request.key, None), ended.receipt, ended.counts
        if found is None:
            return
        tokens, refused = found.counted.tokens, found.was_refused
        if receipt is not None:
            refused = receipt.outcome == receipt_pb2.OUTCOME_REJECTED
        if counts is not None and counts.has_usage:
            tokens = counts.prompt_tokens + counts.completion_tokens
        elif refused or found.was_refused:
            tokens = 0
        if found.is_durable and not _has_run(receipt):
            self._limits.give_back(found.counted)
        else:
            self._limits.correct(found.counted, tokens)
        if found.client is not None:
            found.client.note_end(None if receipt is None else receipt.device_usage, refused=refused, tokens=tokens)
            who = (found.client.tenant, found.client.record.client_id)
            if who in self._clients:
                self._changed.add(who)

    def records(self) -> list[pb.ClientRecord]:
        """Return the records of all clients by id, summed up for an id that several tenants use."""
        by_id: dict[str, list[_Client]] = {}
        for client in self._clients.values():
            by_id.setdefault(client.record.client_id, []).append(client)
        now, wall = self._clock.monotonic(), self._clock.utc_now()
        return [self._record(by_id[client_id], now, wall) for client_id in sorted(by_id)]

    def _counted(self, request: PlacementRequest, client: _Client | None, now: float) -> Counted:
        if client is None:
            return self._limits.take(request, with_client=False)
        pause = client.cooldown.seconds_left(now)
        if pause:
            raise self._pausing(request, pause)
        try:
            counted = self._limits.take(request)
        except WeftError:
            client.cooldown.note_refused(self._profile(request.client_id).cooldown, now)
            raise
        client.cooldown.note_allowed()
        return counted

    def _pausing(self, request: PlacementRequest, seconds: float) -> WeftError:
        ends = self._clock.utc_now().timestamp() + seconds
        return WeftError(
            Reason.RATE_LIMIT_EXCEEDED,
            f"Client {request.client_id} was refused too often in a row and is refused for {seconds:.0f} s more",
            metadata={"tenant": request.tenant, "limit": "0", "remaining": "0", "resetAt": str(int(ends) + 1)},
            retry_after_seconds=seconds,
        )

    def _profile(self, client_id: str) -> ClientProfile:
        return self._config.profiles.get(client_id, self._config.default)

    def _client(self, request: PlacementRequest, now: float) -> _Client:
        key = (request.tenant, request.client_id)
        client = self._clients.get(key)
        if client is None:
            if len(self._clients) >= self._config.max_clients:
                forgotten, _ = self._clients.popitem(last=False)
                self._changed.discard(forgotten)
            record = pb.ClientRecord(client_id=request.client_id)
            client = self._clients[key] = _Client(request.tenant, record, now, now)
        else:
            self._clients.move_to_end(key)
        self._changed.add(key)
        return client

    def _record(self, clients: list[_Client], now: float, wall: datetime) -> pb.ClientRecord:
        records = [client.record for client in clients]
        newest = max(clients, key=lambda client: client.last_seen_at)
        client_id = newest.record.client_id
        profile = self._profile(client_id)
        record = pb.ClientRecord(
            client_id=client_id,
            has_profile=client_id in self._config.profiles,
            request_count=sum(each.request_count for each in records),
            refused_count=sum(each.refused_count for each in records),
            running_count=sum(each.running_count for each in records),
            token_count=sum(each.token_count for each in records),
            measured_count=sum(each.measured_count for each in records),
            route=profile.route or "",
            default_priority=profile.priority.wire,  # type: ignore[arg-type]  # same numbers
        )
        counts = Counter[str]()
        for client in clients:
            counts.update(client.targets)
        for target, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_TARGETS_TOLD]:
            record.targets.add(target=target, request_count=count)
        if record.measured_count:
            record.device_time.FromNanoseconds(sum(each.device_time.ToNanoseconds() for each in records))
        if any(each.HasField("energy_millijoules") for each in records):
            record.energy_millijoules = sum(each.energy_millijoules for each in records)
        if newest.record.HasField("usual_interval"):
            record.usual_interval.CopyFrom(newest.record.usual_interval)
        first_seen = min(client.first_seen_at for client in clients)
        record.first_seen_time.FromDatetime(wall - timedelta(seconds=now - first_seen))
        record.last_seen_time.FromDatetime(wall - timedelta(seconds=now - newest.last_seen_at))
        pause = max(client.cooldown.seconds_left(now) for client in clients)
        if pause:
            record.cooldown_end_time.FromDatetime(wall + timedelta(seconds=pause))
        return record
