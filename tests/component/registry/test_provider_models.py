"""What the runner of central models is told, who may be told it, and who may declare such models."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest
from kit.refusals import refused
from kit.resources import declared
from registry_harness import RunningRegistry, SomeRunner, running_registry

from registry_svc.registry_config import SecretsConfig
from weft.api.registry.v1 import (
    central_model_service_pb2,
    central_model_service_pb2_grpc,
    model_pb2,
    runner_pb2,
    runner_session_service_pb2,
    secret_service_pb2,
    secret_service_pb2_grpc,
)
from weft.api.registry.v1.alias_pb2 import AliasManifest
from weft.api.registry.v1.model_pb2 import ModelDeclaration
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.documents.resources import declared_document, to_declaration
from weft.kernel.channels.rpc import new_server
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import CENTRAL_RUNNER
from weft_app.compose.provider_models import model_settings

if TYPE_CHECKING:
    from weft.api.registry.v1.central_model_service_pb2_grpc import CentralModelServiceAsyncStub
    from weft.api.registry.v1.secret_service_pb2_grpc import SecretServiceAsyncStub

VALUE, NEXT = "sk-canary-0123456789", "sk-another-9876543210"
CHAT = model_pb2.MODEL_OPERATION_CHAT
WatchRequest = central_model_service_pb2.WatchCentralModelsRequest


@asynccontextmanager
async def _registry(folder: Path) -> AsyncIterator[tuple[RunningRegistry, "SecretServiceAsyncStub"]]:
    config = SecretsConfig(key_file=folder / "secret-keys")
    async with running_registry(folder, secrets=cast("float", config)) as mesh:
        secrets = cast("SecretServiceAsyncStub", secret_service_pb2_grpc.SecretServiceStub(mesh.channel))
        await secrets.CreateSecret(secret_service_pb2.CreateSecretRequest(name="k", value=VALUE))
        yield mesh, secrets


def _watch(channel: grpc.aio.Channel) -> Any:
    stub = cast("CentralModelServiceAsyncStub", central_model_service_pb2_grpc.CentralModelServiceStub(channel))
    return stub.WatchCentralModels(WatchRequest())


def _declared(name: str = "frontier", *, ref: str = "secret/k", **provider: Any) -> ResourceDocument:
    provider.setdefault("url", "https://provider.example/v1")
    manifest = model_pb2.ModelManifest(
        name=name, operations=[CHAT], provider=model_pb2.ModelProvider(api_key_ref=ref, **provider)
    )
    return declared(model=ModelDeclaration(manifest=manifest))


def _seen(state: Any) -> dict[str, tuple[str, bool]]:
    return {model.manifest.name: (model.api_key, model.key_is_missing) for model in state.models}


async def test_every_change_of_a_model_and_its_secret_is_published(tmp_path: Path) -> None:
    async with _registry(tmp_path) as (mesh, secrets):
        watch = _watch(mesh.channel)
        assert _seen(await watch.read()) == {}
        await mesh.apply(_declared(), _declared("keyless", ref=""))
        assert _seen(await watch.read()) == {"frontier": (VALUE, False), "keyless": ("", False)}
        await secrets.UpdateSecret(secret_service_pb2.UpdateSecretRequest(name="k", value=NEXT))
        assert _seen(await watch.read())["frontier"] == (NEXT, False)
        await secrets.DeleteSecret(secret_service_pb2.DeleteSecretRequest(name="k", force=True))
        assert _seen(await watch.read())["frontier"] == ("", True)
        await mesh.delete("model", "frontier")
        assert _seen(await watch.read()) == {"keyless": ("", False)}
        watch.cancel()


async def test_declaration_is_stored_in_canonical_form_and_survives_a_restart(tmp_path: Path) -> None:
    async with _registry(tmp_path) as (mesh, _):
        assert await mesh.apply(_declared(url="https://provider.example/v1/")) == ["model frontier created"]
        assert await mesh.apply(_declared()) == ["model frontier unchanged"]
        stored = await mesh.model("frontier")
        assert stored.manifest.provider.url == "https://provider.example/v1"
        assert (stored.manifest.remote, stored.declared_runner) == (True, CENTRAL_RUNNER)
        assert VALUE not in str(stored)
    async with running_registry(
        tmp_path, secrets=cast("float", SecretsConfig(key_file=tmp_path / "secret-keys"))
    ) as mesh:
        watch = _watch(mesh.channel)
        assert _seen(await watch.read()) == {"frontier": (VALUE, False)}
        watch.cancel()


async def test_platform_prompt_is_published_and_rejected_for_a_model_without_chat(tmp_path: Path) -> None:
    document = declared_document(_declared(platform_prompt=True))
    document.manifest.operations[:] = [model_pb2.MODEL_OPERATION_EMBEDDING]
    silent = to_declaration(document)
    async with _registry(tmp_path) as (mesh, _):
        with refused(Reason.INVALID_ARGUMENT):
            await mesh.apply(silent)
        await mesh.apply(_declared(platform_prompt=True))
        watch = _watch(mesh.channel)
        (told,) = (await watch.read()).models
        watch.cancel()
    assert model_settings(told.manifest).platform_prompt


async def test_provider_keys_are_not_sent_over_a_local_tcp_port(tmp_path: Path) -> None:
    async with _registry(tmp_path) as (mesh, _):
        await mesh.apply(_declared())
        server = new_server()
        mesh.service.register(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                with refused(Reason.PERMISSION_DENIED):
                    await _watch(channel).read()
                found = await mesh.model("frontier")
                assert found.manifest.name == "frontier", "a negative control: the registry serves"
        finally:
            await server.stop(None)


@pytest.mark.parametrize("dial_out", [False, True])
async def test_runner_cannot_publish_a_provider_or_use_the_central_runner_name(tmp_path: Path, dial_out: bool) -> None:
    manifest = model_pb2.ModelManifest(name="frontier", operations=[CHAT])
    runner = runner_pb2.Runner(name="laptop", incarnation="run-1", host="h", address="unix:/r", dial_out=dial_out)
    if dial_out:
        runner.name = CENTRAL_RUNNER
    else:
        manifest.provider.url = "https://provider.example/v1"
    request = runner_session_service_pb2.OpenSessionRequest(request_id="open-1", runner=runner, models=[manifest])
    async with _registry(tmp_path) as (mesh, _):
        if dial_out:
            with refused(Reason.INVALID_ARGUMENT):
                await mesh.sessions.OpenSession(request)
        else:
            [item] = (await mesh.sessions.OpenSession(request)).left_out
            assert (item.name, "a runner publishes no provider" in item.message) == ("frontier", True)


def _alias(target: str = "frontier", **headers: str) -> ResourceDocument:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return declared(alias=AliasManifest(name="calm", target=target, provider_headers=named))


async def test_secrets_in_headers_of_aliases_are_published_and_show_their_users(tmp_path: Path) -> None:
    async with _registry(tmp_path) as (mesh, secrets):
        watch = _watch(mesh.channel)
        await watch.read()
        await mesh.apply(_declared(), _alias(x_a="plain", x_b="secret/k"))
        assert dict((await watch.read()).header_secrets) == {"secret/k": VALUE}
        (shown,) = (await secrets.ListSecrets(secret_service_pb2.ListSecretsRequest())).secrets
        assert list(shown.used_by) == ["alias/calm", "frontier"]
        await secrets.DeleteSecret(secret_service_pb2.DeleteSecretRequest(name="k", force=True))
        assert dict((await watch.read()).header_secrets) == {"secret/k": ""}
        watch.cancel()


@pytest.mark.parametrize(
    ("alias", "words"),
    [
        (_alias(x_a="secret/nothing"), "there is no secret 'nothing'"),
        (_alias(x_a="ü"), "must be ASCII"),
        (_alias(Authorization="Bearer x"), "is set by weft"),
        (_alias(content_length="1"), "is set by weft"),
        (_alias("m1", x_a="plain"), "m1 has no provider"),
    ],
)
async def test_wrong_header_of_an_alias_is_refused(tmp_path: Path, alias: ResourceDocument, words: str) -> None:
    async with _registry(tmp_path) as (mesh, _):
        await SomeRunner(mesh, models=("m1",)).open()
        with refused(Reason.INVALID_ARGUMENT) as errors:
            await mesh.apply(_declared(), alias)
    assert words in errors[0].message
