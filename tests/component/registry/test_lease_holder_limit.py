"""One holder cannot take the places of everybody else."""

import pytest
from lease_stage import GIB, SimulatedHost, Stage

from registry_svc.ledger import wait_queue
from weft.kernel.reasons import Reason

MOST = 3


async def test_one_holder_cannot_take_every_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_queue, "MAX_LEASES_PER_HOLDER", MOST)
    async with Stage(SimulatedHost((24 * GIB,)), max_leases=10) as stage:
        liar, honest = stage.runner("liar"), stage.runner("honest")
        for _ in range(MOST):
            await stage.lease(liar, 1)
        one_more = stage.acquire(liar, 1)
        await stage.settle()
        assert one_more.error is not None
        assert one_more.error.reason is Reason.TOO_MANY_RESOURCES
        assert "liar" in one_more.error.message
        assert (await stage.lease(honest, GIB)).grant.holder == honest


async def test_waits_count_toward_the_lease_limit_of_a_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_queue, "MAX_LEASES_PER_HOLDER", MOST)
    async with Stage(SimulatedHost((24 * GIB,))) as stage:
        liar, asked = stage.runner("liar"), {"request_id": "again"}
        await stage.loaded(stage.runner("honest"), 20 * GIB, active_requests=1)
        waits = [stage.acquire(liar, 20 * GIB) for _ in range(MOST - 1)]
        waits.append(stage.acquire(liar, 20 * GIB, **asked))
        await stage.settle()
        assert [each.error for each in waits] == [None] * MOST
        one_more = stage.acquire(liar, 20 * GIB)
        await stage.settle()
        assert one_more.reason is Reason.TOO_MANY_RESOURCES
        again = stage.acquire(liar, 20 * GIB, **asked)
        await stage.settle()
        assert (again.error, waits[-1].reason) == (None, Reason.CANCELLED)
