"""A runner's HTTP API: the gateway's endpoints over a router for this runner alone, and the runner's own endpoints.

Imported only by `weft serve runner` for a runner with an HTTP API: others need no web stack.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from typing_extensions import override

import gateway.runner_api_service
import router_svc.router_service
from gateway.gateway_config import REGISTRY_TIMEOUT_SECONDS
from gateway.operation_client import OperationsClient
from gateway.runner_api.deps import RunnerApiConfig, RunnerApiPorts
from gateway.runner_api.facts import ModelFacts, RunnerFacts, RunnerStage
from gateway.runner_api.runner_operations import callers_field
from router_svc.router_service import RouterService
from runner_svc.memory.lease_manager import Observer
from runner_svc.runner_config import RunnerConfig
from runner_svc.runner_service import RunnerService
from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes.runtime_settings import ModelSettings, SourcedModelSettings
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.dispatch.dispatcher import Dispatcher
from weft.extension import enabled_extensions
from weft.gpu.snapshot import DeviceSnapshot, HostSnapshot, Source
from weft.kernel.channels.rpc import ChannelPool, open_channel
from weft.kernel.models.model_source import SourceScheme
from weft.kernel.requests.request_values import Operation
from weft.kernel.services.health import HealthSource
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.telemetry.metrics_page import MetricsPage
from weft.kernel.telemetry.tracing import ServiceName
from weft.kernel.time.clock import Clock, SystemClock
from weft.link.carried_calls import CallStreams
from weft_app.compose.accelerators import host_observer
from weft_app.compose.environment import RunnerEnvironment
from weft_app.compose.journal import journal_rules
from weft_app.compose.security import channel_security, key_check
from weft_app.compose.service_configs import gateway_config, router_config
from weft_app.compose.tracing import close_tracing, tracing_of
from weft_app.config.config import WeftConfig


def other_names(models: Iterable[ModelSettings]) -> dict[str, frozenset[str]]:
    """Returns further names of models: the source, with and without `hf:`, or path."""
    return {
        model.name: frozenset({model.location, model.location.removeprefix(f"{SourceScheme.HUB}:")})
        for model in models
        if isinstance(model, SourcedModelSettings)
    }


def runner_facts(
    description: pb.DescribeResponse,
    stage: RunnerStage,
    chat_models: Collection[str],
    called: Mapping[str, frozenset[str]] = MappingProxyType({}),
) -> RunnerFacts:
    """Converts a runner's description. `chat_models` are the models for chats; `called` is as in `other_names`."""
    runner = description.runner
    described = {instance.model: instance for instance in description.instances}
    return RunnerFacts(
        name=runner.name,
        kind=f"{runner.runtime}-weft-{runner.version}",
        stage=RunnerStage.STOPPING if runner.capability.draining else stage,
        models=tuple(
            ModelFacts(
                state,
                described.get(state.model) or pb.InstanceDescription(),
                state.model in chat_models,
                called.get(state.model, frozenset()) | _source_names(state.added_source),
            )
            for state in runner.capability.instances
        ),
        adds_models=runner.capability.adds_models,
    )


def _source_names(source: str) -> frozenset[str]:
    """Returns the names of a model loaded by this source: with and without `hf:`; empty without a source."""
    return frozenset({source, source.removeprefix(f"{SourceScheme.HUB}:")} if source else ())


def usable_devices(sight: HostSnapshot, allowed: Collection[int]) -> tuple[DeviceSnapshot, ...] | None:
    """Returns the devices that a runner may use, all of the host if `allowed` is empty; None: unknown."""
    if sight.source is Source.UNKNOWN and not sight.devices:
        return None
    return tuple(device for device in sight.devices if not allowed or device.index in allowed)


HELD_SECONDS = 0.5
"""Maximum age of the cached description, which health checks read."""


