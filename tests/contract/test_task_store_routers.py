"""Several routers on one PostgreSQL: nobody gets what another has, and everybody hears of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest
from stored_tasks import DONE, LANE, LEASE, NOW, a_chunk, a_row, all_of, begun, claimed, reverted, seen, store_on

from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.store_port import Lane, LaneFilled, ManyChanged, StoreEvent, TaskChanged
from router_svc.durable.tasks.task_events import CHANNEL, MAX_EVENTS_PER_WRITE, MAX_PAYLOAD_BYTES, TaskEventBus
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_testing.postgres_server import PostgresServer

pytest_plugins = ("database_fixtures",)

Heard = asyncio.Queue[StoreEvent]
LISTENS = f"query LIKE 'LISTEN%{CHANNEL}%' AND state = 'idle'"


@pytest.fixture
async def routers(postgres_url: str) -> AsyncIterator[list[SqlTaskStore]]:
    """Two, started at once."""
    stores = [store_on(postgres_url), store_on(postgres_url)]
    await asyncio.gather(*(store.start() for store in stores))
    yield stores
    for store in stores:
        await store.stop()


@asynccontextmanager
async def listening(store: SqlTaskStore) -> AsyncIterator[Heard]:
    """From here on it hears everything."""
    heard: Heard = asyncio.Queue()
    task = asyncio.create_task(store.listen(heard.put_nowait))
    assert await heard.get() == ManyChanged(), "what was told before, it has missed"
    yield heard
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_of_two_routers_one_keeps_a_key(routers: list[SqlTaskStore]) -> None:
    for round_ in range(5):
        rows = [
            [a_row(f"{round_}-{place}-{n}", idempotency_key=f"{round_}-{n}") for n in range(20)] for place in range(2)
        ]
        found = await all_of(
            *(routers[place].submit(row) for place in range(2) for row in (rows[place] if place else rows[place][::-1]))
        )
        assert all(not isinstance(each, Exception) for each in found)
        assert sorted(each.existed for each in found) == [False] * 20 + [True] * 20
        assert len({each.task.id for each in found}) == 20
    other = a_row("other", idempotency_key="0-0", prompt="bye")
    with pytest.raises(WeftError) as conflict:
        await routers[1].submit(other)
    assert conflict.value.reason is Reason.IDEMPOTENCY_CONFLICT


async def test_each_task_is_claimed_by_one_router_and_ended_once(routers: list[SqlTaskStore]) -> None:
    names = [f"task-{number}" for number in range(40)]
    await asyncio.gather(*(routers[0].submit(a_row(name)) for name in names))
    claims = await asyncio.gather(
        *(store.claim(name, f"r{place}", NOW, NOW + LEASE) for name in names for place, store in enumerate(routers))
    )
    won = [claim for claim in claims if claim is not None]
    assert sorted(claim.task_id for claim in won) == sorted(names)
    ends = await asyncio.gather(*(store.end(claim, DONE, NOW) for claim in won for store in routers))
    # The second of the same claim is told that it is done.
    assert all(ends)
    page = await routers[1].list_page(
        "ann", task_service_pb2.ListTasksRequest(states=frozenset({task_pb2.TASK_STATE_COMPLETED}))
    )
    assert len(page.tasks) == len(names)


async def test_a_lost_lease_is_reverted_by_one_router(routers: list[SqlTaskStore]) -> None:
    claims = [await begun(routers[0], f"task-{number}") for number in range(20)]
    found = await asyncio.gather(*(store.revert_expired(NOW + LEASE, 100) for store in routers))
    assert sorted(lost.claim for some in found for lost in some) == sorted(claims)
    again = await claimed(routers[1], "task-0", "r2", NOW + LEASE)
    assert not await routers[0].append(claims[0], [a_chunk(1, "late")])
    assert await routers[1].append(again, [a_chunk(1, "good")])


async def test_each_router_hears_what_others_do_and_not_itself(routers: list[SqlTaskStore]) -> None:
    teller, hearer = routers
    async with listening(hearer) as heard:
        await hearer.submit(a_row("task-0"))
        claim = await begun(teller, "task-1")
        assert [await heard.get(), await heard.get()] == [LaneFilled(LANE), TaskChanged("task-1")]
        await teller.append(claim, [a_chunk(1, "a")])
        await reverted(teller, claim)
        expected = [TaskChanged("task-1"), TaskChanged("task-1"), LaneFilled(LANE)]
        assert [await heard.get() for _ in expected] == expected
        await teller.cancel("ann", "task-1", NOW)
        assert await heard.get() == TaskChanged("task-1")
        await teller.purge_ended(NOW + 1, 10)
        assert await heard.get() == ManyChanged()
        assert heard.empty()


async def test_what_is_heard_is_on_disk(routers: list[SqlTaskStore]) -> None:
    teller, hearer = routers
    async with listening(hearer) as heard:
        for number in range(20):
            telling = asyncio.create_task(teller.submit(a_row(f"task-{number}")))
            assert await heard.get() == LaneFilled(LANE)
            assert (await seen(hearer, f"task-{number}")).state == task_pb2.TASK_STATE_PENDING
            await telling


async def test_much_news_is_told_in_a_few_words(
    routers: list[SqlTaskStore], postgres: PostgresServer, postgres_database: str
) -> None:
    teller, _ = routers
    payloads: list[str] = []
    spy = await asyncpg.connect(postgres.dsn(postgres_database))
    await spy.add_listener(CHANNEL, lambda *notice: payloads.append(notice[-1]))
    lanes = [Lane(f"{number}" + "ä" * 300, "ann", LANE.band) for number in range(MAX_EVENTS_PER_WRITE)]
    await asyncio.gather(*(teller.submit(a_row(f"task-{number}", lane=lane)) for number, lane in enumerate(lanes)))
    assert await teller.fail_expired(NOW + 3600, 1000)
    await asyncio.gather(*(teller.submit(a_row(f"more-{number}")) for number in range(MAX_EVENTS_PER_WRITE + 10)))
    assert len(await teller.fail_expired(NOW + 3600, 1000)) == MAX_EVENTS_PER_WRITE + 10
    await spy.execute("SELECT 1")
    await spy.close()
    assert max(len(payload.encode()) for payload in payloads) <= MAX_PAYLOAD_BYTES
    words = [json.loads(payload)[1:] for payload in payloads]
    told = {word[0] for some in words for word in some if isinstance(word, list)}
    assert told == {lane.model for lane in lanes} | {"demo"}
    assert words[-1] == [0]


async def test_news_in_words_of_another_release_mean_that_something_changed(
    routers: list[SqlTaskStore], postgres: PostgresServer, postgres_database: str
) -> None:
    async with listening(routers[0]) as heard:
        for payload in ("", "7", '["x", {"new": 1}]', '["x", ["m", "t", 99]]'):
            postgres.sql(f"SELECT pg_notify('{CHANNEL}', '{payload}')", postgres_database)
            assert await heard.get() == ManyChanged()


async def test_a_watcher_whose_router_does_not_hear_yet_is_woken_once_it_does(routers: list[SqlTaskStore]) -> None:
    """What another router told in the moment of the start was missed, and the watcher waited for its next look."""
    teller, hearer = routers
    claim = await begun(teller, "task-1")
    events = TaskEventBus()
    with events.watching("task-1") as news:
        assert await teller.end(claim, DONE, NOW)
        hearing = asyncio.create_task(hearer.listen(events.publish))
        await news.wait()
    hearing.cancel()
    await asyncio.gather(hearing, return_exceptions=True)


async def test_a_listener_that_was_cut_off_says_that_it_missed_something(
    routers: list[SqlTaskStore], postgres: PostgresServer
) -> None:
    async with listening(routers[1]) as heard:
        postgres.sql(f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {LISTENS}")
        assert await heard.get() == ManyChanged()
        await routers[0].submit(a_row("task-1"))
        assert await heard.get() == LaneFilled(LANE)
