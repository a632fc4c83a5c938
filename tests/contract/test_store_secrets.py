"""Encrypted secrets on every kind of database."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from registry_svc.mesh.store import SqlStore
from registry_svc.secrets.cipher import KEY_ID_CHARS
from registry_svc.secrets.secrets import SqlSecretStore, StoredSecret
from weft.kernel.names import MAX_NAME_CHARS

pytest_plugins = ("database_fixtures",)

NOW = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)


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
