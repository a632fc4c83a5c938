"""API keys from their making to their end."""

import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import structlog
from google.protobuf.duration_pb2 import Duration
from key_stage import PEPPER_NAME, KeyStage, bare_keys, registry_with_keys
from kit.failures import fails
from kit.refusals import refused
from registry_harness import running_registry

from registry_svc.keys.api_keys import PEPPER_BYTES, make_pepper
from registry_svc.registry_config import KeysConfig
from weft.api.common.v1.priority_pb2 import PRIORITY_CEILING_HIGH, PRIORITY_CEILING_NORMAL
from weft.api.registry.v1 import key_service_pb2 as pb
from weft.api.registry.v1 import key_service_pb2_grpc
from weft.kernel.access.principal import DEFAULT_SCOPES, LOCAL, Principal, parse_scopes
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft_testing.fake_clock import FakeClock

if TYPE_CHECKING:
    from weft.api.registry.v1.key_service_pb2_grpc import KeyServiceAsyncStub

DAY = 86_400.0


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[KeyStage]:
    async with registry_with_keys(tmp_path) as running:
        yield running


async def test_key_is_returned_once_and_valid_until_revoked(stage: KeyStage) -> None:
    key_id, text = await stage.create(description="alice's laptop")
    assert re.fullmatch(rf"weft_{key_id}_[0-9a-f]{{64}}", text)
    assert re.fullmatch(r"[a-z0-9]{12}", key_id)
    assert await stage.is_good(text)
    listed = (await stage.listed())[0]
    assert (listed.id, listed.description, listed.tenant) == (key_id, "alice's laptop", "default")
    assert tuple(listed.scopes) == DEFAULT_SCOPES
    assert not listed.HasField("expire_time")
    assert text.rpartition("_")[2] not in str(listed)

    await stage.revoke(key_id)
    assert not await stage.is_good(text)
    assert (await stage.listed())[0].HasField("revoke_time")
    with refused(Reason.NOT_FOUND):
        await stage.rotate(key_id)
    await stage.revoke(key_id)
    with refused(Reason.NOT_FOUND):
        await stage.revoke("nobody000000")


async def test_highest_priority_of_a_key_is_kept_over_a_restart(tmp_path: Path) -> None:
    async with registry_with_keys(tmp_path) as stage:
        key_id, _ = await stage.create(max_priority=PRIORITY_CEILING_NORMAL)
    async with registry_with_keys(tmp_path) as stage:
        assert [key.max_priority for key in await stage.listed()] == [PRIORITY_CEILING_NORMAL]
        assert (await stage.ring()).keys[key_id].max_priority is Priority.NORMAL


async def test_revoked_key_is_listed_for_thirty_days_with_its_revocation_time(tmp_path: Path) -> None:
    clock = FakeClock()
    async with registry_with_keys(tmp_path, clock=clock) as stage:
        key_id, _ = await stage.create()
        await stage.revoke(key_id)
        revoked_at = (await stage.listed())[0].revoke_time
    await clock.advance(30 * DAY - 60.0)
    async with registry_with_keys(tmp_path, clock=clock) as stage:
        await stage.revoke(key_id)
        assert [key.revoke_time for key in await stage.listed()] == [revoked_at]
        await stage.mesh.advance(65.0)
        assert await stage.listed() == []
    async with registry_with_keys(tmp_path, clock=clock) as stage:
        assert await stage.listed() == [], "it is gone from the disk too"


async def test_expired_key_is_invalid_to_the_second_and_remains_listed(stage: KeyStage) -> None:
    key_id, text = await stage.create(seconds=60)
    await stage.mesh.advance(59.0)
    assert await stage.is_good(text)
    ring = await stage.ring()
    await stage.mesh.advance(1.0)
    assert not await stage.is_good(text)
    assert key_id in ring.keys
    await stage.mesh.advance(10.0)
    assert [key.id for key in await stage.listed()] == [key_id]
    with refused(Reason.NOT_FOUND):
        await stage.rotate(key_id)
    await stage.revoke(key_id)


async def test_key_that_expired_while_the_clock_was_ahead_is_valid_once_it_is_set_back(stage: KeyStage) -> None:
    """It stayed invalid until the next start of the registry, although it was listed as unexpired."""
    _, text = await stage.create(seconds=600)
    stage.mesh.clock.set_wall(3_600.0)
    await stage.mesh.advance(10.0)
    assert not await stage.is_good(text)
    stage.mesh.clock.set_wall(-3_600.0)
    await stage.mesh.advance(10.0)
    assert await stage.is_good(text)
    await stage.mesh.advance(600.0)
    assert not await stage.is_good(text)


