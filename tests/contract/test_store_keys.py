"""API keys on every kind of database."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from kit.refusals import refused

from registry_svc.keys.api_keys import ApiKey, SqlKeyStore, StoredKeys
from registry_svc.ledger.lease_store import LeaseStore, StoredLedger
from registry_svc.ledger.policy.leases import Grant, Holder, HolderKind
from registry_svc.mesh.store import SqlStore
from registry_svc.secrets.cipher import KEY_ID_CHARS
from registry_svc.secrets.secrets import SqlSecretStore, StoredSecret
from weft.gpu.snapshot import ProcessId
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.values.names import MAX_NAME_CHARS, MAX_TENANT_CHARS

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


def secret(name: str) -> StoredSecret:
    """Every field set to something that a careless store would lose."""
    return StoredSecret(
        name=name,
        version=2**40,
        key_id="f" * KEY_ID_CHARS,
        sealed=b"'\x00\\\xff" * 2_000,
        created_at=NOW,
        updated_at=NOW + timedelta(microseconds=1),
    )


@pytest.fixture
def secrets(store: SqlStore) -> SqlSecretStore:
    """On an open, empty database."""
    return SqlSecretStore(store)


async def test_secrets_round_trip_in_order(secrets: SqlSecretStore) -> None:
    assert await secrets.load() == ()
    longest = "n" * MAX_NAME_CHARS
    await secrets.save([secret(longest), secret("a")])
    await secrets.save([secret("0")])
    await secrets.save([])
    assert await secrets.load() == (secret("0"), secret("a"), secret(longest))


async def test_secret_is_replaced_and_deleted_by_name(secrets: SqlSecretStore) -> None:
    await secrets.save([secret("a"), secret("b")])
    changed = replace(secret("a"), version=2, key_id="0" * KEY_ID_CHARS, sealed=b"other")
    await secrets.save([changed])
    await secrets.delete(["b", "never-there"])
    assert await secrets.load() == (changed,)


# As large as the contract lets them be.
LARGEST = 2**50


def grant(number: int, *, lease_id: str = "") -> Grant:
    return Grant(
        id=lease_id or f"lease-{number}",
        fencing_number=number,
        request_id=f"request-{number}",
        host="hôst",
        holder=Holder(kind=HolderKind.PROGRAM, name="train the model, ünd more", incarnation="life/1"),
        purpose="überlong " * 28,
        shares=((0, LARGEST), (63, 1)),
        pinned=True,
        priority=Priority.LOW,
        created_at=datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC),
        processes=(ProcessId(7, 2**62), ProcessId(8, 0)),
        releasing=False,
    )


@pytest.fixture
def leases(store: SqlStore) -> LeaseStore:
    """On an open, empty database."""
    return LeaseStore(store)


async def test_grants_round_trip_in_order(leases: LeaseStore) -> None:
    runners = Holder(kind=HolderKind.RUNNER, name="r1", incarnation="life-1")
    last = replace(grant(2**40), holder=runners, pinned=False, processes=(), priority=Priority.HIGH)
    await leases.grant(grant(9))
    await leases.grant(grant(10, lease_id="a-lease"))
    await leases.grant(last)
    stored = StoredLedger(grants=(grant(9), grant(10, lease_id="a-lease"), last), last_fencing_number=2**40)
    assert await leases.load() == stored


async def test_fencing_tokens_outlive_their_leases(leases: LeaseStore) -> None:
    await leases.grant(grant(1))
    await leases.grant(grant(2))
    await leases.remove(["lease-1", "lease-2", "lease-unknown"])
    assert await leases.load() == StoredLedger(last_fencing_number=2)


async def test_fencing_token_is_stored_once(leases: LeaseStore) -> None:
    await leases.grant(grant(1))
    with refused(Reason.SERVICE_UNAVAILABLE):
        await leases.grant(grant(1, lease_id="another"))
    assert (await leases.load()).grants == (grant(1),)


async def test_failed_grant_leaves_the_fencing_token_unchanged(leases: LeaseStore) -> None:
    await leases.grant(grant(1))
    with pytest.raises(WeftError):
        await leases.grant(grant(2, lease_id="lease-1"))
    assert await leases.load() == StoredLedger(grants=(grant(1),), last_fencing_number=1)


async def test_only_released_leases_are_marked_releasing(leases: LeaseStore) -> None:
    for number in (1, 2, 3):
        await leases.grant(grant(number))
    await leases.save_releasing(["lease-1", "lease-3", "lease-unknown"])
    assert [each.releasing for each in (await leases.load()).grants] == [True, False, True]


async def test_saving_processes_replaces_them(leases: LeaseStore) -> None:
    await leases.grant(grant(1))
    await leases.grant(grant(2))
    await leases.save_processes("lease-1", [ProcessId(5, 50)])
    await leases.save_processes("lease-unknown", [ProcessId(5, 50)])
    assert (await leases.load()).grants == (replace(grant(1), processes=(ProcessId(5, 50),)), grant(2))


async def test_more_leases_than_one_statement_allows_are_saved_together(leases: LeaseStore) -> None:
    await leases.grant(grant(1))
    many = [f"lease-{number}" for number in range(2, MANY + 2)] + ["lease-1"]
    await leases.save_releasing(many)
    assert (await leases.load()).grants[0].releasing
    await leases.remove(many)
    assert (await leases.load()).grants == ()
