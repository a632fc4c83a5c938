"""What whoever checks keys is told, and when."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from key_stage import KeyStage, bare_keys, knows, registry_with_keys
from kit.failures import fails
from kit.refusals import refused
from registry_harness import READ_LIMIT_SECONDS

from registry_svc.keys.api_keys import MAX_KEYS, ApiKey, verifier_message
from weft.api.registry.v1 import key_service_pb2 as pb
from weft.kernel.access.principal import LOCAL, MAX_SCOPES, KeyRing, Resource, Role, authenticate
from weft.kernel.channels.rpc import MAX_MESSAGE_BYTES, open_channel
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import MAX_TENANT_CHARS
from weft_app.compose import gateway
from weft_app.compose.home import WeftHome
from weft_app.compose.key_ring import KeyRingWatcher
from weft_app.config.config import AddressSettings, AuthSettings, WeftConfig
from weft_testing.fake_clock import FakeClock

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[KeyStage]:
    async with registry_with_keys(tmp_path) as running:
        yield running


async def read(call: Any) -> pb.WatchKeysResponse:
    async with asyncio.timeout(READ_LIMIT_SECONDS):
        response = await call.read()
    assert isinstance(response, pb.WatchKeysResponse)
    return response


async def until(watcher: KeyRingWatcher, holds: Callable[[KeyRing], bool]) -> KeyRing:
    """The first ring for which `holds` does."""
    async with asyncio.timeout(READ_LIMIT_SECONDS):
        while not holds(watcher.ring):  # noqa: ASYNC110 - the watcher tells nobody, it is asked
            await asyncio.sleep(0)
    return watcher.ring


async def test_watch_starts_with_every_valid_key_and_continues_with_each_change(stage: KeyStage) -> None:
    kept, shown = await stage.create(description="kept", tenant="team-a", scopes=["models:view"])
    revoked, _ = await stage.create()
    await stage.revoke(revoked)
    call = stage.keys.WatchKeys(pb.WatchKeysRequest())
    snapshot = (await read(call)).snapshot
    assert [verifier.key.id for verifier in snapshot.keys] == [kept]
    assert (snapshot.keys[0].key.tenant, list(snapshot.keys[0].key.scopes)) == ("team-a", ["models:view"])
    assert len(snapshot.pepper) == len(snapshot.keys[0].digest) == 32
    assert shown.rpartition("_")[2] not in str(snapshot)

    made, _ = await stage.create()
    assert (await read(call)).changed.key.id == made
    await stage.rotate(made)
    rotated = (await read(call)).changed
    assert rotated.previous_digest
    assert rotated.HasField("previous_expire_time")
    await stage.revoke(made)
    assert (await read(call)).removed == made
    await stage.revoke(made)
    await stage.revoke(kept)
    assert (await read(call)).removed == kept, "one that was revoked before is not told again"


async def test_expired_key_leaves_the_watch_at_the_next_sweep(stage: KeyStage) -> None:
    key_id, _ = await stage.create(seconds=60)
    call = stage.keys.WatchKeys(pb.WatchKeysRequest())
    await read(call)
    await stage.mesh.advance(65.0)
    assert (await read(call)).removed == key_id
    late = stage.keys.WatchKeys(pb.WatchKeysRequest())
    assert not (await read(late)).snapshot.keys


async def test_slow_watcher_is_ended_with_watch_lagged(tmp_path: Path) -> None:
    wish = pb.CreateKeyRequest(tenant="default", scopes=["models:view"])
    async with bare_keys(tmp_path, watch_buffer_responses=2) as (keys, _):
        _, known, watcher = keys.watch()
        assert known == ()
        with watcher:
            for _ in range(3):
                await keys.create(wish, LOCAL)
            with fails(Reason.WATCH_LAGGED):
                await anext(watcher)
        _, known, watcher = keys.watch()
        assert len(known) == 3, "watching again brings everything"
        with watcher:
            keys.close()
            with fails(Reason.SHUTTING_DOWN):
                await anext(watcher)


async def test_registry_key_ring_reflects_every_change_immediately(stage: KeyStage) -> None:
    registry, clock = stage.mesh.service, stage.mesh.clock
    assert registry.key_ring.keys == {}
    key_id, first = await stage.create(seconds=600)
    assert knows(registry.key_ring, first, clock)
    second = (await stage.rotate(key_id, grace=0)).text
    assert (knows(registry.key_ring, first, clock), knows(registry.key_ring, second, clock)) == (False, True)
    assert registry.key_ring == await stage.ring(), "as others know them"
    other_id, other = await stage.create()
    await stage.revoke(other_id)
    assert not knows(registry.key_ring, other, clock)
    await stage.mesh.advance(600.0)
    assert not knows(registry.key_ring, second, clock)
    await stage.mesh.advance(10.0)
    assert registry.key_ring.keys == {}


async def test_change_that_could_not_be_stored_is_neither_effective_nor_published(tmp_path: Path) -> None:
    wish = pb.CreateKeyRequest(tenant="default", scopes=["models:view"])
    async with bare_keys(tmp_path) as (keys, database):
        kept, _ = await keys.create(wish, LOCAL)
        await database.run(lambda tx: tx.execute("ALTER TABLE api_keys RENAME TO hidden"))
        _, _, watcher = keys.watch()
        with watcher:
            for change in (keys.create(wish, LOCAL), keys.rotate(kept.id, None, LOCAL), keys.revoke(kept.id, LOCAL)):
                with refused(Reason.SERVICE_UNAVAILABLE):
                    await change
            assert keys.newest_first() == [kept]
            await database.run(lambda tx: tx.execute("ALTER TABLE hidden RENAME TO api_keys"))
            await keys.revoke(kept.id, LOCAL)
            assert await anext(watcher) == pb.WatchKeysResponse(removed=kept.id), "the first that was told"


async def test_key_ring_is_empty_before_the_first_snapshot(tmp_path: Path) -> None:
    async with open_channel(f"unix:{tmp_path}/registry.sock") as channel:
        clock = FakeClock()
        watcher = KeyRingWatcher(channel, clock)
        assert not watcher.is_ready
        await watcher.start()
        await clock.wait_for_sleepers(1)
        assert not watcher.is_ready
        assert watcher.ring == KeyRing()
        await watcher.stop()
        await watcher.stop()


async def test_key_ring_follows_creation_rotation_and_revocation(stage: KeyStage) -> None:
    watcher, clock = stage.watcher(), stage.mesh.clock
    await watcher.start()
    await watcher.wait_ready()
    assert watcher.is_ready
    key_id, first = await stage.create(tenant="team-a", scopes=["models:*"])
    ring = await until(watcher, lambda ring: key_id in ring.keys)
    principal = authenticate(ring, first, clock.utc_now())
    assert (principal.name, principal.tenant) == (f"key:{key_id}", "team-a")
    assert sorted(map(str, principal.access)) == ["models:create", "models:edit", "models:view"]

    second = (await stage.rotate(key_id)).text
    ring = await until(watcher, lambda ring: knows(ring, second, clock))
    assert knows(ring, first, clock), "the old secret has its grace"
    await clock.advance(3_600.0)
    assert not knows(ring, first, clock)
    assert knows(ring, second, clock)

    await stage.revoke(key_id)
    await until(watcher, lambda ring: not knows(ring, second, clock))
    await watcher.stop()


async def test_keys_remain_valid_during_a_registry_outage_and_revocations_arrive_afterwards(tmp_path: Path) -> None:
    registry_clock, clock = FakeClock(), FakeClock()
    async with open_channel(f"unix:{tmp_path}/registry.sock") as channel:
        watcher = KeyRingWatcher(channel, clock)
        async with registry_with_keys(tmp_path, clock=registry_clock) as stage:
            stays_id, stays = await stage.create()
            goes_id, goes = await stage.create()
            await watcher.start()
            await watcher.wait_ready()
        # Ended with SHUTTING_DOWN: it sleeps before it asks again.
        await clock.wait_for_sleepers(1)
        assert watcher.is_ready
        assert knows(watcher.ring, stays, registry_clock)
        assert knows(watcher.ring, goes, registry_clock)
        async with registry_with_keys(tmp_path, clock=registry_clock) as stage:
            await stage.revoke(goes_id)
            async with asyncio.timeout(READ_LIMIT_SECONDS):
                while goes_id in watcher.ring.keys:
                    await clock.advance(5.0)
            assert stays_id in watcher.ring.keys
            assert knows(watcher.ring, stays, registry_clock)
        await watcher.stop()


def test_maximum_number_of_keys_fits_into_one_snapshot() -> None:
    scopes = [f"{resource.value}:{role.value}" for resource in Resource for role in Role]
    largest = ApiKey(
        id="x" * 12,
        description="ö" * 128,
        tenant="t" * MAX_TENANT_CHARS,
        scopes=tuple(sorted(scopes, key=len)[-MAX_SCOPES:]),
        digest=b"d" * 32,
        previous_digest=b"p" * 32,
        created_at=NOW,
        expires_at=NOW,
        previous_expires_at=NOW,
    )
    framing = 8
    assert MAX_KEYS * (verifier_message(largest).ByteSize() + framing) < MAX_MESSAGE_BYTES


LONG_SECONDS = 60.0

"""Longer than any start on a busy machine."""

KEYS_SECONDS = 0.05

"""How late the keys arrive. A gateway that does not wait for them has opened its port before."""


@pytest.mark.slow("builds a whole gateway")
async def test_gateway_opens_its_port_only_once_it_knows_the_api_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy that had not noticed its restart got 503 "has not loaded the API keys yet" for the first requests.
    monkeypatch.setattr(gateway, "REGISTRY_WAIT_SECONDS", LONG_SECONDS)
    follow_once = KeyRingWatcher._follow
    opened_before_keys: list[bool] = []

    async def follow_late(self: KeyRingWatcher) -> None:
        await asyncio.sleep(KEYS_SECONDS)
        opened_before_keys.append(announced.done())
        await follow_once(self)

    monkeypatch.setattr(KeyRingWatcher, "_follow", follow_late)
    announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    home = WeftHome(tmp_path / "home")
    home.create()
    address = f"unix:{tmp_path}/registry.sock"
    config = WeftConfig(
        port=0, auth=AuthSettings(required=True), addresses=AddressSettings(registry=address, router=address)
    )
    async with registry_with_keys(tmp_path) as stage, aiohttp.ClientSession() as client:
        _, key = await stage.create(scopes=["models:view"])
        serving = asyncio.create_task(gateway.serve_gateway(config, home, announced.set_result))
        async with asyncio.timeout(LONG_SECONDS):
            url = await announced
        async with client.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 200
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert opened_before_keys == [False]