async def test_rotation_creates_a_new_secret_and_keeps_the_old_one_for_an_hour(stage: KeyStage) -> None:
    key_id, first = await stage.create(tenant="team-a", scopes=["models:view"])
    await stage.mesh.advance(10.0)
    rotated = await stage.rotate(key_id)
    assert rotated.text != first
    assert rotated.text.startswith(f"weft_{key_id}_")
    assert (rotated.key.tenant, list(rotated.key.scopes)) == ("team-a", ["models:view"])
    assert rotated.old_expire_time.seconds - rotated.key.rotate_time.seconds == 3_600
    assert await stage.is_good(first)
    assert await stage.is_good(rotated.text)
    await stage.mesh.clock.advance(3_600.0)
    assert not await stage.is_good(first)
    assert await stage.is_good(rotated.text)


async def test_rotation_grace_is_zero_to_thirty_days_and_at_most_the_key_lifetime(stage: KeyStage) -> None:
    key_id, first = await stage.create()
    second = (await stage.rotate(key_id, grace=0)).text
    assert not await stage.is_good(first)
    third = (await stage.rotate(key_id, grace=30 * DAY)).text
    assert await stage.is_good(second)
    assert await stage.is_good(third)
    for seconds in (-1, int(30 * DAY) + 1, 2**40):
        with refused(field="grace"):
            await stage.keys.RotateKey(pb.RotateKeyRequest(id=key_id, grace=Duration(seconds=seconds)))
    assert await stage.is_good(third)

    brief, _ = await stage.create(seconds=60)
    rotated = await stage.rotate(brief, grace=DAY)
    assert rotated.old_expire_time == rotated.key.expire_time


async def test_keys_rotations_and_revocations_survive_a_restart(tmp_path: Path) -> None:
    clock = FakeClock()
    async with registry_with_keys(tmp_path, clock=clock) as stage:
        kept, text = await stage.create(description="kept", tenant="team-a", seconds=600)
        new = (await stage.rotate(kept)).text
        gone, gone_text = await stage.create()
        await stage.revoke(gone)
        before = await stage.listed()
    async with registry_with_keys(tmp_path, clock=clock) as stage:
        assert await stage.listed() == before
        assert [await stage.is_good(each) for each in (text, new, gone_text)] == [True, True, False]


async def test_key_limit_is_enforced_and_the_earliest_ended_keys_are_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("registry_svc.keys.api_keys.MAX_KEYS", 6)
    async with registry_with_keys(tmp_path) as stage:
        ids = [(await stage.create())[0] for _ in range(5)]
        _, text = await stage.create()
        with refused(Reason.TOO_MANY_RESOURCES):
            await stage.create()
        # In another order than they were made and than they are called.
        ended = [ids[2], ids[0], ids[4], ids[1], ids[3]]
        for key_id in ended:
            await stage.mesh.advance(1.0)
            await stage.revoke(key_id)
        for gone in range(1, len(ended) + 1):
            await stage.create()
            assert [key_id for key_id in ended if key_id in {key.id for key in await stage.listed()}] == ended[gone:]
        with refused(Reason.TOO_MANY_RESOURCES):
            await stage.create()
        assert await stage.is_good(text)


async def test_invalid_requests_are_rejected_by_field(stage: KeyStage) -> None:
    for request_, field in (
        (pb.CreateKeyRequest(description="x" * 129), "description"),
        (pb.CreateKeyRequest(description="a\nb"), "description"),
        (pb.CreateKeyRequest(description="\x1b[2J"), "description"),
        (pb.CreateKeyRequest(tenant="x" * 65), "tenant"),
        (pb.CreateKeyRequest(tenant="a b"), "tenant"),
        (pb.CreateKeyRequest(tenant="'; DROP TABLE api_keys; --"), "tenant"),
        (pb.CreateKeyRequest(tenant="tenänt"), "tenant"),
        (pb.CreateKeyRequest(scopes=["models:view", "nonsense"]), "scopes[1]"),
        (pb.CreateKeyRequest(scopes=["x" * 100_000]), "scopes[0]"),
        (pb.CreateKeyRequest(scopes=["models:view"] * 33), "scopes"),
        (pb.CreateKeyRequest(lifetime=Duration(seconds=59)), "lifetime"),
        (pb.CreateKeyRequest(lifetime=Duration(seconds=-1)), "lifetime"),
        (pb.CreateKeyRequest(lifetime=Duration()), "lifetime"),
        (pb.CreateKeyRequest(lifetime=Duration(seconds=2**62)), "lifetime"),
    ):
        with refused(field=field):
            await stage.keys.CreateKey(request_)
        assert await stage.listed() == []


