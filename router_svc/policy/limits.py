"""Every bound of the scheduler."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Every bound of the scheduler."""

    queue_depth_per_runner: int = 16
    queue_timeout_seconds: float = 30.0
    """Longest wait for a slot. It does not run while a request waits for a load that is certain, and begins then."""
    max_attempts: int = 3
    """Attempts on runners that took the request and failed before any content, and wakes that failed under it."""
    max_bounces: int = 8
    """Attempts on runners that did not take it: the view of the mesh was behind."""
    stale_view_bounces: int = 4
    """Bounces of one request from a model that is shown as ready, after which its runner is believed and asked to wake
    it: the registry is away and the model fell asleep."""
    bounce_pause_seconds: float = 0.25
    """How long a runner that bounced a request is left alone."""
    busy_pause_seconds: float = 0.25
    """How long a runner that was unexpectedly full is left alone; doubles each time in a row ..."""
    max_busy_pause_seconds: float = 2.0
    """... up to this. Such a request goes on waiting until the queue timeout."""
    break_pause_seconds: float = 1.0
    """How long a runner that broke is left alone, unless it reports ready as a new incarnation."""
    eject_after_failures: int = 5
    """Breaks in a row after which a candidate is ejected: it gets nothing until its time is over, then one request to
    try. The last usable candidate of a line never is."""
    max_shared_failures: int = 3
    """Failures in a row that are not counted against a candidate because another one answered the same request with an
    error, too: the request is what they have in common. Further ones count until a request succeeds there."""
    outlier_window_seconds: float = 60.0
    """Time over which the share of broken requests is looked at."""
    outlier_min_requests: int = 20
    """Requests in that time below which the share says nothing."""
    outlier_max_failure_share: float = 0.5
    """Share of broken requests above which a candidate is ejected, though they were not in a row."""
    ejection_base_seconds: float = 10.0
    """How long a candidate is ejected, times the number of its ejections in a row ..."""
    max_ejection_seconds: float = 300.0
    """... up to this."""
    affinity_load_factor: float = 1.25
    """How much more than its share of its pool's requests a candidate may have and still be preferred for what it has
    in its cache. Consistent hashing with bounded loads (Mirrokni et al., 2018) uses the same figure."""
    max_prefix_entries: int = 65_536
    """Beginnings of prompts of which it is remembered where they last ran; the one used longest ago goes first."""
    max_session_entries: int = 65_536
    """Sessions of which it is remembered where they last ran; the one used longest ago goes first."""
    retry_share: float = 0.2
    """Attempts after the first one that are allowed to candidates that failed lately, per first attempt of a line."""
    retry_reserve: float = 3.0
    """Such attempts that are allowed to a line that had few requests lately ..."""
    retry_reserve_seconds: float = 10.0
    """... and how long it takes until one of them is allowed again."""
    max_retry_balance: float = 10.0
    """Such attempts that a line saves up at most."""
    max_retry_debt: float = 100.0
    """How many attempts on candidates that had not failed lately are paid for later: none of them is refused."""
    clean_after_seconds: float = 10.0
    """How long after its last break a candidate counts as one that has not failed lately; at once after a success."""
    full_retry_seconds: float = 5.0
    """What a caller is told to wait when the queue is full."""
    wake_settle_seconds: float = 10.0
    """How long a model that was woken may take to be reported ready."""
    tell_interval_seconds: float = 1.0
    """How often one who waits is told where it stands, and whether it waits in vain is looked at."""
    max_told_per_tick: int = 2_000
    """Waiting requests that one tick looks at; the others' turn comes with the next ticks."""
    max_fair_lag_tokens: float = 200_000.0
    """How far a tenant's account may lag behind the highest one, so that who was favoured for long by chance (nobody
    competed for its models) does not have to pay for it for hours."""
    max_remembered_tenants: int = 10_000
    """Tenants without any request whose accounts are kept; the one that left first is forgotten first."""
    lower_band_every: int = 8
    """Of so many grants of a line, and of so many places in it, one goes to each lower band ..."""
    lower_band_patience_seconds: float = 5.0
    """... once the first of that band has waited this long."""
    durable_share: float = 0.1
    """Share of a line's grants that goes to durable requests while they wait there and others do too; 0: they only get
    what nobody else wants."""
    max_durable_waiting: int = 4_096
    """Durable requests that wait at once, over all lines. Whoever offers them keeps to far fewer."""
    durable_idle_seconds: float = 30.0
    """How long no caller has used a model until durable requests may have another one loaded in its place."""
    overload_after_seconds: float = 10.0
    """How long a line is backlogged until it only takes in what it can serve before the queue timeout."""
    overload_fill: float = 0.8
    """Share of the queue timeout that the estimated wait of a request may take up in overload."""
    pace_window_seconds: float = 60.0
    """Time over which the pace of a line is averaged."""
    max_load_pause_seconds: float = 900.0
    """How long the queue timeout stands still in all for loads, of one request and of those that wait in vain with it.
    A request that has waited for this and the queue timeout waits for no further load: only for a wake that was begun
    before, which has a bound of its own (`max_wait_seconds` of its recipe)."""
    max_cold_wait_seconds: float = 20.0
    """How long requests wait for a sleeping model until others have to give way for it, whatever that costs."""
    min_turn_seconds: float = 2.0
    """How long a model that was loaded and is wanted serves at least, before it gives way to another ..."""
    swap_quantum_ratio: float = 2.0
    """... and at least this many times as long as its load took, so that no more than a third of the time is lost to
    loads; but no longer than `max_cold_wait_seconds`. Tenants' shares may differ by as much before a swap evens them.
    """
    memory_retry_seconds: float = 5.0
    """How long a model is left alone for whose load there was no memory after all."""
    lease_patience_seconds: float = 5.0
    """How long a load may go without memory that the book shows as free, until the book is doubted for it: its runner
    may not use all devices of the host, and whom it may have to wait for is held from then on ..."""
    book_doubt_seconds: float = 600.0
    """... for this long."""
    failed_load_pause_seconds: float = 30.0
    """How long a model whose load failed is left alone by those who have another model to wait for."""
