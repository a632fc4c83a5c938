"""A faulty router for tests: `python -m kit.torture_router`.

`--kill-at claimed:2` kills it when it reaches a failpoint for the second time. `--stop-before-end 3` stops it (SIGSTOP)
before it stores its third end, like a machine that is suspended at that moment. `--unfenced` uses a store that does not
check claims, as a negative control of the history checker.
"""

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

import router_svc.durable.tasks.task_service
import router_svc.router_service
from router_svc.durable.tasks.failpoints import Failpoint, Failpoints
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_call import CallMaker
from router_svc.durable.tasks.task_records import TaskLease, TaskOutcome
from router_svc.durable.tasks.task_service import TaskService
from router_svc.durable.webhooks.outbox import Outbox
from router_svc.router_service import RouterService
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import task_pb2
from weft.dispatch.agents import KnownNames
from weft.kernel.telemetry.structured_logs import BoundedLogFile, configure_logging
from weft.kernel.time.clock import SystemClock
from weft_app.compose.durable_services import record_service, router_database, usage_service
from weft_app.compose.home import WeftHome
from weft_app.compose.security import new_host
from weft_app.compose.service_configs import router_config
from weft_app.compose.serving import registry_address, serve_until_stopped
from weft_app.config.config import WeftConfig
from weft_app.config.loader import load_config


@dataclass(frozen=True, slots=True)
class Breakage:
    """The faults of this router."""

    kill_at: tuple[Failpoint, int] | None
    """The failpoint, and the number of the visit at which the router kills itself."""
    is_fenced: bool
    stop_before_end: int
    """The end before which the router stops itself, counted from 1; 0: none."""


class DeadlyFailpoint(Failpoints):
    """Kills the process at the nth visit of a failpoint."""

    def __init__(self, point: Failpoint, times: int) -> None:
        self._point = point
        self._left = times

    @override
    async def reach(self, point: Failpoint, task_id: str) -> None:
        del task_id
        if point is self._point:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)


class SleepyTaskStore(SqlTaskStore):
    """A store that stops its process before it stores an end, until another process resumes it.

    It stops between transactions: within one the process would keep SQLite's lock, so no other router could take over.
    """

    def __init__(self, database: RouterDatabase, *, stop_before_end: int) -> None:
        """`stop_before_end`: counted from 1; 0: none."""
        super().__init__(database)
        self._ends_left = stop_before_end

    @override
    async def end(self, claim: TaskLease, ending: TaskOutcome, now: float) -> bool:
        self._ends_left -= 1
        if not self._ends_left:
            # In the store's thread, within a read without statements, which holds no lock. To this thread: it would
            # write on until the process's main thread had its turn on a busy machine and took the signal.
            await self._database.read(lambda _: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP))
        return await super().end(claim, ending, now)


class UnfencedTaskStore(SleepyTaskStore):
    """A store without fencing: claims are never reported as lost."""

    fence = f"({SqlTaskStore.fence} OR id = :id)"

    def __init__(self, database: RouterDatabase, *, stop_before_end: int) -> None:
        super().__init__(database, stop_before_end=stop_before_end)
        self._claims: set[TaskLease] = set()

    @override
    async def claim(self, task_id: str, owner: str, now: float, lease_until: float) -> TaskLease | None:
        claim = await super().claim(task_id, owner, now, lease_until)
        if claim is not None:
            self._claims.add(claim)
        return claim

    async def renew(self, owner: str, lease_until: float) -> frozenset[TaskLease]:
        """Renews all claims, and also returns those that another router has taken."""
        renewed = await super().renew(owner, lease_until)
        return renewed | self._claims

    @override
    async def end(self, claim: TaskLease, ending: TaskOutcome, now: float) -> bool:
        self._claims.discard(claim)
        return await super().end(claim, ending, now)

    @override
    async def revert(
        self,
        claim: TaskLease,
        failure: task_pb2.TaskError,
        *,
        receipt: bytes,
        counts: bool,
        now: float,
        ready_at: float,
    ) -> bool:
        self._claims.discard(claim)
        return await super().revert(claim, failure, receipt=receipt, counts=counts, now=now, ready_at=ready_at)

    @override
    async def cancel(self, tenant: str, task_id: str, now: float) -> tuple[task_pb2.Task | None, bool]:
        self._claims = {claim for claim in self._claims if claim.task_id != task_id}
        return await super().cancel(tenant, task_id, now)


def broken_tasks(
    config: WeftConfig, database: RouterDatabase, router: RouterService, breakage: Breakage
) -> TaskService:
    calls = CallMaker(
        placement=router.placement,
        streams=router.streams,
        fleet=router,
        clock=SystemClock(),
        names=KnownNames(router),
    )
    failpoints: Failpoints = Failpoints() if breakage.kill_at is None else DeadlyFailpoint(*breakage.kill_at)
    kind = SleepyTaskStore if breakage.is_fenced else UnfencedTaskStore
    store = kind(database, stop_before_end=breakage.stop_before_end)
    # It writes events for webhooks, and sends none.
    store.outbox = Outbox(None)
    tasks = router_svc.durable.tasks.task_service.build(
        database, config.router.tasks, calls, router_name=router.name, failpoints=failpoints, store=store
    )
    router.subscribe(tasks.engine.mesh_changed)
    return tasks


async def serve(config: WeftConfig, home: WeftHome, listen: str, breakage: Breakage) -> None:
    """Serves a faulty router until a signal comes, or it kills itself."""
    host = new_host(config, "router", None)
    address = host.bind(listen)
    router = router_svc.router_service.build(router_config(config, registry_address(config, home), address))
    database = router_database(config, home)
    companions = broken_tasks(config, database, router, breakage)
    usage, records = usage_service(config, database, router), record_service(config, database, router)

    def announce() -> None:
        sys.stdout.write(f"router serves at {address}\n")
        sys.stdout.flush()

    await serve_until_stopped(host, router, config, announce, before=[usage, records], companions=[companions])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="kit.torture_router", allow_abbrev=False)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--listen", help="gRPC address; default: the socket in the home")
    parser.add_argument("--kill-at", type=_place, help="failpoint and number, such as claimed:2")
    parser.add_argument("--stop-before-end", type=int, default=0, help="the end before which it stops itself")
    parser.add_argument("--unfenced", action="store_true")
    given = parser.parse_args(arguments)
    config, home = load_config(given.config), WeftHome(given.home)
    home.create()
    configure_logging("router", file=BoundedLogFile(home.logs / "router.log", config.log.max_file_bytes))
    breakage = Breakage(kill_at=given.kill_at, is_fenced=not given.unfenced, stop_before_end=given.stop_before_end)
    asyncio.run(serve(config, home, given.listen or home.address("router"), breakage))


def _place(text: str) -> tuple[Failpoint, int]:
    name, _, times = text.partition(":")
    return Failpoint(name), int(times or 1)


if __name__ == "__main__":
    main(sys.argv[1:])