class LocalRunner:
    """The runner of this process, as `gateway.runner_api.facts.RunnerPort`."""

    def __init__(
        self,
        runner: RunnerService,
        router: RouterService,
        observer: Observer,
        section: RunnerSettings,
        clock: Clock,
    ) -> None:
        self._called = other_names(section.models)
        self._runner = runner
        self._router = router
        self._observer = observer
        self._devices = frozenset(section.devices)
        self._clock = clock
        self._stage = RunnerStage.STARTING
        self._held: tuple[float, RunnerFacts] | None = None

    def facts(self) -> RunnerFacts:
        """See `RunnerPort.facts`."""
        now = self._clock.monotonic()
        if self._held is None or now - self._held[0] > HELD_SECONDS:
            self._held = now, self._look()
        return self._held[1]

    async def devices(self) -> tuple[DeviceSnapshot, ...] | None:
        """See `RunnerPort.devices`."""
        return usable_devices(await self._observer.look(), self._devices)

    def _look(self) -> RunnerFacts:
        description, view = self._runner.describe(), self._router.view
        known = view.runners.get(description.runner.name)
        # Requests can be placed once the registry reports this incarnation.
        if known is not None and known.active and known.incarnation == description.runner.incarnation:
            self._stage = RunnerStage.SERVING
        chats = [model.name for model in view.models.values() if Operation.CHAT in model.operations]
        facts = runner_facts(description, self._stage, chats, self._called)
        return replace(facts, device_use=self._runner.meter.figures())


class RunnerHttp(Service):
    """The service of a runner's HTTP API. Start it before the runner and stop it afterwards."""

    def __init__(  # noqa: PLR0913 - the command line gives some, the runner's process the others
        self,
        runner: RunnerService,
        settings: RunnerConfig,
        health: HealthSource,
        page: MetricsPage,
        *,
        config: WeftConfig,
        environment: RunnerEnvironment,
        section: RunnerSettings,
        registry_address: str,
        port: int,
    ) -> None:
        """`port` 0 selects a free one. `settings` are the runner's, `health` is that of its process.

        `page` has the runner's metrics and gets those of the API.
        """
        clock = SystemClock()
        security = channel_security(config)
        self._channels = ChannelPool(security=security)
        self._registry = open_channel(registry_address, security)
        router = replace(router_config(config, registry_address), only_runner=section.name, relay=None)
        self._tracing = tracing_of(os.environ)
        self._router = router_svc.router_service.build(router, tracing=self._tracing)
        page.add_spans(self._tracing)
        self._keys = key_check(config, clock)
        observer = settings.observer or host_observer(config.accelerators)
        local = LocalRunner(runner, self._router, observer, section, clock)
        self._api = gateway.runner_api_service.build(
            runner_api_config(config, environment, port),
            RunnerApiPorts(
                runner=local,
                dispatcher=Dispatcher(
                    self._router.placement,
                    CallStreams(self._channels),
                    clock=clock,
                    fleet=self._router,
                    tracing=self._tracing,
                    service=ServiceName.RUNNER,
                ),
                fleet=self._router,
                queue=self._router,
                operations=OperationsClient(
                    self._registry, timeout_seconds=REGISTRY_TIMEOUT_SECONDS, callers_field=callers_field
                ),
                keys=self._keys,
                health=health,
                tracing=self._tracing,
                extensions=enabled_extensions(config.extensions.disabled),
            ),
            metrics=page,
            clock=clock,
        )

    @property
    def url(self) -> str:
        """Its URL, such as `http://127.0.0.1:8081`."""
        return self._api.url

    @override
    async def start(self) -> None:
        if self._keys is not None:
            await self._keys.follow(self._registry)
        await self._router.start()
        await self._api.start()

    @override
    async def stop(self, grace_seconds: float) -> None:
        await self._api.stop(grace_seconds)
        await self._router.stop(grace_seconds)
        if self._keys is not None:
            await self._keys.stop()
        await self._channels.close()
        await self._registry.close(grace=None)
        await close_tracing(self._tracing)


def runner_api_config(config: WeftConfig, environment: RunnerEnvironment, port: int) -> RunnerApiConfig:
    """Returns the configuration of the HTTP API, from file and environment."""
    return RunnerApiConfig(
        edge=replace(gateway_config(config), port=port),
        max_queue_depth=config.router.queue_depth_per_runner,
        metrics=environment.metrics,
        metrics_port=environment.metrics_port,
        journal_rules=journal_rules(config.router),
    )
