"""Three routers with one PostgreSQL database keep the limits of tenants together, and each says how it is with them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

import pytest
from test_request_log_of_loop import asked

from router_svc.client_registry import ClientRegistry, ClientsConfig
from router_svc.limit_leases import LeaseIntervals, LimitLeases
from router_svc.merged_records import merged_limit_uses
from router_svc.policy.leased_window import LeaseTerms
from router_svc.policy.settings import RateLimitConfig
from router_svc.policy.tenant_limits import LimitScope, LimitSubject, TenantLimit
from router_svc.store.database import RouterDatabase
from router_svc.store.limit_windows import SqlLeaseStore
from weft.api.common.v1 import receipt_pb2
from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus
from weft.dispatch.placement import PlacementRequest
from weft.kernel.clock import SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.health import HealthState
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason
from weft.kernel.units import HOUR, MINUTE, Rate, RateUnit

pytest_plugins = ("database_fixtures",)
pytestmark = pytest.mark.slow("several routers on one database")

CLOCK = SystemClock()
TERMS = LeaseTerms(silence_seconds=0.4, max_hold_seconds=0.5)
INTERVALS = LeaseIntervals(contact_seconds=0.1, timeout_seconds=5.0, publish_seconds=0.1)
WAIT_SECONDS = 20.0


class BreakableStore(SqlLeaseStore):
    """A store whose database can be away."""

    is_away = False

    async def _run(self, statement: Any, **values: object) -> Any:
        if self.is_away:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the database is away")
        return await super()._run(statement, **values)


@dataclass
class Router:
    name: str
    store: BreakableStore
    leases: LimitLeases
    clients: ClientRegistry
    keys: int = 0

    async def admits(self, request: PlacementRequest) -> RateLimitStatus | None:
        """As a router does when a request comes: waits for a lease if it has to, then counts. Raises its refusal."""
        waits = self.clients.wait_for(request)
        if waits is not None:
            await waits
        self.keys += 1
        return self.clients.admit(self.keys, request)

    async def tries(self, request: PlacementRequest) -> bool:
        try:
            await self.admits(request)
        except WeftError as error:
            if error.reason is not Reason.RATE_LIMIT_EXCEEDED:
                raise
            return False
        return True


def a_router(url: str, name: str, config: RateLimitConfig) -> Router:
    store = BreakableStore(RouterDatabase(url), name, new_id("life"), silence_seconds=TERMS.silence_seconds)
    leases = LimitLeases(store, CLOCK, name, TERMS, INTERVALS)
    clients = ClientRegistry(ClientsConfig(), config, CLOCK)
    clients.share(leases)
    return Router(name, store, leases, clients)


CONFIG = RateLimitConfig(
    tenants={"a": (Rate(20, MINUTE),), "b": (Rate(1000, MINUTE, RateUnit.TOKENS),)}, default=(Rate(3, HOUR),)
)


@pytest.fixture
async def routers(postgres_url: str) -> AsyncIterator[list[Router]]:
    found = [a_router(postgres_url, name, CONFIG) for name in ("r1", "r2", "r3")]
    for each in found:
        each.leases.follow(lambda: ["r1", "r2", "r3"])
        await each.leases.start()
    await know_each_other(found)
    yield found
    for each in found:
        await each.leases.stop()


async def know_each_other(routers: list[Router]) -> None:
    await until(lambda: all(each.leases.contact.routers == len(routers) for each in routers))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            found = condition()
            if await found if isawaitable(found) else found:
                return
            await asyncio.sleep(0.01)


async def admitted(routers: list[Router], tenant: str, attempts: int) -> int:
    """How many of so many requests for each router come in, sent at the same time."""
    requests = [each.tries(asked(f"r-{n}", tenant=tenant)) for n in range(attempts) for each in routers]
    return sum(await asyncio.gather(*requests))


async def test_the_limit_holds_over_all_routers_and_all_of_it_can_be_used(routers: list[Router]) -> None:
    assert await admitted(routers, "a", 30) <= 20
    # What one router holds unspent comes back when it ends, and can be used by any.
    await asyncio.sleep(TERMS.max_hold_seconds + 3 * INTERVALS.contact_seconds)
    total = (await routers[0].clients.all_limit_uses("a"))[0].used
    more = 0
    async with asyncio.timeout(WAIT_SECONDS):
        while total + more < 20:
            more += await admitted(routers[:1], "a", 1)
    assert await admitted(routers, "a", 5) == 0
    assert await admitted(routers, "of-the-default", 10) <= 3


async def test_a_refusal_says_what_is_left_and_when_to_ask_again(routers: list[Router]) -> None:
    while await routers[0].tries(asked("r", tenant="a")):
        pass
    with pytest.raises(WeftError) as caught:
        await routers[1].admits(asked("r", tenant="a"))
    assert (caught.value.metadata["limit"], caught.value.metadata["remaining"]) == ("20", "0")
    assert 0 < (caught.value.retry_after_seconds or 0) <= 60
    assert routers[1].leases.figures.waits >= 1


async def test_a_slice_is_spent_without_the_database(routers: list[Router]) -> None:
    config = RateLimitConfig(tenants={"a": (Rate(10_000, MINUTE),)})
    one = routers[0]
    one.clients.reconfigure(ClientsConfig(), config)
    await one.admits(asked("r-1", tenant="a"))
    waits = one.leases.figures.waits
    for number in range(400):
        assert one.clients.wait_for(asked("r", tenant="a")) is None, number
        one.clients.admit(1000 + number, asked("r", tenant="a"))
    assert one.leases.figures.waits == waits == 1


async def test_tokens_that_were_used_are_those_that_all_routers_see(routers: list[Router]) -> None:
    first, second = routers[0], routers[1]
    await first.admits(asked("r-1", tenant="b", prompt_tokens=100))
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED)
    receipt.usage.prompt_tokens, receipt.usage.completion_tokens = 90, 900
    first.clients.note_end(first.keys, receipt)

    async def is_counted() -> bool:
        return sum(each.used for each in await second.clients.all_limit_uses("b")) == 990

    await until(is_counted)
    assert not await second.tries(asked("r-2", tenant="b", prompt_tokens=11))
    status = await second.admits(asked("r-3", tenant="b", prompt_tokens=4))
    assert status is not None
    assert status.tokens.remaining <= 6


async def test_a_router_that_is_killed_leaves_what_it_spent_and_its_unspent_slices_come_back(
    routers: list[Router], postgres_url: str
) -> None:
    config = RateLimitConfig(tenants={"a": (Rate(20, 1),)})
    for each in routers:
        each.clients.reconfigure(ClientsConfig(), config)
    killed = routers.pop(0)
    loop = asyncio.get_running_loop()
    spent_at, count = loop.time(), 0
    assert await killed.tries(asked("r", tenant="a"))
    # As kill -9 leaves it: nothing is returned.
    for task in killed.leases._tasks:
        task.cancel()
    await killed.store.close()
    again = a_router(postgres_url, "r1", config)
    await again.leases.start()
    routers.insert(0, again)
    while True:
        more = await admitted(routers, "a", 3)
        # What was spent leaves the window after a second, however long the start took.
        if loop.time() - spent_at >= 1.0:
            break
        count += more
    assert count <= 19, "one of the second was spent by the router that was killed"
    await until(lambda: again.tries(asked("r", tenant="a")))


async def test_without_the_database_each_admits_its_share_says_so_and_leases_again(routers: list[Router]) -> None:
    for each in routers:
        each.store.is_away = True
    await until(lambda: all(each.leases.is_away for each in routers))
    assert await admitted(routers, "a", 10) == 0, "its share is not left to it yet"
    one = routers[0]
    observed = await one.leases.health_check(()).look()
    assert (observed.state, observed.reason) == (HealthState.DEGRADED, "limits_by_share")
    assert "1/3" in observed.message
    await until(lambda: one.leases.away_seconds > TERMS.silence_seconds + 0.1)
    status = await one.admits(asked("r", tenant="a"))
    assert status is not None
    assert (status.requests.limit, status.requests.remaining) == (7, 6)
    (use,) = await one.clients.all_limit_uses("a")
    assert [(each.router, each.is_cut_off, each.share) for each in use.slices] == [("r1", True, 7)]
    assert await admitted(routers, "a", 10) == 19
    for each in routers:
        each.store.is_away = False
    await until(lambda: not any(each.leases.is_away for each in routers))
    assert await admitted(routers, "a", 10) == 0
    (use,) = await one.clients.all_limit_uses("a")
    assert (use.used, use.limit) == (20, 20)
    assert (await one.leases.health_check(()).look()).state is HealthState.OK


async def knows(router: Router, count: int) -> bool:
    """Whether the database counts as many requests."""
    (use,) = await router.clients.all_limit_uses("a")
    return use.used == count


async def test_a_router_alone_keeps_its_limit_while_the_database_is_away(postgres_url: str) -> None:
    one = a_router(postgres_url, "r1", CONFIG)
    await one.leases.start()
    try:
        assert await admitted([one], "a", 12) == 12
        # On a busy machine they may have been admitted before the database had answered: it has to know of them first.
        await until(lambda: knows(one, 12))
        one.store.is_away = True
        await until(lambda: one.leases.is_away and one.leases.away_seconds > TERMS.silence_seconds)
        assert await admitted([one], "a", 12) == 8
    finally:
        one.store.is_away = False
        await one.leases.stop()
    again = a_router(postgres_url, "r1", CONFIG)
    await again.leases.start()
    try:
        assert await admitted([again], "a", 12) <= 8, "a restart begins with what the database has"
    finally:
        await again.leases.stop()


async def test_slices_are_returned_when_a_router_stops(routers: list[Router]) -> None:
    last = routers.pop()
    assert await last.tries(asked("r", tenant="a"))
    await last.leases.stop()
    (use,) = await routers[0].clients.all_limit_uses("a")
    assert (use.used, list(use.slices)) == (1, [])
    await until(lambda: all(each.leases.contact.routers == 2 for each in routers))


async def test_a_router_that_is_gone_from_the_registry_is_left_no_share(routers: list[Router]) -> None:
    lost = routers.pop()
    for task in lost.leases._tasks:
        task.cancel()
    await lost.store.close()
    await asyncio.sleep(2 * TERMS.silence_seconds)
    assert {each.leases.contact.routers for each in routers} == {3}, "the registry still has it"
    for each in routers:
        each.leases.follow(lambda: ["r1", "r2"])
    await until(lambda: all(each.leases.contact.routers == 2 for each in routers))


async def test_keys_and_models_of_other_routers_are_shown(routers: list[Router]) -> None:
    limits = (
        TenantLimit(Rate(5, HOUR), LimitScope(LimitSubject.KEY)),
        TenantLimit(Rate(7, MINUTE), LimitScope(LimitSubject.MODEL, "q*")),
    )
    for each in routers:
        each.clients.declare({"c": limits})
    await routers[0].admits(asked("r-1", tenant="c", caller="key:one"))
    await routers[1].admits(asked("r-2", tenant="c", caller="key:two"))
    await asyncio.sleep(TERMS.max_hold_seconds + 3 * INTERVALS.contact_seconds)
    lists = [await each.clients.all_limit_uses("c") for each in routers]
    uses = merged_limit_uses(lists)
    found = {(use.key, use.model): (use.used, use.limit) for use in uses}
    assert found == {("key:one", ""): (1, 5), ("key:two", ""): (1, 5), ("", "qwen"): (2, 7)}
    assert all(use.is_shared for use in uses)


async def test_a_document_that_changes_a_limit_changes_its_window_for_all(routers: list[Router]) -> None:
    for each in routers:
        each.clients.declare({"a": (TenantLimit(Rate(10, MINUTE)),)})
    assert await admitted(routers, "a", 20) <= 10
    for each in routers:
        each.clients.declare({"a": (TenantLimit(Rate(14, MINUTE)),)})
    await asyncio.sleep(TERMS.max_hold_seconds + 1.2)
    await admitted(routers, "a", 20)
    (use,) = merged_limit_uses([await each.clients.all_limit_uses("a") for each in routers])
    assert use.used == 14
    for each in routers:
        each.clients.declare({"a": (TenantLimit(Rate(5, MINUTE)),)})
    assert await admitted(routers, "a", 20) == 0


async def test_tokens_served_by_others_are_noted_once(routers: list[Router]) -> None:
    served: list[dict[str, float]] = [{"a": 100.0}]
    noted: list[tuple[str, float]] = []
    routers[1].leases.share_service(dict, lambda tenant, tokens: noted.append((tenant, tokens)))
    await until(lambda: routers[1].leases._has_published)
    routers[0].leases.share_service(lambda: served.pop() if served else {}, lambda *_: None)
    await until(lambda: noted == [("a", 100.0)])
    served.append({"a": 40.0})
    await until(lambda: noted == [("a", 100.0), ("a", 40.0)])
    await asyncio.sleep(3 * INTERVALS.publish_seconds)
    assert noted == [("a", 100.0), ("a", 40.0)], "what was read again is not noted again"
