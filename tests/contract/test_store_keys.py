"""API keys on every kind of database."""

from datetime import UTC, datetime, timedelta

import pytest
from kit.refusals import refused

from registry_svc.keys.api_keys import ApiKey, SqlKeyStore, StoredKeys
from registry_svc.mesh.store import SqlStore
from weft.kernel.names import MAX_TENANT_CHARS
from weft.kernel.reasons import Reason

pytest_plugins = ("database_fixtures",)

MANY = 40_000
"""More than the parameters of one statement."""

NOW = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
MARK = bytes(range(32))


def key(key_id: str) -> ApiKey:
    """Every field set to something that a careless store would lose."""
    return ApiKey(
        id=key_id,
        description="Änne's läptop — 日本語 'quoted' %s :name \\ end",
        tenant="t" * MAX_TENANT_CHARS,
        scopes=("models:view", "*:*", "inference:create"),
        digest=b"\x00\xff" * 16,
        created_at=NOW,
        expires_at=NOW + timedelta(days=3660),
        revoked_at=NOW + timedelta(seconds=1),
        rotated_at=NOW + timedelta(microseconds=1),
        previous_digest=b"'\x00\\\xff" * 8,
        previous_expires_at=NOW + timedelta(hours=1),
    )


def plain(key_id: str) -> ApiKey:
    """Every field that may be empty empty."""
    return ApiKey(id=key_id, description="", tenant="default", scopes=(), digest=b"d" * 32, created_at=NOW)


@pytest.fixture
def keys(store: SqlStore) -> SqlKeyStore:
    """On an open, empty database."""
    return SqlKeyStore(store)


async def test_keys_round_trip_in_order(keys: SqlKeyStore) -> None:
    await keys.save([key("b"), plain("a")])
    await keys.save([key("0")])
    await keys.save([])
    assert await keys.load() == StoredKeys(keys=(key("0"), plain("a"), key("b")))


async def test_saving_again_replaces_the_key(keys: SqlKeyStore) -> None:
    await keys.save([plain("a"), plain("b")])
    await keys.save([key("a")])
    assert (await keys.load()).keys == (key("a"), plain("b"))


async def test_deleted_keys_are_gone_and_others_remain(keys: SqlKeyStore) -> None:
    await keys.save([key("a"), key("b"), key("c")])
    await keys.delete(["a", "c", "unknown"])
    await keys.delete([])
    assert (await keys.load()).keys == (key("b"),)


async def test_new_pepper_and_affected_keys_are_saved_together(keys: SqlKeyStore) -> None:
    await keys.save_pepper_mark(b"earlier" * 4)
    await keys.save([plain("a"), plain("b")])
    gone = plain("a").revoked(NOW)
    await keys.save_pepper_mark(MARK, [gone])
    assert await keys.load() == StoredKeys(keys=(gone, plain("b")), pepper_mark=MARK)


async def test_new_pepper_is_not_saved_if_its_keys_cannot_be(store: SqlStore) -> None:
    keys = SqlKeyStore(store)
    await keys.save_pepper_mark(b"earlier" * 4)
    with refused(Reason.SERVICE_UNAVAILABLE):
        await keys.save_pepper_mark(MARK, [plain("a"), plain("a")])
    assert await keys.load() == StoredKeys(pepper_mark=b"earlier" * 4)