async def test_key_with_more_scopes_than_the_callers_cannot_be_created_or_rotated(tmp_path: Path) -> None:
    clerk = Principal(name="key:clerk", access=parse_scopes(["keys:*", "models:view"], "scopes"))
    async with bare_keys(tmp_path) as (keys, _):
        admin, _ = await keys.create(pb.CreateKeyRequest(tenant="default", scopes=["*:*"]), LOCAL)
        made, _ = await keys.create(pb.CreateKeyRequest(tenant="default", scopes=["models:view"]), clerk)
        assert (await keys.rotate(made.id, None, clerk))[0].rotated_at
        with denied("inference:create"):
            await keys.create(pb.CreateKeyRequest(tenant="default", scopes=DEFAULT_SCOPES), clerk)
        with denied("inference:create"):
            await keys.rotate(admin.id, None, clerk)
        with denied("mesh:create"):
            await keys.create(pb.CreateKeyRequest(tenant="default", scopes=["mesh:create"]), admin_of(admin.scopes))
        assert [key.rotated_at is None for key in keys.newest_first() if key.id == admin.id] == [True]


async def test_key_with_a_higher_priority_than_the_callers_cannot_be_created_or_rotated(tmp_path: Path) -> None:
    access = parse_scopes(["keys:*", "models:view"], "scopes")
    clerk = Principal(name="key:clerk", access=access, max_priority=Priority.NORMAL)
    async with bare_keys(tmp_path) as (keys, _):
        free, _ = await keys.create(pb.CreateKeyRequest(tenant="default", scopes=["models:view"]), LOCAL)
        made, _ = await keys.create(pb.CreateKeyRequest(tenant="default", scopes=["models:view"]), clerk)
        assert (free.max_priority, made.max_priority) == (0, PRIORITY_CEILING_NORMAL)
        assert (await keys.rotate(made.id, None, clerk))[0].max_priority == PRIORITY_CEILING_NORMAL
        wanted = pb.CreateKeyRequest(scopes=["models:view"], max_priority=PRIORITY_CEILING_HIGH)
        for refusal in (keys.create(wanted, clerk), keys.rotate(free.id, None, clerk)):
            with denied("allows at most normal"):
                await refusal


async def test_rotation_of_another_tenants_key_requires_the_create_scope(tmp_path: Path) -> None:
    editor = Principal(name="key:editor", tenant="ann", access=parse_scopes(["keys:edit", "models:view"], "scopes"))
    async with bare_keys(tmp_path) as (keys, _):
        of_bob, _ = await keys.create(pb.CreateKeyRequest(tenant="bob", scopes=["models:view"]), LOCAL)
        with denied("keys:create"):
            await keys.rotate(of_bob.id, None, editor)
        assert [key.rotated_at for key in keys.newest_first()] == [None]


def admin_of(scopes: tuple[str, ...]) -> Principal:
    return Principal(name="key:admin", access=parse_scopes(scopes, "scopes"))


@contextmanager
def denied(scope: str) -> Iterator[None]:
    with refused(Reason.PERMISSION_DENIED) as refusal:
        yield
    assert scope in refusal[0].message


async def test_registry_without_a_pepper_file_has_no_keys_and_reports_it(tmp_path: Path) -> None:
    async with running_registry(tmp_path) as mesh:
        stub = cast("KeyServiceAsyncStub", key_service_pb2_grpc.KeyServiceStub(mesh.channel))
        with refused(Reason.UNSUPPORTED_OPERATION):
            await stub.CreateKey(pb.CreateKeyRequest())


async def test_secrets_appear_in_no_log_file_or_error(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        async with registry_with_keys(tmp_path) as stage:
            key_id, first = await stage.create(description="findable", tenant="team-a")
            second = (await stage.rotate(key_id)).text
            with refused(Reason.NOT_FOUND) as unknown:
                await stage.revoke("nobody000000")
            with refused(Reason.INVALID_ARGUMENT) as malformed:
                await stage.keys.RevokeKey(pb.RevokeKeyRequest(id=second + "\n"))
            await stage.revoke(key_id)
            for text in (first, second):
                assert not files_with(tmp_path, secret_of(text)), "while it runs, its side files too"
    pepper = (tmp_path / "key-pepper").read_bytes()
    for text in (first, second):
        secret = secret_of(text)
        assert not files_with(tmp_path, secret)
        assert not files_with(tmp_path, bytes.fromhex(secret.decode()))
        assert secret.decode() not in str(lines)
        assert secret.decode() not in f"{unknown}{malformed}"
    assert files_with(tmp_path, b"findable"), "the search finds what is there"
    assert [path.name for path in files_with(tmp_path, pepper)] == ["key-pepper"], "not in the database"

    about = {line["event"]: line for line in lines if line["event"].startswith("key ")}
    assert about["key made"]["id"] == about["key rotated"]["id"] == about["key revoked"]["id"] == key_id
    assert about["key made"]["by"] == about["key rotated"]["by"] == about["key revoked"]["by"] == "local"
    assert about["key made"]["tenant"] == "team-a"


def secret_of(text: str) -> bytes:
    return text.rpartition("_")[2].encode()


def files_with(folder: Path, text: bytes) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file() and text in path.read_bytes()]


