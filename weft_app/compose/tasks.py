"""How durable tasks and batches are set up. Needs a database, so only what runs a router for others imports it."""

from dataclasses import dataclass

import router_svc.durable.batches.service
import router_svc.durable.tasks.service
from router_svc.durable.batches.service import BatchService
from router_svc.durable.tasks.config import TaskLimits, TaskSettings
from router_svc.durable.tasks.service import TaskService, TaskServiceDeps
from router_svc.service import RouterService
from router_svc.store.database import RouterDatabase
from weft.dispatch.agents import KnownNames
from weft.kernel.service import Service
from weft.kernel.settings import values_of
from weft_app.config.config import WeftConfig


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
    limits = task_limits(config)
    parts = TaskServiceDeps(
        placement=router.placement,
        fleet=router,
        channels=router.channels,
        subscribe=router.subscribe,
    )
    tasks = router_svc.durable.tasks.service.build(database, limits, parts)
    batches = router_svc.durable.batches.service.build(
        database, config.router.batches, limits, tasks.events, names=KnownNames(router)
    )
    return DurableServices(tasks, batches)


def task_limits(config: WeftConfig) -> TaskLimits:
    """Returns every bound of durable tasks: their own, and those of the JSON schemas of any request."""
    return TaskLimits(**values_of(TaskSettings, config.router.tasks), schemas=config.gateway.limits.schemas)
