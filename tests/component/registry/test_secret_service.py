"""Secrets from their creation to their end, on a running registry."""

import base64
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import structlog
from kit.refusals import refused
from registry_harness import running_registry

from registry_svc.registry_config import SecretsConfig
from weft.api.registry.v1 import secret_service_pb2 as pb
from weft.api.registry.v1 import secret_service_pb2_grpc
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

if TYPE_CHECKING:
    from weft.api.registry.v1.secret_service_pb2_grpc import SecretServiceAsyncStub

VALUE, NEXT = "sk-canary-0123456789", "sk-another-9876543210"


@asynccontextmanager
async def secrets_in(folder: Path, **settings: object) -> AsyncIterator["SecretServiceAsyncStub"]:
    """The secrets of a registry that keeps its database and its keys in `folder`."""
    config = SecretsConfig(**({"key_file": folder / "secret-keys"} | settings))  # type: ignore[arg-type]
    async with running_registry(folder, secrets=cast("float", config)) as mesh:
        yield cast("SecretServiceAsyncStub", secret_service_pb2_grpc.SecretServiceStub(mesh.channel))


async def _listed(secrets: "SecretServiceAsyncStub") -> dict[str, int]:
    found = await secrets.ListSecrets(pb.ListSecretsRequest())
    return {secret.name: secret.version for secret in found.secrets}


async def _create(secrets: "SecretServiceAsyncStub", name: str = "provider", value: str = VALUE) -> pb.Secret:
    return (await secrets.CreateSecret(pb.CreateSecretRequest(name=name, value=value))).secret


@pytest.fixture
def logged() -> Iterator[list[object]]:
    """Everything that is logged, at any level."""
    with structlog.testing.capture_logs() as lines:
        yield lines  # type: ignore[misc]


async def test_secret_lifecycle_never_returns_its_value(tmp_path: Path, logged: list[object]) -> None:
    async with secrets_in(tmp_path) as secrets:
        made = await _create(secrets)
        assert (made.name, made.version, list(made.used_by)) == ("provider", 1, [])
        assert made.create_time == made.update_time
        updated = (await secrets.UpdateSecret(pb.UpdateSecretRequest(name="provider", value=NEXT))).secret
        assert updated.version == 2
        assert await _listed(secrets) == {"provider": 2}
        everything = f"{made}{updated}{await secrets.ListSecrets(pb.ListSecretsRequest())}"
        await secrets.DeleteSecret(pb.DeleteSecretRequest(name="provider"))
        assert await _listed(secrets) == {}
    said = f"{everything}{logged}"
    assert "provider" in said, "a negative control: what is no secret is found"
    assert VALUE not in said
    assert NEXT not in said


async def test_neither_database_nor_key_file_alone_reveals_a_value(tmp_path: Path) -> None:
    async with secrets_in(tmp_path) as secrets:
        await _create(secrets)
        await secrets.UpdateSecret(pb.UpdateSecretRequest(name="provider", value=NEXT))
        stored = _files(tmp_path)
    stored += _files(tmp_path)
    assert b"provider" in stored
    for value in (VALUE.encode(), NEXT.encode()):
        for spelling in (value, base64.b64encode(value), value.hex().encode()):
            assert spelling not in stored


def _files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())


@pytest.mark.slow("kills or restarts a service")
async def test_secrets_survive_a_restart_and_are_reencrypted_under_a_new_first_key(tmp_path: Path) -> None:
    keys = tmp_path / "secret-keys"
    async with secrets_in(tmp_path) as secrets:
        await _create(secrets)
    earlier = keys.read_bytes()
    before = _rows(tmp_path)
    keys.write_bytes(base64.b64encode(os.urandom(32)) + b"\n" + earlier)
    async with secrets_in(tmp_path) as secrets:
        assert await _listed(secrets) == {"provider": 1}
    after = _rows(tmp_path)
    assert after != before
    # The earlier key is needed no more.
    keys.write_bytes(keys.read_bytes().removesuffix(earlier))
    async with secrets_in(tmp_path) as secrets:
        assert await _listed(secrets) == {"provider": 1}


def _rows(folder: Path) -> list[tuple[object, ...]]:
    database = sqlite3.connect(f"file:{folder / 'registry.db'}?mode=ro", uri=True)
    try:
        return database.execute("SELECT name, key_id FROM secrets").fetchall()
    finally:
        database.close()


async def test_registry_with_lost_keys_does_not_start_unless_allowed_to_delete_the_secrets(tmp_path: Path) -> None:
    async with secrets_in(tmp_path) as secrets:
        await _create(secrets)
    (tmp_path / "secret-keys").unlink()
    with pytest.raises(WeftError, match=r"registry\.secrets\.key_file.*Restore the file") as failure:
        async with secrets_in(tmp_path):
            raise AssertionError("it started")
    assert failure.value.reason is Reason.INVALID_ARGUMENT
    async with secrets_in(tmp_path, delete_all_if_key_lost=True) as secrets:
        assert await _listed(secrets) == {}
        await _create(secrets)


@pytest.mark.parametrize("value", ["", " sk", "sk\n", "sk\x00", "schlüssel", "x" * 8_193])
async def test_unprintable_value_is_rejected_without_being_quoted(tmp_path: Path, value: str) -> None:
    async with secrets_in(tmp_path) as secrets:
        with refused(Reason.INVALID_ARGUMENT) as failure:
            await _create(secrets, value=value)
        assert await _listed(secrets) == {}
    assert not value.strip() or value not in str(failure)


async def test_create_requires_a_new_name_and_update_an_existing_one(tmp_path: Path) -> None:
    async with secrets_in(tmp_path) as secrets:
        await _create(secrets)
        with refused(Reason.ALREADY_EXISTS):
            await _create(secrets, value=NEXT)
        for call in (
            secrets.UpdateSecret(pb.UpdateSecretRequest(name="other", value=NEXT)),
            secrets.DeleteSecret(pb.DeleteSecretRequest(name="other")),
        ):
            with refused(Reason.NOT_FOUND):
                await call
        with refused(Reason.INVALID_ARGUMENT):
            await _create(secrets, name="no name")


async def test_secret_limit_is_enforced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("registry_svc.secrets.secrets.MAX_SECRETS", 2)
    async with secrets_in(tmp_path) as secrets:
        await _create(secrets, "a")
        await _create(secrets, "b")
        with refused(Reason.TOO_MANY_RESOURCES):
            await _create(secrets, "c")
        await secrets.DeleteSecret(pb.DeleteSecretRequest(name="a"))
        await _create(secrets, "c")


async def test_key_file_is_created_with_the_first_secret(tmp_path: Path) -> None:
    async with secrets_in(tmp_path) as secrets:
        assert await _listed(secrets) == {}
        assert not (tmp_path / "secret-keys").exists()
        await _create(secrets)
        assert (tmp_path / "secret-keys").stat().st_mode & 0o777 == 0o600
