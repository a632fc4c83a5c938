"""Keys that were made, rotated or revoked while the registry's clock was ahead, after it was set back."""

from pathlib import Path

from key_stage import registry_with_keys

from weft_testing.fake_clock import FakeClock

DAY_SECONDS = 86_400.0


async def test_a_key_that_was_revoked_while_the_clock_was_ahead_stays_revoked(tmp_path: Path) -> None:
    clock = FakeClock()
    clock.set_wall(DAY_SECONDS)
    async with registry_with_keys(tmp_path, clock=clock) as before:
        key_id, text = await before.create()
        await before.revoke(key_id)
    clock.set_wall(-DAY_SECONDS)
    async with registry_with_keys(tmp_path, clock=clock) as after:
        assert not await after.is_good(text)


async def test_a_key_that_was_made_while_the_clock_was_ahead_ends_with_its_lifetime(tmp_path: Path) -> None:
    clock = FakeClock()
    async with registry_with_keys(tmp_path, clock=clock) as stage:
        clock.set_wall(DAY_SECONDS)
        _, text = await stage.create(seconds=600)
        clock.set_wall(-DAY_SECONDS)
        await stage.mesh.advance(60.0)
        assert await stage.is_good(text)
        await stage.mesh.advance(600.0)
        assert not await stage.is_good(text)
