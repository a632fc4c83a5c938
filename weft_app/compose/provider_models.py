"""The process that serves central models: a runner of the mesh itself for the models that operators declare.

It has the slots, tickets, receipts, retries and metrics of any runner with `runtime: openai_remote`. Its models and
the keys of their providers come from the registry and change while it runs.
"""

import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import grpc
from typing_extensions import override

import runner_svc.runner_service
from runner_svc.runner_config import RunnerConfig
from runner_svc.runner_service import RunnerService
from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes.openai_remote.runtime import OpenAiRemoteModel
from weft.api.registry.v1 import central_model_service_pb2 as pb
from weft.api.registry.v1 import central_model_service_pb2_grpc, model_pb2
from weft.kernel.channels.rpc import open_channel
from weft.kernel.channels.stream_follower import StreamFollower
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.requests.request_values import Operation, Skill
from weft.kernel.services.health_monitor import HealthMonitor
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock, SystemClock
from weft.kernel.time.timestamps import seconds_of
from weft.kernel.values.names import CENTRAL_RUNNER
from weft_app.compose.certificate_expiry import CertificateExpiry
from weft_app.compose.home import CENTRAL_SOCKET, WeftHome
from weft_app.compose.process_metrics import metrics_services, runner_page
from weft_app.compose.process_service import ProcessService
from weft_app.compose.security import channel_security, key_check, key_followers, new_host
from weft_app.compose.served_models import runner_context, served_model
from weft_app.compose.serving import Announce, registry_address, serve_until_stopped
from weft_app.config.config import WeftConfig

if TYPE_CHECKING:
    from runner_svc.instance.instance_settings import ServedModel
    from weft.api.registry.v1.central_model_service_pb2_grpc import CentralModelServiceAsyncStub

log = get_logger("weft_app.compose")

RUNTIME = "openai_remote"


class CentralModelsFollower(StreamFollower, Service):
    """Serves on a runner the models that the registry declares, which stay loaded after the end."""

    loop_name = "central-models"
    log = log
    lost_words = "the registry does not send the central models, continuing with the last ones"

    def __init__(self, runner: RunnerService, registry: grpc.aio.Channel, clock: Clock, drain_seconds: float) -> None:
        super().__init__(clock)
        self._runner = runner
        self._stub = cast(
            "CentralModelServiceAsyncStub", central_model_service_pb2_grpc.CentralModelServiceStub(registry)
        )
        self._drain_seconds = drain_seconds
        self._section = RunnerSettings(name=CENTRAL_RUNNER, runtime=RUNTIME, models=())
        self._keys: dict[str, str] = {}
        """API keys of providers by reference. Engines read them for every request."""
        self._served: dict[str, bytes] = {}
        """The serialized manifest of each served model, see `_served_bytes`."""

    @override
    async def _follow(self) -> None:
        async for state in self._stub.WatchCentralModels(pb.WatchCentralModelsRequest()):
            await self.apply(state)
            self._note_received()

    async def apply(self, state: pb.WatchCentralModelsResponse) -> None:
        """Serves exactly these models."""
        self._keys |= {model.manifest.provider.api_key_ref: model.api_key for model in state.models}
        self._keys |= state.header_secrets
        wanted = {model.manifest.name: model for model in state.models}
        for name in self._served.keys() - wanted.keys():
            self._runner.withdraw(name)
            del self._served[name]
            log.info("central model withdrawn", model=name)
        for name, model in wanted.items():
            wire = _served_bytes(model.manifest)
            if self._served.get(name) != wire:
                await self._serve(model.manifest)
                self._served[name] = wire

    async def _serve(self, manifest: model_pb2.ModelManifest) -> None:
        try:
            served = self._served_model(manifest)
        except WeftError as error:
            # The registry has validated the manifest, but this process may have an older version.
            log.error("a central model cannot be served", model=manifest.name, why=error.message)  # noqa: TRY400
            self._runner.withdraw(manifest.name)
            return
        await self._runner.serve(served)
        log.info("central model served", model=manifest.name)

    def _served_model(self, manifest: model_pb2.ModelManifest) -> "ServedModel":
        context = replace(runner_context(self._section), environment=self._keys)
        return served_model(self._section, model_settings(manifest), self._drain_seconds, context)


def _served_bytes(manifest: model_pb2.ModelManifest) -> bytes:
    """Returns a manifest without its tags and price: a change of them must not interrupt requests."""
    served = model_pb2.ModelManifest()
    served.CopyFrom(manifest)
    served.ClearField("tags")
    served.ClearField("price")
    return served.SerializeToString(deterministic=True)


def model_settings(manifest: model_pb2.ModelManifest) -> OpenAiRemoteModel:
    """Returns a central model in the form of `weft.yaml`."""
    provider = manifest.provider
    settings = OpenAiRemoteModel(
        name=manifest.name,
        pool=manifest.pool_name or None,
        url=provider.url,
        upstream_model=provider.upstream_model or None,
        api_key_env=provider.api_key_ref or None,
        operations=cast("Any", tuple(Operation(each).name.lower() for each in manifest.operations)),
        skills=cast("Any", tuple(Skill(each).name.lower() for each in manifest.skills)),
        context_tokens=manifest.context_tokens or None,
        max_retries=provider.max_retries,
        thinking=provider.thinking if provider.HasField("thinking") else None,
        platform_prompt=provider.platform_prompt or None,
    )
    if provider.slots:
        settings = replace(settings, slots=provider.slots)
    if provider.HasField("timeout"):
        settings = replace(settings, timeout_seconds=seconds_of(provider.timeout))
    if provider.token_limit_name:
        settings = replace(settings, token_limit_name=provider.token_limit_name)  # type: ignore[arg-type]  # the names of weft.yaml
    if provider.api == model_pb2.ModelProvider.API_ANTHROPIC:
        settings = replace(settings, api_kind="messages")
    return settings


async def serve_central(config: WeftConfig, home: WeftHome, listen: str | None, announce: Announce) -> None:
    """Serves the central models until a signal arrives."""
    keys, registry, security = (
        key_check(config, SystemClock()),
        registry_address(config, home),
        channel_security(config),
    )
    host = new_host(config, "runner", keys)
    address = host.bind(listen or home.address(CENTRAL_SOCKET))
    runner = runner_svc.runner_service.build(
        RunnerConfig(
            name=CENTRAL_RUNNER,
            runtime=RUNTIME,
            host=socket.gethostname(),
            address=address,
            registry_address=registry,
            security=security,
            session_file=home.state / "runners" / f"{CENTRAL_RUNNER}.session",
            models=(),
        )
    )
    async with open_channel(registry, security) as channel:
        follower = CentralModelsFollower(runner, channel, SystemClock(), config.drain_seconds)
        monitor = HealthMonitor([*runner.health_checks, *CertificateExpiry(config).health_checks()], SystemClock())
        page = None if config.metrics.listen is None else runner_page(config, runner, CENTRAL_RUNNER)
        figures = metrics_services(config, page, "runner", monitor, keys)
        companions: list[Service] = [follower, *key_followers(keys, registry, security), *figures]
        process = ProcessService(monitor)
        companions.append(process)
        await serve_until_stopped(
            host, runner, config, lambda: announce(address), companions=companions, monitor=monitor
        )
