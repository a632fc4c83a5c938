"""Which webhook the router of a registry is told, and that nobody else is told its secret."""

from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import structlog
from kit.refusals import refused
from kit.resources import declared
from registry_harness import RunningRegistry, running_registry

from registry_svc.registry_config import SecretsConfig
from registry_svc.secrets.secrets import is_signing_secret
from weft.api.operations.v1 import operation_service_pb2, operation_service_pb2_grpc
from weft.api.registry.v1 import secret_service_pb2, secret_service_pb2_grpc
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.api.registry.v1.secret_service_pb2 import GetWebhookRequest, GetWebhookResponse
from weft.api.registry.v1.tenant_pb2 import TenantManifest, Webhook
from weft.kernel.errors.reasons import Reason

VALUE = "whsec_" + b64encode(bytes(range(32))).decode()
URL = "https://receiver.example/hook"


class Stage:
    """A registry with a secret for webhooks."""

    def __init__(self, mesh: RunningRegistry) -> None:
        self.mesh = mesh
        self.secrets: Any = secret_service_pb2_grpc.SecretServiceStub(mesh.channel)

    async def create(self, name: str, value: str) -> None:
        await self.secrets.CreateSecret(secret_service_pb2.CreateSecretRequest(name=name, value=value))

    async def webhook(self, tenant: str = "ann") -> GetWebhookResponse:
        return cast("GetWebhookResponse", await self.secrets.GetWebhook(GetWebhookRequest(tenant=tenant)))


def tenant(url: str = URL, ref: str = "secret/hooks") -> ResourceDocument:
    return declared(tenant=TenantManifest(name="ann", webhook=Webhook(url=url, secret_ref=ref)))


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[Stage]:
    config = SecretsConfig(key_file=folder / "secret-keys")
    async with running_registry(folder, secrets=cast("float", config)) as mesh:
        stage = Stage(mesh)
        await stage.create("hooks", VALUE)
        yield stage


async def test_router_is_told_the_url_and_the_current_value_of_the_secret(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        assert await stage.webhook() == GetWebhookResponse()
        await stage.mesh.apply(tenant())
        assert await stage.webhook() == GetWebhookResponse(url=URL, secret=VALUE)
        (shown,) = (await stage.secrets.ListSecrets(secret_service_pb2.ListSecretsRequest())).secrets
        assert list(shown.used_by) == ["tenant/ann"]
        delete = secret_service_pb2.DeleteSecretRequest(name="hooks")
        with refused(Reason.RESOURCE_IN_USE):
            await stage.secrets.DeleteSecret(delete)
        delete.force = True
        await stage.secrets.DeleteSecret(delete)
        with refused(Reason.NOT_FOUND):
            await stage.webhook()
        await stage.mesh.delete("tenant", "ann")
        assert await stage.webhook() == GetWebhookResponse()


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


async def test_value_of_the_secret_is_not_shown(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logged:
        async with a_stage(tmp_path) as stage:
            await stage.mesh.apply(tenant())
            await stage.webhook()
            audit: Any = operation_service_pb2_grpc.OperationServiceStub(stage.mesh.channel)
            entries = await audit.ListAuditEntries(operation_service_pb2.ListAuditEntriesRequest())
            secrets = await stage.secrets.ListSecrets(secret_service_pb2.ListSecretsRequest())
            shown = [await stage.mesh.shown("tenant", "ann"), await stage.mesh.events(), entries, secrets, logged]
    assert "secret/hooks" in str(shown)
    assert VALUE.removeprefix("whsec_") not in str(shown)
    assert VALUE.removeprefix("whsec_").encode() not in on_disk(tmp_path)


async def test_key_of_a_provider_never_signs(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        await stage.create("provider", "sk-canary-0123456789")
        await stage.mesh.apply(tenant(ref="secret/provider"))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stage.webhook()
        assert "whsec_" in str(failed.value.details())
        assert "canary" not in str(failed.value)


@pytest.mark.parametrize(
    ("url", "ref"),
    [
        ("ftp://receiver.example", "secret/hooks"),
        ("https://user:password@receiver.example", "secret/hooks"),
        (URL, "hooks"),
        (URL, "secret/unknown"),
        (URL, ""),
        ("", "secret/hooks"),
    ],
)
async def test_wrong_webhook_is_refused(tmp_path: Path, url: str, ref: str) -> None:
    async with a_stage(tmp_path) as stage:
        with refused(Reason.INVALID_ARGUMENT):
            await stage.mesh.apply(tenant(url, ref))


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        (VALUE, True),
        (VALUE.removeprefix("whsec_"), False),
        ("whsec_" + b64encode(bytes(23)).decode(), False),
        ("whsec_" + b64encode(bytes(65)).decode(), False),
        ("whsec_" + "*" * 40, False),
        ("whsec_", False),
    ],
)
def test_signing_secret_is_base64_of_24_to_64_bytes(value: str, is_one: bool) -> None:
    assert is_signing_secret(value) is is_one
