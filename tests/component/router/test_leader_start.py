"""A standby that takes over and cannot begin to lead."""

import asyncio
from contextlib import nullcontext
from typing import Any, cast

from typing_extensions import override

from router_svc.leader import LeadingRouter
from router_svc.store.database import ROUTER_OWNER
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import CRITICAL_TASK, Service
from weft.sql.ownership import StandbyPair
from weft_testing.fake_clock import FakeClock, let_all_run


class TakenOver:
    """A database that another router leads at the first look, and this one from then on."""

    may_have_standby = False

    def __init__(self) -> None:
        self.looks = 0

    async def open(self) -> None:
        self.looks += 1
        if self.looks == 1:
            raise ROUTER_OWNER.owned_elsewhere()


class OwnWatch:
    """Finds the lock free once; then this process has it."""

    owner_address = ""

    def __init__(self) -> None:
        self.is_free = True

    def database(self) -> nullcontext[None]:
        return nullcontext()

    async def until_free(self) -> None:
        if not self.is_free:
            await asyncio.Event().wait()
        self.is_free = False


class Failing(Service):
    """Meets a failing database at its start."""

    service_names = ()

    @override
    def register(self, server: object) -> None: ...

    @override
    async def start(self) -> None:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the router's database failed")

    @override
    async def stop(self, grace_seconds: float) -> None: ...


async def test_router_that_cannot_begin_to_lead_ends_instead_of_waiting_for_its_own_lock() -> None:
    clock, ended = FakeClock(), list[str]()
    router: Any = TakenOver()
    leading = LeadingRouter(router, cast("Any", None), clock, before=(Failing(),), after=())
    paired = StandbyPair(leading, ROUTER_OWNER, cast("Any", OwnWatch()), clock)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: ended.append(str(context[CRITICAL_TASK])))
    await paired.start()
    await let_all_run()
    await clock.advance(60.0)
    await let_all_run()
    loop.set_exception_handler(None)
    assert ended == ["router-standby"]
