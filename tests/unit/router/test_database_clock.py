"""The clock by which routers compare leases."""

import pytest

from router_svc.durable.tasks.task_records import DatabaseClock
from weft_testing.fake_clock import FakeClock

DATABASE_SECONDS = 2_000_000_000.5


async def _of_the_database() -> float | None:
    return DATABASE_SECONDS


async def _of_none() -> float | None:
    return None


@pytest.mark.parametrize("step", [3600.0, -3600.0])
async def test_setting_a_machine_clock_moves_no_lease_of_a_shared_database(step: float) -> None:
    """A router took back the leases of others, or let its own expire, until it read the database's clock again."""
    machine = FakeClock()
    clock = DatabaseClock(machine, _of_the_database)
    await clock.synchronize()
    machine.set_wall(step)
    assert clock.now() == DATABASE_SECONDS
    await machine.advance(2.0)
    assert clock.now() == DATABASE_SECONDS + 2.0


async def test_database_without_a_clock_has_that_of_its_machine() -> None:
    machine = FakeClock()
    clock = DatabaseClock(machine, _of_none)
    await clock.synchronize()
    machine.set_wall(5.0)
    assert clock.now() == machine.utc_now().timestamp()
