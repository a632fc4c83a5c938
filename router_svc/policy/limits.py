"""Every bound of the scheduler, as `router` and `router.scheduling` of weft.yaml set them."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from weft.kernel.settings import PUBLIC, Seconds

Count = Annotated[int, Ge(1), Le(1_000_000)]
Share = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True, kw_only=True)  # Without slots: SchedulerLimits inherits from this class and another one.
class QueueLimits:
    """The bounds that decide how long requests wait: `router` in weft.yaml."""

    queue_depth_per_runner: Annotated[int, Ge(0), Le(1_000_000), PUBLIC] = 16
    """Requests that may wait for a pool, per runner in it."""
    queue_timeout_seconds: Annotated[Seconds, PUBLIC] = 30.0
    """Longest wait for a slot. The time of a load that is certain to come does not count."""
    max_attempts: Annotated[int, Ge(1), Le(10)] = 3
    """Attempts on runners that took the request and failed before any content, failed wakes included."""
    wake_settle_seconds: Seconds = 10.0
    """Longest time from the end of a wake until the model is reported ready."""
    max_cold_wait_seconds: Annotated[Seconds, PUBLIC] = 20.0
    """How long requests wait for a model that is not loaded before models in use are evicted for it."""
    min_turn_seconds: Seconds = 2.0
    """How long a model that was loaded and is in demand stays loaded at least ..."""
    swap_quantum_ratio: Annotated[float, Ge(0), Le(1_000)] = 2.0
    """... and for how many times as long as its load took, but no longer than `max_cold_wait_seconds`. At 2.0 loads
    take no more than a third of the time; the shares of tenants may differ by as much before a swap evens them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingLimits:
    """Finer settings of the scheduler. The defaults suit most meshes; `weft simulate` tries others without risk."""

    max_bounces: Annotated[int, Ge(0), Le(1_000)] = 8
    """Attempts on runners that did not take the request because the router's view of the mesh was out of date."""
    stale_view_bounces: Count = 4
    """Bounces of one request from a model that is shown as ready, after which its runner is called to wake it: the
    registry is away and the model hibernates."""
    bounce_pause_seconds: Seconds = 0.25
    """How long a runner that bounced a request gets no other one."""
    busy_pause_seconds: Seconds = 0.25
    """How long a runner that was unexpectedly full gets no request; doubles each time in a row ..."""
    max_busy_pause_seconds: Seconds = 2.0
    """... up to this. Such a request keeps its place in the queue until the queue timeout."""
    break_pause_seconds: Seconds = 1.0
    """How long a runner that failed gets no request, unless it reports ready as a new incarnation; never the last
    usable one of a pool or route."""
    eject_after_failures: Count = 5
    """Failures in a row after which a model on a runner is ejected; never the last usable one of a pool or route. After
    its ejection it gets one request as a trial."""
    max_shared_failures: Count = 3
    """Failures in a row that do not count against a model because another one failed with the same request. Further
    ones count until a request succeeds there."""
    outlier_window_seconds: Seconds = 60.0
    """Window over which the share of failed requests is measured."""
    outlier_min_requests: Count = 20
    """Requests in that window below which the share is not used."""
    outlier_max_failure_share: Share = 0.5
    """Share of failed requests above which a model is ejected, though they were not in a row."""
    ejection_base_seconds: Seconds = 10.0
    """Length of an ejection, times the number of ejections in a row ..."""
    max_ejection_seconds: Seconds = 300.0
    """... up to this."""
    affinity_load_factor: Annotated[float, Ge(1), Le(100)] = 1.25
    """How much more than its share of its pool's requests a model may have and still be preferred for its cache. The
    figure is that of consistent hashing with bounded loads (Mirrokni et al., 2018)."""
    engine_figures_seconds: Seconds = 30.0
    """How long an engine's figures of its load count from their arrival, unless newer ones arrive. Older ones say
    nothing."""
    max_prefix_entries: Count = 65_536
    """Prompt prefixes whose last runner is remembered; the least recently used is dropped first."""
    max_session_entries: Count = 65_536
    """Sessions whose last runner is remembered; the least recently used is dropped first."""
    retry_share: Share = 0.2
    """Retries on runners that failed lately, per first attempt of a pool or route."""
    retry_reserve: Annotated[float, Ge(0), Le(1_000)] = 3.0
    """Retries that a pool or route with few requests may make beyond that share ..."""
    retry_reserve_seconds: Seconds = 10.0
    """... and how long it takes until one of them is available again."""
    max_retry_balance: Annotated[float, Ge(0), Le(1_000_000)] = 10.0
    """Largest balance of unused retries."""
    max_retry_debt: Annotated[float, Ge(0), Le(1_000_000)] = 100.0
    """Largest debt of retries on runners that had not failed lately: those are never refused, but paid for later."""
    clean_after_seconds: Seconds = 10.0
    """How long after its last failure a runner no longer counts as one that failed lately; at once after a success."""
    full_retry_seconds: Seconds = 5.0
    """Retry-After of a request that finds the queue full, where no better estimate is known."""
    tell_interval_seconds: Seconds = 1.0
    """How often a waiting request gets a status message, and is checked for whether it can still be served."""
    max_told_per_tick: Count = 2_000
    """Waiting requests that one tick (a quarter of a second) looks at; the others follow in the next ticks."""
    max_fair_lag_tokens: Annotated[float, Gt(0), Le(1e15)] = 200_000.0
    """How far a tenant's account may lag behind the highest one. A tenant that had no competition for long is not held
    back for hours afterwards."""
    max_remembered_tenants: Count = 10_000
    """Tenants without any request whose accounts are kept; the one that left first is dropped first."""
    lower_band_every: Annotated[int, Ge(2), Le(1_000_000)] = 8
    """Of this many requests of a pool, and of this many places in its queue, one is of each lower priority ..."""
    lower_band_patience_seconds: Seconds = 5.0
    """... once the first request of that priority has waited this long."""
    durable_share: Annotated[float, Ge(0), Le(0.5)] = 0.1
    """Share of a pool's requests that are durable tasks while tasks and other requests wait. 0: idle capacity only."""
    max_durable_waiting: Count = 4_096
    """Durable tasks that wait for a slot at once; the others wait in the database."""
    durable_idle_seconds: Seconds = 30.0
    """How long a model must have had no caller before durable tasks may have another one loaded in its place."""
    overload_after_seconds: Seconds = 10.0
    """How long requests wait without a break until a pool accepts only what it can serve before the queue timeout."""
    overload_fill: Annotated[float, Gt(0), Le(1)] = 0.8
    """Share of the queue timeout that the estimated wait of a request may take up in overload."""
    pace_window_seconds: Seconds = 60.0
    """Window over which the throughput of a pool is averaged."""
    max_load_pause_seconds: Seconds = 900.0
    """How long the queue timeout stands still in all for loads, of one request and of those that wait with it. A wake
    that has begun is waited for until its own `max_wait_seconds`."""
    memory_retry_seconds: Seconds = 5.0
    """How long a model whose load got no memory is not tried again."""
    lease_patience_seconds: Seconds = 5.0
    """How long a load may go without memory that the VRAM ledger shows as free, before others are evicted for it (its
    runner may not use all devices of the host) ..."""
    book_doubt_seconds: Seconds = 600.0
    """... and how long the ledger is not trusted for it from then on."""
    failed_load_pause_seconds: Seconds = 30.0
    """How long a model whose load failed is avoided by requests that have an alternative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits(QueueLimits, SchedulingLimits):
    """Every bound of the scheduler."""
