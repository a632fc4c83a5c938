"""Every bound of the scheduler: those that `router` of weft.yaml sets, and constants of its policies."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from weft.kernel.settings import PUBLIC, Seconds

TELL_INTERVAL_SECONDS = 1.0
"""How often a waiting request gets a status message, and is checked for whether it can still be served."""
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
    max_cold_wait_seconds: Annotated[Seconds, PUBLIC] = 20.0
    """How long requests wait for a model that is not loaded before models in use are evicted for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingLimits:
    """Bounds that no operator sets; tests and simulations try others."""

    min_turn_seconds: float = 2.0
    """How long a model that was loaded and is in demand stays loaded at least ..."""
    swap_quantum_ratio: float = 2.0
    """... and for how many times as long as its load took, but no longer than `max_cold_wait_seconds`. At 2.0 loads
    take no more than a third of the time; the shares of tenants may differ by as much before a swap evens them."""
    durable_share: float = 0.1
    """Share of a pool's requests that are durable tasks while tasks and other requests wait. 0: idle capacity only."""
    max_load_pause_seconds: float = 900.0
    """How long the queue timeout stands still in all for loads, of one request and of those that wait with it. A wake
    that has begun is waited for until its own `max_wait_seconds`."""
    wake_settle_seconds: float = 10.0
    """Longest time from the end of a wake until the model is reported ready."""
    max_bounces: int = 8
    """Attempts on runners that did not take the request because the router's view of the mesh was out of date."""
    stale_view_bounces: int = 4
    """Bounces of one request from a model that is shown as ready, after which its runner is called to wake it: the
    registry is away and the model hibernates."""
    bounce_pause_seconds: float = 0.25
    """How long a runner that bounced a request gets no other one."""
    busy_pause_seconds: float = 0.25
    """How long a runner that was unexpectedly full gets no request; doubles each time in a row ..."""
    max_busy_pause_seconds: float = 2.0
    """... up to this. Such a request keeps its place in the queue until the queue timeout."""
    break_pause_seconds: float = 1.0
    """How long a runner that failed gets no request, unless it reports ready as a new incarnation; never the last
    usable one of a pool or route."""
    eject_after_failures: int = 5
    """Failures in a row after which a model on a runner is ejected; never the last usable one of a pool or route. After
    its ejection it gets one request as a trial."""
    max_shared_failures: int = 3
    """Failures in a row that do not count against a model because another one failed with the same request. Further
    ones count until a request succeeds there."""
    outlier_min_requests: int = 20
    """Requests in that window below which the share is not used."""
    max_ejection_seconds: float = 300.0
    """... up to this."""
    engine_figures_seconds: float = 30.0
    """How long an engine's figures of its load count from their arrival, unless newer ones arrive. Older ones say
    nothing."""
    max_prefix_entries: int = 65_536
    """Prompt prefixes whose runners are remembered; the least recently used is dropped first."""
    retry_reserve: float = 3.0
    """Retries that a pool or route with few requests may make beyond that share ..."""
    max_retry_balance: float = 10.0
    """Largest balance of unused retries."""
    max_retry_debt: float = 100.0
    """Largest debt of retries on runners that had not failed lately: those are never refused, but paid for later."""
    max_told_per_tick: int = 2_000
    """Waiting requests that one tick (a quarter of a second) looks at; the others follow in the next ticks."""
    lower_band_every: int = 8
    """Of this many requests of a pool, and of this many places in its queue, one is of each lower priority ..."""
    lower_band_patience_seconds: float = 5.0
    """... once the first request of that priority has waited this long."""
    max_durable_waiting: int = 4_096
    """Maximum number of durable tasks that wait for a slot; the others wait in the database."""
    durable_idle_seconds: float = 30.0
    """How long a model must have had no caller before durable tasks may have another one loaded in its place."""
    overload_after_seconds: float = 10.0
    """How long requests wait without a break until a pool accepts only what it can serve before the queue timeout."""
    memory_retry_seconds: float = 5.0
    """How long a model whose load got no memory is not tried again."""
    lease_patience_seconds: float = 5.0
    """How long a load may go without memory that the VRAM ledger shows as free, before others are evicted for it (its
    runner may not use all devices of the host) ..."""
    book_doubt_seconds: float = 600.0
    """... and how long the ledger is not trusted for it from then on."""
    failed_load_pause_seconds: float = 30.0
    """How long a model whose load failed is avoided by requests that have an alternative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits(QueueLimits, SchedulingLimits):
    """Every bound of the scheduler."""
