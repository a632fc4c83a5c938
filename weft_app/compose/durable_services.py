"""The durable services of a router: tasks, batches and stored responses, in its database."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import router_svc.durable.records
import router_svc.durable.tasks.task_service
from router_svc.durable.batches.batch_servicer import BatchService
from router_svc.durable.files import FileServicer
from router_svc.durable.records import RecordService, ignore_dropped
from router_svc.durable.request_records import Writer
from router_svc.durable.stored_responses import ResponseService
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_call import CallMaker
from router_svc.durable.tasks.task_media import TaskMedia
from router_svc.durable.tasks.task_recorder import TaskRecorder
from router_svc.durable.tasks.task_service import TaskService
from router_svc.durable.usage import UsageService
from router_svc.durable.webhooks.outbox import Outbox
from router_svc.durable.webhooks.sender import WebhookSender, ignore_result
from router_svc.leader import LeadingRouter
from router_svc.router_service import RouterService
from router_svc.store.database import RouterDatabase
from weft.dispatch.agents import KnownNames
from weft.kernel.time.clock import Clock, SystemClock
from weft.sql.ownership import write_check
from weft_app.compose.home import WeftHome
from weft_app.config.config import WeftConfig

if TYPE_CHECKING:
    from weft.kernel.telemetry.metrics_page import MetricsPage


def router_database(config: WeftConfig, home: WeftHome, leads_at: str | None = None) -> RouterDatabase:
    """Returns the router's database, not opened. While open, the router leads at `leads_at`."""
    url = config.router.database_url or home.state / "router.db"
    return RouterDatabase(url, promise_file=home.promises, leads_at=leads_at)


def usage_service(
    config: WeftConfig, database: RouterDatabase, router: RouterService, page: "MetricsPage | None" = None
) -> UsageService:
    """Returns the usage service. Start it before the router.

    `page` gets its metrics, if any.
    """
    settings = config.router.usage
    if page is None:
        return UsageService(database, router.records.usage, settings)
    from router_svc.durable.task_metrics import UsageMetrics  # noqa: PLC0415 - only where there is a page

    observe = UsageMetrics(page, router, by_tenant=settings.tenant_metrics)
    return UsageService(database, router.records.usage, settings, observe=observe)


def record_service(
    config: WeftConfig, database: RouterDatabase, router: RouterService, page: "MetricsPage | None" = None
) -> RecordService:
    """Returns the service that keeps a router's records over restarts. Start it before the router.

    `page` gets the number of dropped records, if any.
    """
    settings = config.router.records
    name, words = (
        "weft_router_records_dropped",
        "Records of ended requests that were dropped, because too many were waiting to be written.",
    )
    dropped = None if page is None else page.counter(name, words, ("kind",))
    observe = ignore_dropped if dropped is None else dropped["request",].inc
    writer = Writer.of(router.name)
    service = RecordService(database, writer, router.records, router.memory, settings, SystemClock(), observe)
    router.look_back_in(service.store)
    return service


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStores:
    """A router's database and the services that use it, none of them started."""

    database: RouterDatabase
    usage: UsageService
    records: RecordService
    responses: ResponseService
    tasks: TaskService
    batches: BatchService
    webhooks: WebhookSender

    def leading(self, router: RouterService, clock: Clock) -> LeadingRouter:
        """Returns the service that runs them while the router leads."""
        after = (self.responses, self.tasks, self.batches, self.webhooks)
        names = tuple(name for service in after for name in service.service_names)
        check = write_check("journal", self.database.write_failure, clock, services=names)
        # While the database is down, only these services fail; placement continues.
        checks = (replace(check, is_essential=False),)
        return LeadingRouter(
            self.database, router, clock, before=(self.usage, self.records), after=after, checks=checks
        )


def router_stores(
    config: WeftConfig, home: WeftHome, router: RouterService, address: str, page: "MetricsPage | None"
) -> RouterStores:
    """Returns the stores of a router that leads at `address` and places tasks and batches itself.

    `page` gets their metrics, if any.
    """
    database = router_database(config, home, address)
    limits = config.router.tasks
    clock = SystemClock()
    batch_limits = replace(config.router.batches, max_file_bytes=config.gateway.batches.max_file_bytes)
    files = FileServicer(database, batch_limits, clock, results=config.router.results)
    calls = CallMaker(
        placement=router.placement,
        streams=router.streams,
        fleet=router,
        clock=clock,
        names=KnownNames(router),
        tracing=router.tracing,
        media=TaskMedia(files),
        observers=router.observers,
    )
    store = SqlTaskStore(database)
    store.outbox = outbox = Outbox(None)
    tasks = router_svc.durable.tasks.task_service.build(database, limits, calls, router_name=router.name, store=store)
    router.subscribe(tasks.engine.mesh_changed)
    recorder = TaskRecorder(router.records.requests, router.task_ended, clock, tasks.utc_now)
    tasks.record_with(recorder, config.router.records.keep_seconds)
    batches = BatchService(
        database,
        batch_limits,
        limits,
        tasks.events,
        clock=clock,
        names=calls.names,
        files=files,
        stop_items=tasks.engine.cancel,
        outbox=outbox,
    )
    sent = (
        None
        if page is None
        else page.counter(
            "weft_router_webhook_attempts",
            "Attempts to deliver events to webhooks: delivered, failed or given_up. Events without one: dropped.",
            ("result",),
        )
    )
    webhooks = WebhookSender(
        database,
        outbox,
        router.get_webhook,
        clock,
        utc_now=tasks.utc_now,
        keep_seconds=limits.keep_seconds,
        observe=ignore_result if sent is None else lambda result: sent[result,].inc(),
        outbound=router.outbound,
    )
    router.subscribe(webhooks.mesh_changed)
    router.journal_to(tasks.tasks, batches.files, tasks.servicer)
    if page is not None:
        from router_svc.durable.task_metrics import add_task_metrics  # noqa: PLC0415 - only where there is a page

        add_task_metrics(page, lambda: tasks.states, lambda: tasks.released, tasks.utc_now)
    return RouterStores(
        database=database,
        usage=usage_service(config, database, router, page),
        records=record_service(config, database, router, page),
        responses=ResponseService(database, config.router.responses),
        tasks=tasks,
        batches=batches,
        webhooks=webhooks,
    )
