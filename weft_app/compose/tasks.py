"""How durable tasks and batches are set up. Needs a database, so only what runs a router for others imports it."""

from dataclasses import dataclass

import router_svc.durable.batches.service
import router_svc.durable.tasks.service
from router_svc.durable.batches.config import BatchLimits
from router_svc.durable.batches.service import BatchService
from router_svc.durable.tasks.config import TaskLimits
from router_svc.durable.tasks.service import TaskService, TaskServiceDeps
from router_svc.service import RouterService
from router_svc.store.database import RouterDatabase
from weft.dispatch.agents import KnownNames
from weft.dispatch.schema_guard import SchemaLimits
from weft.kernel.service import Service
from weft_app.compose.schema_limits import schema_limits
from weft_app.config.config import WeftConfig
from weft_app.config.task_section import BatchesSection, TasksSection


@dataclass(frozen=True, slots=True)
class DurableServices:
    """What runs beside a router."""

    tasks: TaskService
    batches: BatchService

    def in_order(self) -> tuple[Service, ...]:
        """As they start; they stop the other way round, and before the router does."""
        return (self.tasks, self.batches)


def durable_services(config: WeftConfig, database: RouterDatabase, router: RouterService) -> DurableServices:
    """Tasks and batches in the router's database, placed by the router itself."""
    limits = task_limits(config.router.tasks, schema_limits(config.gateway.limits.schemas))
    parts = TaskServiceDeps(
        placement=router.placement,
        fleet=router,
        channels=router.channels,
        subscribe=router.subscribe,
    )
    tasks = router_svc.durable.tasks.service.build(database, limits, parts)
    batches = router_svc.durable.batches.service.build(
        database, batch_limits(config.router.batches), limits, tasks.events, names=KnownNames(router)
    )
    return DurableServices(tasks, batches)


def task_limits(section: TasksSection, schemas: SchemaLimits) -> TaskLimits:
    """Every bound of tasks; tests/unit/host/test_task_limits.py sees to it that none is without a name."""
    return TaskLimits(**section.model_dump(), schemas=schemas)


def batch_limits(section: BatchesSection) -> BatchLimits:
    """Every bound of files and batches."""
    return BatchLimits(**section.model_dump())
