"""The sections of the configuration file about the scheduler."""

from typing import Annotated, Literal

from pydantic import Field

from weft_app.config.config_section import Seconds, Section

PolicyName = Literal["least_loaded", "random", "round_robin", "prefix_affinity"]


class PoolSection(Section):
    """One pool: how one of its free models is chosen, and how much may run on them."""

    policy: PolicyName = "least_loaded"
    """`least_loaded`, `random`, `round_robin`, or `prefix_affinity`: who probably has the prompt's beginning cached.
    A request with a session goes where its session ran, whatever the policy."""
    max_in_flight: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Requests that may run on its models at once. 0: as many as they have slots."""


Count = Annotated[int, Field(ge=1, le=1_000_000)]
Share = Annotated[float, Field(ge=0, le=1)]


class SchedulingSection(Section):
    """Finer settings of the scheduler. The defaults suit most meshes; `weft simulate` tries others without risk."""

    max_bounces: Annotated[int, Field(ge=0, le=1_000)] = 8
    """Attempts on runners that did not take the request: the view of the mesh was behind."""
    stale_view_bounces: Count = 4
    """Bounces of one request from a model that is shown as ready, after which its runner is asked to wake it."""
    bounce_pause_seconds: Seconds = 0.25
    """How long a runner that bounced a request is left alone."""
    busy_pause_seconds: Seconds = 0.25
    """How long a runner that was unexpectedly full is left alone; doubles each time in a row ..."""
    max_busy_pause_seconds: Seconds = 2.0
    """... up to this."""
    break_pause_seconds: Seconds = 1.0
    """How long a runner that broke is left alone, unless it reports ready as a new incarnation."""
    eject_after_failures: Count = 5
    """Breaks in a row after which a model on a runner is ejected; never the last usable one of a pool or route."""
    max_shared_failures: Count = 3
    """Failures in a row that are not counted against a model because another one failed with the same request."""
    outlier_window_seconds: Seconds = 60.0
    """Time over which the share of broken requests is looked at."""
    outlier_min_requests: Count = 20
    """Requests in that time below which the share says nothing."""
    outlier_max_failure_share: Share = 0.5
    """Share of broken requests above which it is ejected, though they were not in a row."""
    ejection_base_seconds: Seconds = 10.0
    """How long it is ejected, times the number of its ejections in a row ..."""
    max_ejection_seconds: Seconds = 300.0
    """... up to this."""
    affinity_load_factor: Annotated[float, Field(ge=1, le=100)] = 1.25
    """How much more than its share of its pool's requests a model may have and still be preferred for its cache."""
    max_prefix_entries: Count = 65_536
    """Beginnings of prompts of which it is remembered where they last ran."""
    max_session_entries: Count = 65_536
    """Sessions of which it is remembered where they last ran."""
    retry_share: Share = 0.2
    """Attempts after the first one on runners that failed lately, per first attempt."""
    retry_reserve: Annotated[float, Field(ge=0, le=1_000)] = 3.0
    """Such attempts for a pool or route that had few requests lately ..."""
    retry_reserve_seconds: Seconds = 10.0
    """... and how long it takes until one of them is allowed again."""
    max_retry_balance: Annotated[float, Field(ge=0, le=1_000_000)] = 10.0
    """Such attempts that are saved up at most."""
    max_retry_debt: Annotated[float, Field(ge=0, le=1_000_000)] = 100.0
    """Attempts on runners that had not failed lately, which are never refused, that are paid for later at most."""
    clean_after_seconds: Seconds = 10.0
    """How long after its last break a runner counts as one that has not failed lately; at once after a success."""
    full_retry_seconds: Seconds = 5.0
    """What a caller is told to wait when the queue is full and nothing better is known."""
    tell_interval_seconds: Seconds = 1.0
    """How often one who waits is told where it stands."""
    max_told_per_tick: Count = 2_000
    """Waiting requests that are looked at in a quarter of a second; the others' turn comes later."""
    max_fair_lag_tokens: Annotated[float, Field(gt=0, le=1e15)] = 200_000.0
    """How far a tenant's account may lag behind the highest one."""
    max_remembered_tenants: Count = 10_000
    """Tenants without any request whose accounts are kept."""
    lower_band_every: Annotated[int, Field(ge=2, le=1_000_000)] = 8
    """Of so many requests of a pool, and of so many places in its queue, one is of each lower band ..."""
    lower_band_patience_seconds: Seconds = 5.0
    """... once the first of that band has waited this long."""
    durable_share: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    """Share of a pool's requests that are durable tasks while some wait and others do too. 0: only what is idle."""
    max_durable_waiting: Count = 4_096
    """Durable tasks that wait for a slot at once; the others wait where they are kept."""
    durable_idle_seconds: Seconds = 30.0
    """How long no caller has used a model until durable tasks may have another one loaded in its place."""
    overload_after_seconds: Seconds = 10.0
    """How long requests wait without a break until a pool only takes in what it can serve before the queue timeout."""
    overload_fill: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the queue timeout that the estimated wait of a request may take up then."""
    pace_window_seconds: Seconds = 60.0
    """Time over which it is averaged how fast a pool serves."""
    max_load_pause_seconds: Seconds = 900.0
    """How long the queue timeout stands still in all for loads, of one request and of those that wait in vain with it.
    A wake that was begun before is waited for to its own `max_wait_seconds`."""
    memory_retry_seconds: Seconds = 5.0
    """How long a model is left alone for whose load there was no memory after all."""
    lease_patience_seconds: Seconds = 5.0
    """How long a load may go without memory that its host seems to have, until others give way for it anyway ..."""
    book_doubt_seconds: Seconds = 600.0
    """... for this long."""
    failed_load_pause_seconds: Seconds = 30.0
    """How long a model whose load failed is left alone by those who have another one to wait for."""
