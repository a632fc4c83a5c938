"""Idempotency keys that are asked for without submitting, and clocks that do not agree, on every database."""

from stored_tasks import LEASE, NOW, a_task, begun, claimed, refused, reverted, waiting

from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.store.database import RouterDatabase
from weft.kernel.reasons import Reason

pytest_plugins = ("database_fixtures", "task_store_fixtures")


async def test_key_lookup_finds_its_task_and_stores_nothing(kept: SqlTaskStore) -> None:
    await kept.submit(a_task("t1", idempotency_key="k"))
    found = await kept.submitted(a_task("t2", idempotency_key="k"))
    assert found is not None
    assert (found.task.id, found.existed) == ("t1", True)
    assert await kept.submitted(a_task("t2", idempotency_key="other")) is None
    assert await kept.submitted(a_task("t2")) is None
    await refused(Reason.IDEMPOTENCY_CONFLICT, kept.submitted(a_task("t2", idempotency_key="k", prompt="another")))
    assert [task.id for task in await waiting(kept)] == ["t1"]


async def test_new_task_is_claimable_by_a_router_with_an_earlier_clock(kept: SqlTaskStore) -> None:
    await kept.submit(a_task("t1", created_at=NOW + 3_600))
    assert [task.id for task in await waiting(kept)] == ["t1"]
    assert len(await kept.lanes(NOW, None, 10)) == 1
    assert await kept.next_ready_at(NOW) is None
    await claimed(kept, "t1")


async def test_requeued_task_is_claimable_by_a_router_with_an_earlier_clock(kept: SqlTaskStore) -> None:
    await reverted(kept, await begun(kept, "t1"), now=NOW + 5)
    await begun(kept, "t2")
    await kept.revert_expired(NOW + LEASE, 10)
    assert [task.id for task in await waiting(kept)] == ["t1", "t2"]


async def test_numbers_of_purged_tasks_are_not_reused(kept: SqlTaskStore, beside: RouterDatabase) -> None:
    numbers = []
    for name in ("task-1", "task-2"):
        await kept.submit(a_task(name))
        numbers.append(await beside.value("SELECT max(seq) FROM tasks"))
        await kept.cancel("ann", name, 0.0)
        await kept.delete("ann", name)
    assert numbers[0] < numbers[1]
