"""The ledgers in PostgreSQL do what the model of them says, also when routers report at the same time."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from kit.limit_ledger import Ledger
from sqlalchemy import text

from router_svc.limit_leases import LimitSubjectNames, NewWindow
from router_svc.policy.leased_window import Answer, Contact, LeasedWindow, LeaseTerms, Report
from router_svc.store.database import RouterDatabase
from router_svc.store.limit_windows import SqlLeaseStore
from weft.kernel.errors import WeftError
from weft.kernel.units import MINUTE

pytest_plugins = ("database_fixtures",)

OF = LimitSubjectNames(tenant="a")
TERMS = LeaseTerms()


def a_new_window(name: str = "w", seconds: int = MINUTE) -> NewWindow:
    return NewWindow(id=name, of=OF, unit=1, seconds=seconds)


def a_report(number: int, *, most: int = 20, **more: object) -> Report:
    values = {"spent": (), "keep": 0, "need": 0, "least": 0, "want": 0, "hold_seconds": 5.0} | more
    return Report(number=number, most=most, **values)  # type: ignore[arg-type]


@pytest.fixture
async def stores(postgres_url: str) -> AsyncIterator[list[SqlLeaseStore]]:
    """Three routers with one database; each is known to it."""
    stores = [SqlLeaseStore(RouterDatabase(postgres_url), f"r{n}", "1", silence_seconds=3.0) for n in range(3)]
    for store in stores:
        await store.open()
        await store.contact(())
    yield stores
    for store in stores:
        await store.close()


async def exchange(store: SqlLeaseStore, report: Report, window: str = "w") -> Answer:
    return (await store.exchange({window: report}))[window]


async def test_a_window_that_does_not_exist_has_no_answer_and_is_made(stores: list[SqlLeaseStore]) -> None:
    store = stores[0]
    assert await store.exchange({"w": a_report(1)}) == {}
    await asyncio.gather(*(each.create([a_new_window(), a_new_window("v")]) for each in stores))
    assert set(await store.exchange({"w": a_report(1), "v": a_report(1), "x": a_report(1)})) == {"w", "v"}


async def test_a_report_that_comes_twice_counts_once(stores: list[SqlLeaseStore]) -> None:
    store = stores[0]
    await store.create([a_new_window()])
    first = await exchange(store, a_report(1, need=4, least=4, want=4))
    assert first.lease == 4
    again = a_report(2, spent=((1.0, 3),), keep=1, need=2, least=2, want=2)
    answers = [await exchange(store, again) for _ in range(3)]
    assert {each.lease for each in answers} == {3}
    assert {sum(amount for _, amount in each.counted) for each in answers} == {3}
    assert answers[2].lease_seconds < answers[0].lease_seconds


async def test_the_statement_answers_as_the_model_does(stores: list[SqlLeaseStore]) -> None:
    choose = random.Random(3)
    await stores[0].create([a_new_window()])
    ledger, numbers, held = Ledger(MINUTE), [0, 0, 0], [0, 0, 0]
    for _ in range(150):
        which = choose.randrange(3)
        keep = choose.randint(0, held[which])
        spent: tuple[tuple[float, int], ...] = (
            ((choose.choice([0.0, 1.0, 30.0]), held[which] - keep),) if held[which] > keep else ()
        )
        if spent and choose.random() < 0.2:
            spent = (*spent, (spent[0][0], -1))
        numbers[which] += choose.random() < 0.9
        need = choose.randint(0, 6)
        report = a_report(
            numbers[which], spent=spent, keep=keep, need=need, least=min(need, 2), want=need + choose.randint(0, 4)
        )
        found = await exchange(stores[which], report)
        wanted = ledger.report(f"r{which}", report, 1_000.0, routers=3)
        assert (found.number, found.lease, found.reserved) == (wanted.number, wanted.lease, 0)
        assert sum(each for _, each in found.counted) == ledger.total(1_000.0)
        assert sum(each for _, each in found.others) == sum(each for _, each in wanted.others)
        held[which] = found.lease


async def test_a_correction_is_subtracted_and_what_left_is_not_counted(stores: list[SqlLeaseStore]) -> None:
    store = stores[0]
    await store.create([a_new_window()])
    answer = await exchange(store, a_report(1, spent=((0.0, 5), (59.5, 2), (61.0, 9), (0.5, -3))))
    assert sum(amount for _, amount in answer.counted) == 4
    await asyncio.sleep(0.6)
    answer = await exchange(store, a_report(2))
    assert sum(amount for _, amount in answer.counted) == 2


async def test_a_silent_router_s_share_is_left_to_it(stores: list[SqlLeaseStore], postgres_url: str) -> None:
    store = stores[0]
    await store.create([a_new_window()])
    database = RouterDatabase(postgres_url)
    await database.open()
    try:
        for name in ("r0", "r2"):
            await database.change(text("UPDATE limit_routers SET contact_at = contact_at - 9 WHERE name = :n"), n=name)
    finally:
        await database.close()
    answer = await exchange(store, a_report(1, need=14, least=14, want=14))
    assert (answer.reserved, answer.lease) == (7, 0), "r2 has not been heard of: 20 of three are 7, 7 and 6"
    assert (await exchange(store, a_report(2, need=13, least=13, want=13))).lease == 13
    assert set((await store.contact(["r2", "r1"])).ages) == {"r0", "r1"}, "one that is heard of is not gone"


async def test_leases_taken_at_once_by_many_never_exceed_the_limit(stores: list[SqlLeaseStore]) -> None:
    """Each waits for the row of another: it must see what that one took."""
    most, names = 60, [f"w{n}" for n in range(8)]
    await stores[0].create([a_new_window(name) for name in names])
    taken = dict.fromkeys(names, 0)

    async def use(store: SqlLeaseStore, seed: int) -> None:
        choose = random.Random(seed)
        windows = {name: LeasedWindow(MINUTE, TERMS, Contact(reached_at=0.0)) for name in names}
        loop = asyncio.get_running_loop()
        for _ in range(40):
            asked = choose.sample(names, 4)
            now = loop.time()
            for name in asked:
                windows[name].has_room(now, most, 2)
                windows[name].ask(2)
            answers = await store.exchange({name: windows[name].report(now) for name in asked})
            for name, answer in answers.items():
                windows[name].answer(answer, now, loop.time())
                while windows[name].has_room(loop.time(), most, 1):
                    windows[name].add(loop.time(), 1)
                    taken[name] += 1

    await asyncio.gather(*(use(store, seed) for seed, store in enumerate(stores)))
    assert set(taken.values()) == {most}


async def test_uses_are_those_of_all_routers_with_what_each_holds(stores: list[SqlLeaseStore]) -> None:
    await stores[0].create([a_new_window()])
    await exchange(stores[0], a_report(1, spent=((10.0, 3),), need=2, least=2, want=2))
    await exchange(stores[1], a_report(1, spent=((0.0, 4),), need=1, least=1, want=1))
    (use,) = await stores[2].uses("a")
    assert (use.used, use.most, dict(use.held)) == (7, 20, {"r0": 2, "r1": 1})
    assert use.reset_seconds == pytest.approx(60, abs=1)
    assert await stores[2].uses("b") == []
    totals = (await stores[2].contact(())).totals
    assert totals["w"][0] == 10


async def test_served_tokens_of_others_are_read_once_they_change(stores: list[SqlLeaseStore]) -> None:
    one, two, _ = stores
    await one.publish({"a": 5.0})
    assert await two.publish({"b": 1.0}) == {("r0/1", "a"): 5.0}
    await one.publish({"a": 7.0})
    assert (await two.publish({}))["r0/1", "a"] == 7.0
    assert await one.publish({}) == {("r1/1", "b"): 1.0}


async def test_statements_of_one_router_that_come_together_take_turns(stores: list[SqlLeaseStore]) -> None:
    store = stores[0]
    await store.create([a_new_window(f"w{n}") for n in range(20)])
    reports = asyncio.gather(*(exchange(store, a_report(1, need=1, least=1, want=1), f"w{n}") for n in range(20)))
    others = asyncio.gather(*(store.contact(()) for _ in range(20)), store.uses(""), store.forget())
    assert [each.lease for each in await reports] == [1] * 20
    await others


async def test_a_connection_that_was_cut_is_made_again(stores: list[SqlLeaseStore], postgres_url: str) -> None:
    from asyncpg import connect  # noqa: PLC0415 - of the server's side alone

    await stores[0].create([a_new_window()])
    admin = await connect(postgres_url.replace("+asyncpg", ""))
    try:
        await admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE application_name = 'weft-router' AND datname = current_database()"
        )
    finally:
        await admin.close()
    with pytest.raises(WeftError, match="the database failed"):
        await exchange(stores[0], a_report(1, need=1, least=1, want=1))
    assert (await exchange(stores[0], a_report(1, need=1, least=1, want=1))).lease == 1
