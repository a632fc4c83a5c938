"""Limits of a router's database: tasks, results, batches, files, stored responses, usage, records."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le

from weft.kernel.schemas.json_schema import SchemaLimits
from weft.kernel.settings.setting_annotations import PUBLIC, Constant, Seconds

MEBIBYTE = 1024 * 1024
Count = Annotated[int, Ge(1), Le(10_000_000)]
Bytes = Annotated[int, Ge(1024), Le(1024**5)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimits:
    """Durable tasks: requests that outlive their callers and this process. `router.tasks` in weft.yaml."""

    pending_limit_seconds: Annotated[Seconds, PUBLIC] = 3600.0
    """How long a task may wait for its first attempt, or for the next one after a lost attempt, before it fails."""
    max_attempts: Count = 5
    """Number of failed attempts after which a task fails."""
    lease_seconds: Seconds = 15.0
    """How long a router's claim on a task is valid without a heartbeat. Heartbeats are sent at a third of this
    interval."""
    run_timeout_seconds: Annotated[Seconds, PUBLIC] = 3600.0
    """Maximum duration of one attempt."""
    retry_delay_seconds: Seconds = 1.0
    """Pause after a lost attempt; doubles with each further one, up to `max_retry_delay_seconds`."""
    max_retry_delay_seconds: Seconds = 60.0
    """Maximum pause after a lost attempt."""
    keep_seconds: Annotated[Seconds, PUBLIC] = 7 * 86_400.0
    """How long a finished task is kept, unless its caller deletes it or a size limit releases it earlier."""
    max_kept_bytes: Annotated[Bytes, PUBLIC] = 64 * 1024 * MEBIBYTE
    """Maximum size of the finished tasks of all tenants. Beyond it, the oldest are released."""
    poll_interval_seconds: Seconds = 60.0
    """How often the database is polled for tasks whose notification was missed."""
    piece_interval_seconds: Seconds = 0.25
    """How often the output of a running task is written to the database."""
    max_open_per_tenant: Count = 200_000
    """Maximum number of unfinished tasks of one tenant."""
    sweep_interval_seconds: Constant[float] = 300.0
    """How often tasks that waited too long are failed, finished ones past `keep_seconds` or beyond a bound are deleted,
    and all are counted for the metrics `weft_tasks` and `weft_oldest_task_age_seconds`."""
    max_kept_per_tenant: Constant[int] = 1_000_000
    """Finished tasks of one tenant that are kept. Beyond it the oldest are released; see `sweep_interval_seconds`."""
    max_kept_tenant_bytes: Constant[int] = 16 * 1024 * MEBIBYTE
    """Size of the finished tasks of one tenant, requests and answers; as above."""
    max_running: Constant[int] = 256
    """Attempts that one router runs concurrently."""
    max_result_bytes: Constant[int] = 64 * MEBIBYTE
    """Size of one task's answer."""
    max_spec_bytes: Constant[int] = 16 * MEBIBYTE
    """Size of one task's request, its attachments included."""
    sweep_batch: Constant[int] = 500
    """Tasks that one statement of a sweep changes."""
    max_lanes: Constant[int] = 256
    """Lanes (model, tenant and priority class) of tasks that one router offers concurrently; more wait in turn."""
    offers_per_lane: Constant[int] = 4
    """Maximum number of tasks of one lane that wait for a slot."""
    peeked_per_lane: Constant[int] = 32
    """Tasks of one lane that are read ahead."""
    max_peeked_bytes: Constant[int] = 64 * MEBIBYTE
    """Size of all tasks that are read ahead."""
    max_piece_bytes: Constant[int] = 256 * 1024
    """Output after which it is written without waiting for the interval."""
    max_origin_bytes: Constant[int] = 12 * MEBIBYTE
    """Size of the submitter's own data that is stored with a task."""
    max_watches: Constant[int] = 1024
    """Concurrent watchers of tasks."""
    watch_poll_seconds: Constant[float] = 2.0
    """How often a watcher polls, in case it missed an event."""
    schemas: Constant[SchemaLimits] = field(default_factory=SchemaLimits)
    """What the JSON schemas of one task may hold, as those of a live request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLimits:
    """Images and recordings: inputs of tasks, and results of models. `router.results` in weft.yaml.

    Beyond a limit, tasks and images by address are refused; stored ones are not removed to make room.
    """

    max_bytes: Annotated[Bytes, PUBLIC] = 64 * MEBIBYTE
    """Maximum size of one generated image or recording."""
    max_tenant_bytes: Annotated[Bytes, PUBLIC] = 4 * 1024 * MEBIBYTE
    """Maximum size of all images and recordings of one tenant."""
    max_total_bytes: Annotated[Bytes, PUBLIC] = 16 * 1024 * MEBIBYTE
    """Maximum size of all images and recordings of all tenants."""
    keep_seconds: Annotated[Seconds, PUBLIC] = 7 * 86_400.0
    """How long a generated file is kept, unless its task is deleted earlier. Input files are deleted when their task
    ends."""
    max_input_bytes: Constant[int] = 48 * MEBIBYTE
    """Size of all images and recordings that one task is given; they travel to a runner in one message."""
    max_per_tenant: Constant[int] = 100_000
    """Images and recordings of one tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Files and batches: `/v1/files` and `/v1/batches`."""

    max_tenant_file_bytes: Bytes = 4 * 1024 * MEBIBYTE
    """Maximum size of all files of one tenant."""
    keep_file_seconds: Annotated[Seconds, PUBLIC] = 30 * 86_400.0
    """How long a file is kept."""
    keep_batch_seconds: Annotated[Seconds, PUBLIC] = 30 * 86_400.0
    """How long a finished batch is kept. Its tasks are kept for `router.tasks.keep_seconds`, at least until all results
    are written."""
    max_files_per_tenant: Constant[int] = 10_000
    """Files of one tenant."""
    max_batches_per_tenant: Constant[int] = 10_000
    """Batches of one tenant."""
    max_file_bytes: Constant[int] = 200 * MEBIBYTE
    """Size of an uploaded file; a file of results is as long as the answers are."""
    max_lines: Constant[int] = 50_000
    """Requests of one batch."""
    sweep_interval_seconds: Constant[float] = 300.0
    """How often expired files and batches are deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLimits:
    """Usage of tenants, keys and models by hour. `router.usage` in weft.yaml."""

    keep_seconds: Annotated[Seconds, PUBLIC] = 90 * 86_400.0
    """How long hourly usage is kept."""
    tenant_metrics: Annotated[bool, PUBLIC] = False
    """Whether the usage metrics (`weft_usage_...`) have the label `tenant`. Readers of the metrics then see tenant
    names."""
    max_rows_per_hour: Constant[int] = 1_000
    """Rows of one hour: combinations of tenant, key, model and name asked for. Beyond it, what has no row yet counts as
    `_other`, by tenant for as many tenants."""
    flush_interval_seconds: Constant[float] = 2.0
    """How often counts are written: the most usage of live requests that a killed router loses. Tasks lose none."""
    sweep_interval_seconds: Constant[float] = 3_600.0
    """How often hours past `keep_seconds` are deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLimits:
    """Requests, clients, accounts of fair share and figures over a restart. `router.records` in weft.yaml."""

    keep_seconds: Annotated[Seconds, PUBLIC] = 7 * 86_400.0
    """How long a request record is kept after the request ends."""
    max_records: Annotated[Count, PUBLIC] = 100_000
    """Maximum number of records of ended requests in the database, over all routers that share it; about 1 KiB each.
    Beyond it, the oldest are deleted."""
    flush_interval_seconds: Annotated[Seconds, PUBLIC] = 2.0
    """How often records are written. A router that is killed loses what happened since the last write."""
    state_interval_seconds: Constant[float] = 5.0
    """How often clients, accounts of fair share and figures are written."""
    max_unwritten: Constant[int] = 10_000
    """Ended requests that may wait to be written. Beyond it those that ended first are dropped, and counted."""
    sweep_interval_seconds: Constant[float] = 300.0
    """How often records past `keep_seconds` or beyond `max_records` are deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseLimits:
    """Stored responses: `/v1/responses` with `store`."""

    keep_seconds: Annotated[Seconds, PUBLIC] = 30 * 86_400.0
    """How long a response is kept."""
    max_total_bytes: Annotated[int, Ge(1024), Le(1024**5), PUBLIC] = 16 * 1024 * MEBIBYTE
    """Maximum size of all stored responses of all tenants."""
    max_tenant_bytes: Constant[int] = 4 * 1024 * MEBIBYTE
    """Size of all responses of one tenant."""
    max_bytes: Constant[int] = 16 * MEBIBYTE
    """Size of one response with its input."""
    max_chain_bytes: Constant[int] = 48 * MEBIBYTE
    """Size of one conversation; it travels in one message between services."""
    max_per_tenant: Constant[int] = 100_000
    """Responses of one tenant."""
    sweep_interval_seconds: Constant[float] = 300.0
    """How often expired responses are deleted, and the sizes per tenant are counted again."""
