"""All bounds of the scheduler: those under `router` in weft.yaml, and constants of its policies."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from weft.kernel.settings.setting_annotations import PUBLIC, Seconds

TELL_INTERVAL_SECONDS = 1.0
"""Interval of status messages to a waiting request, and of checks whether it can still be served."""
Count = Annotated[int, Ge(1), Le(1_000_000)]
Share = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True, kw_only=True)  # No slots, as SchedulerLimits has two base classes.
class QueueLimits:
    """The bounds that decide how long requests wait: `router` in weft.yaml."""

    queue_depth_per_runner: Annotated[int, Ge(0), Le(1_000_000), PUBLIC] = 16
    """Maximum number of requests that wait for a pool, per runner in the pool."""
    queue_timeout_seconds: Annotated[Seconds, PUBLIC] = 30.0
    """Longest wait for a slot. Time spent waiting for a model load that is running or planned does not count."""
    max_attempts: Annotated[int, Ge(1), Le(10)] = 3
    """Maximum number of attempts per request. Failures before the first content and failed wakes count; rejections by a
    full runner do not."""
    max_cold_wait_seconds: Annotated[Seconds, PUBLIC] = 20.0
    """How long requests wait for a model that is not loaded before models in use are evicted for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingLimits:
    """Bounds that operators cannot set; tests and simulations vary them."""

    min_turn_seconds: float = 2.0
    """Minimum time that a loaded model in demand stays loaded ..."""
    swap_quantum_ratio: float = 2.0
    """... and the multiple of its load time, up to `max_cold_wait_seconds`. At 2.0 loads take no more than a third of
    the time; the shares of tenants may differ by as much before a swap evens them out."""
    durable_share: float = 0.1
    """Share of durable tasks in a pool's requests while both tasks and other requests wait. 0: idle capacity only."""
    max_load_pause_seconds: float = 900.0
    """Maximum total pause of the queue timeout for loads, per request and for those that wait with it. A wake that has
    begun is awaited until its own `max_wait_seconds`."""
    wake_settle_seconds: float = 10.0
    """Maximum time from the end of a wake until the model is reported ready."""
    max_bounces: int = 8
    """Attempts on runners that rejected the request because the router's view of the mesh was out of date."""
    stale_view_bounces: int = 4
    """Bounces of a request from a model that is shown as ready, after which its runner is called to wake it: the
    registry is unreachable and the model hibernates."""
    bounce_pause_seconds: float = 0.25
    busy_pause_seconds: float = 0.25
    """Pause of a runner that was unexpectedly full; doubles each time in a row ..."""
    max_busy_pause_seconds: float = 2.0
    """... up to this. The request keeps its place in the queue until the queue timeout."""
    break_pause_seconds: float = 1.0
    """Pause of a runner that failed, unless it reports ready as a new incarnation; never the last usable one of a pool
    or route."""
    eject_after_failures: int = 5
    """Failures in a row after which a model on a runner is ejected; never the last usable one of a pool or route. It
    then gets one request as a trial."""
    max_shared_failures: int = 3
    """Failures in a row that do not count against a model because another one failed with the same request. Further
    ones count until a request succeeds."""
    outlier_min_requests: int = 20
    """Minimum requests within OUTLIER_WINDOW_SECONDS for a model to be ejected for its share of failures."""
    max_ejection_seconds: float = 300.0
    """Maximum length of an ejection; see EJECTION_BASE_SECONDS."""
    engine_figures_seconds: float = 30.0
    """How long an engine's load figures count after they arrive, unless newer ones do."""
    max_prefix_entries: int = 65_536
    """Maximum prompt prefixes with remembered runners; the least recently used is dropped first."""
    retry_reserve: float = 3.0
    """Retries that a pool or route with few requests may make beyond RETRY_SHARE."""
    max_retry_balance: float = 10.0
    max_retry_debt: float = 100.0
    """Maximum debt of retries on runners that had not failed recently: these are never refused, but paid for later."""
    max_notified_per_tick: int = 2_000
    """Waiting requests examined per tick (a quarter of a second); the others follow in the next ticks."""
    lower_class_every: int = 8
    """One of this many requests of a tenant in a pool, and of its places in the queue, goes to each lower class ..."""
    lower_class_patience_seconds: float = 5.0
    """... once that class's first request has waited this long."""
    max_durable_waiting: int = 4_096
    """Maximum durable tasks that wait for a slot; the others wait in the database."""
    durable_idle_seconds: float = 30.0
    """Time without callers after which a model may be replaced for durable tasks."""
    overload_after_seconds: float = 10.0
    """How long requests must wait without a break until a pool accepts only what it can serve within the queue
    timeout."""
    memory_retry_seconds: float = 5.0
    """Pause before a load is retried that got no memory."""
    lease_patience_seconds: float = 5.0
    """How long a load may wait for memory that the VRAM ledger shows as free, before others are evicted for it (its
    runner may not use all devices of the host) ..."""
    book_doubt_seconds: float = 600.0
    """... and how long the ledger is then not trusted for it."""
    failed_load_pause_seconds: float = 30.0
    """How long requests with an alternative avoid a model whose load failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits(QueueLimits, SchedulingLimits):
    """All bounds of the scheduler."""
