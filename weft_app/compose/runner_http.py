"""The HTTP surface of a runner: a router for this runner alone, the gateway's routes over it, and the runner's own.

Nothing but the `weft serve runner` command imports it, and only for a runner that has the surface: others need no web
stack.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc

import gateway.runner_service
import router_svc.service
from gateway.config import RateLimitConfig
from gateway.runner_api.deps import RunnerApiConfig
from gateway.runner_api.facts import DeviceFacts, RunnerFacts, RunnerStage
from gateway.runner_api.operations_client import OperationsClient
from gateway.runner_api.ports import RunnerApiPorts
from router_svc.service import RouterService
from runner_svc.config import RunnerConfig
from runner_svc.memory.lease_manager import Observer
from runner_svc.service import RunnerService
from weft.dispatch import Dispatcher
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.request import Operation
from weft.kernel.rpc import ChannelPool, open_channel
from weft_app.compose.accelerators import host_observer
from weft_app.compose.auth import key_check
from weft_app.compose.gateway import gateway_config
from weft_app.compose.router import router_config
from weft_app.compose.runner_environment import RunnerEnvironment
from weft_app.compose.runner_facts import device_facts, runner_facts
from weft_app.compose.tls import channel_security
from weft_app.config.config import WeftConfig
from weft_app.config.runner_sections import RunnerSection

HELD_SECONDS = 0.5
"""How old what is known of the runner may be: a health check costs a description at most this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerHttpPlan:
    """What the surface of one runner is made from."""

    config: WeftConfig
    environment: RunnerEnvironment
    section: RunnerSection
    registry_address: str
    port: int
    """0: any free one."""


class LocalRunner:
    """The runner of this process, as `gateway.runner_api.ports.RunnerPort`."""

    def __init__(
        self,
        runner: RunnerService,
        router: RouterService,
        observer: Observer,
        *,
        devices: Sequence[int],
        clock: Clock,
    ) -> None:
        """`devices` are the numbers of those that it may use; empty: all of the host's."""
        self._runner = runner
        self._router = router
        self._observer = observer
        self._devices = frozenset(devices)
        self._clock = clock
        self._stage = RunnerStage.STARTING
        self._held: tuple[float, RunnerFacts] | None = None

    def facts(self) -> RunnerFacts:
        """See RunnerPort.facts."""
        now = self._clock.monotonic()
        if self._held is None or now - self._held[0] > HELD_SECONDS:
            self._held = now, self._look()
        return self._held[1]

    async def devices(self) -> tuple[DeviceFacts, ...] | None:
        """See RunnerPort.devices."""
        return device_facts(await self._observer.look(), self._devices)

    def _look(self) -> RunnerFacts:
        told, view = self._runner.describe(), self._router.view
        known = view.runners.get(told.runner.name)
        # Once the registry has told of this very life of it, requests can be placed on it.
        if known is not None and known.active and known.incarnation == told.runner.incarnation:
            self._stage = RunnerStage.SERVING
        chats = [model.name for model in view.models.values() if Operation.CHAT in model.operations]
        return runner_facts(told, self._stage, chats)


class RunnerHttp:
    """Satisfies `weft.kernel.service.Service`.

    Started before the runner and stopped after it, so that it can say that this one starts, or stops.
    """

    service_names: Sequence[str] = ()

    def __init__(self, plan: RunnerHttpPlan, runner: RunnerService, settings: RunnerConfig) -> None:
        """`settings` are those that the runner was built with."""
        clock = SystemClock()
        api = runner_api_config(plan)
        security = channel_security(plan.config)
        self._channels = ChannelPool(security=security)
        self._registry = open_channel(plan.registry_address, security)
        router = replace(router_config(plan.config, plan.registry_address), only_runner=plan.section.name, relay=None)
        self._router = router_svc.service.build(router)
        self._keys = key_check(plan.config, clock)
        local = LocalRunner(
            runner,
            self._router,
            settings.observer or host_observer(plan.config.accelerators),
            devices=plan.section.devices,
            clock=clock,
        )
        self._api = gateway.runner_service.build(
            api,
            RunnerApiPorts(
                runner=local,
                dispatcher=Dispatcher(self._router.placement, self._channels, clock=clock, fleet=self._router),
                fleet=self._router,
                queue=self._router,
                operations=OperationsClient(self._registry, timeout_seconds=api.edge.registry_timeout_seconds),
                keys=self._keys,
            ),
            clock=clock,
        )

    @property
    def url(self) -> str:
        """Where it answers, such as `http://127.0.0.1:8081`."""
        return self._api.url

    def register(self, server: grpc.aio.Server) -> None:
        """Nothing: it has no gRPC services."""

    async def start(self) -> None:
        """See Service.start."""
        if self._keys is not None:
            await self._keys.follow(self._registry)
        await self._router.start()
        await self._api.start()

    async def stop(self, grace_seconds: float) -> None:
        """See Service.stop."""
        await self._api.stop(grace_seconds)
        await self._router.stop(grace_seconds)
        if self._keys is not None:
            await self._keys.stop()
        await self._channels.close()
        await self._registry.close(grace=None)


def runner_api_config(plan: RunnerHttpPlan) -> RunnerApiConfig:
    """The surface as file and environment have it."""
    edge = gateway_config(plan.config)
    return RunnerApiConfig(
        edge=replace(edge, port=plan.port, rate_limits=edge.rate_limits or _rate_limits(plan.environment)),
        max_queue_depth=plan.config.router.queue_depth_per_runner,
        metrics=plan.environment.metrics,
        metrics_port=plan.environment.metrics_port,
    )


def _rate_limits(environment: RunnerEnvironment) -> RateLimitConfig | None:
    if not environment.multi_tenant:
        return None
    if environment.default_rate is None:
        return RateLimitConfig(tenants=environment.tenant_rates)
    return RateLimitConfig(default=environment.default_rate, tenants=environment.tenant_rates)