FIELD = "registry.keys.pepper_file"


async def refuses_to_start(folder: Path) -> str:
    with fails(field=FIELD) as refusal:
        async with registry_with_keys(folder):
            pass
    return refusal.value.message


def names_in(folder: Path, part: str) -> list[str]:
    return [path.name for path in folder.iterdir() if part in path.name]


async def test_first_start_creates_the_pepper_for_its_owner_only_and_the_next_reuses_it(tmp_path: Path) -> None:
    path = tmp_path / PEPPER_NAME
    earlier = os.umask(0)
    try:
        async with registry_with_keys(tmp_path):
            pepper = path.read_bytes()
            assert len(pepper) == PEPPER_BYTES
            assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(earlier)
    async with registry_with_keys(tmp_path) as stage:
        assert path.read_bytes() == pepper == (await stage.ring()).pepper
    assert names_in(tmp_path, PEPPER_NAME) == [PEPPER_NAME], "no half-made one"


def test_registries_that_first_start_together_use_one_pepper(tmp_path: Path) -> None:
    """Each wrote its own: the keys of one did not work with the other."""
    assert make_pepper(tmp_path / PEPPER_NAME) == make_pepper(tmp_path / PEPPER_NAME)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o610, 0o602])
async def test_registry_does_not_start_if_others_can_access_the_pepper(tmp_path: Path, mode: int) -> None:
    path = tmp_path / PEPPER_NAME
    make_pepper(path)
    path.chmod(mode)
    message = await refuses_to_start(tmp_path)
    assert f"chmod 600 {path}" in message
    path.chmod(0o400)
    async with registry_with_keys(tmp_path) as stage:
        await stage.create()


@pytest.mark.parametrize("length", [0, 1, PEPPER_BYTES - 1, PEPPER_BYTES + 1, 65_536])
async def test_registry_does_not_start_with_a_pepper_of_wrong_length(tmp_path: Path, length: int) -> None:
    path = tmp_path / PEPPER_NAME
    path.touch(0o600)
    path.write_bytes(b"x" * length)
    assert "32 bytes" in await refuses_to_start(tmp_path)
    assert path.stat().st_size == length, "it is left as it was"


async def test_registry_does_not_start_if_the_pepper_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / PEPPER_NAME).mkdir()
    assert "cannot be read" in await refuses_to_start(tmp_path)


@pytest.mark.parametrize("another", [False, True])
async def test_lost_pepper_is_reported_and_never_replaced_while_keys_exist(tmp_path: Path, another: bool) -> None:
    path, clock = tmp_path / PEPPER_NAME, FakeClock()
    async with registry_with_keys(tmp_path, clock=clock) as stage:
        _, text = await stage.create()
    saved = path.read_bytes()
    path.unlink()
    if another:
        make_pepper(path)
    left = path.read_bytes() if another else None
    message = await refuses_to_start(tmp_path)
    assert "backup" in message
    assert "revoke_all_if_pepper_lost" in message
    assert (path.read_bytes() if path.exists() else None) == left
    path.touch(0o600)
    path.write_bytes(saved)
    async with registry_with_keys(tmp_path, clock=clock) as stage:
        assert await stage.is_good(text), "restored, everything is as it was"


async def test_operator_can_revoke_all_keys_for_a_lost_pepper(tmp_path: Path) -> None:
    path, clock = tmp_path / PEPPER_NAME, FakeClock()
    async with registry_with_keys(tmp_path, clock=clock) as stage:
        key_id, text = await stage.create()
    path.unlink()
    giving_up = KeysConfig(pepper_file=path, revoke_all_if_pepper_lost=True)
    for _ in range(2):
        async with registry_with_keys(tmp_path, clock=clock, config=giving_up) as stage:
            listed = {key.id: key.HasField("revoke_time") for key in await stage.listed()}
            assert listed.pop(key_id)
            assert not any(listed.values()), "keys that were made since stay"
            assert not await stage.is_good(text)
            _, fresh = await stage.create()
            assert await stage.is_good(fresh)


async def test_lost_pepper_is_replaced_if_no_key_is_valid(tmp_path: Path) -> None:
    path = tmp_path / PEPPER_NAME
    async with registry_with_keys(tmp_path) as stage:
        key_id, _ = await stage.create()
        await stage.revoke(key_id)
    path.unlink()
    async with registry_with_keys(tmp_path) as stage:
        _, text = await stage.create()
        assert await stage.is_good(text)
        assert len(await stage.listed()) == 2


def test_unwritable_pepper_is_reported_with_its_field(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(field=FIELD):
        make_pepper(tmp_path / "file" / PEPPER_NAME)
