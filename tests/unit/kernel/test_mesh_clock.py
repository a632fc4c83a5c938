from datetime import timedelta

from weft.kernel.time.clock import MeshClock
from weft_testing.fake_clock import FakeClock


async def test_machine_time_is_used_until_the_mesh_time_is_known() -> None:
    machine = FakeClock()
    clock = MeshClock(machine)
    assert clock.utc_now() == machine.utc_now()
    mesh_now = machine.utc_now() + timedelta(days=400)
    clock.set(mesh_now)
    await machine.advance(7.0)
    assert clock.utc_now() == mesh_now + timedelta(seconds=7)


async def test_machine_clock_correction_does_not_move_the_mesh_clock() -> None:
    machine = FakeClock()
    clock = MeshClock(machine)
    mesh_now = machine.utc_now()
    clock.set(mesh_now)
    machine._utc += timedelta(hours=2)
    assert clock.utc_now() == mesh_now
