"""Configuration and serving of a runner. A runner host needs no web stack and no database."""

import asyncio
import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import runner_svc.runner_service
from runner_svc.backend.engine_process import EnginePorts, parse_port_range
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.memory.estimate import MemoryEstimator
from runner_svc.memory.learned_memory import LearnedMemory, learned_file
from runner_svc.model_store.peers import ModelPeers, SharedModels
from runner_svc.model_store.store import ModelStore, source_digest
from runner_svc.runner_config import RunnerConfig
from runner_svc.runner_service import RunnerService
from runner_svc.runner_settings import ModelStoreSettings, RunnerSettings
from runner_svc.runtimes.runtime_settings import ModelSettings, SourcedModelSettings
from runner_svc.runtimes.table import why_off
from runner_svc.supervise.leftovers import Leftovers
from weft.api.operations.v1 import configuration_service_pb2 as pb
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.models.model_source import parse_source
from weft.kernel.services.health import HealthSource
from weft.kernel.services.health_monitor import HealthMonitor
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import SystemClock
from weft.kernel.values.names import AUTO_MODEL
from weft_app.compose.accelerators import host_observer
from weft_app.compose.added_models import SectionAdder
from weft_app.compose.certificate_expiry import CertificateExpiry
from weft_app.compose.configuration_service import ConfigurationService
from weft_app.compose.demo import configured_runners
from weft_app.compose.followed_servers import attached_server, configured_servers
from weft_app.compose.home import WeftHome
from weft_app.compose.model_sources import ModelSources
from weft_app.compose.process_metrics import metrics_services, runner_page
from weft_app.compose.process_service import ProcessService
from weft_app.compose.published_agents import published_agents
from weft_app.compose.security import channel_security, key_check, key_followers, new_host
from weft_app.compose.served_models import runner_context, served_model
from weft_app.compose.serving import Announce, registry_address, serve_until_stopped
from weft_app.compose.tool_sources import tool_sources
from weft_app.config.config import AcceleratorSettings, WeftConfig
from weft_app.config.reload_plan import plan_models, plan_reload
from weft_app.config.runners import with_replicas

if TYPE_CHECKING:
    from weft.kernel.telemetry.metrics_page import MetricsPage

DEFAULT_DRAIN_SECONDS = 10.0
PUBLISH_SECONDS = 10.0
"""Timeout for the registry to drop removed models, so that others can use their names."""

log = get_logger("weft_app.compose")


class HttpApi(Service, Protocol):
    """A runner's HTTP API."""

    @property
    def url(self) -> str:
        """Base URL, once started."""
        ...


MakeHttpApi = Callable[[RunnerService, RunnerConfig, HealthSource, "MetricsPage"], HttpApi]
"""Builds a runner's HTTP API. A parameter, because this module must not import the web stack."""


def runner_config(  # noqa: PLR0913 - what the file says about this host, by its sections
    section: RunnerSettings,
    home: WeftHome,
    *,
    address: str,
    registry_address: str,
    published: Collection[str] | None = None,
    drain_seconds: float = DEFAULT_DRAIN_SECONDS,
    accelerators: AcceleratorSettings | None = None,
    model_store: ModelStoreSettings | None = None,
    peers: ModelPeers | None = None,
    taken_names: Iterable[str] = (),
    disabled: Collection[str] = (),
) -> RunnerConfig:
    """Returns the configuration of a runner at the gRPC target `address`.

    `published`: the models to serve; None: all without `publish: false`. `drain_seconds`: how long an unload waits for
    running requests. `accelerators`: this host's devices with leased memory; None: memory is not leased. `model_store`:
    how models with a `source` are pulled. `peers`: the runners that may have them; None: none. `taken_names`: see
    `names_taken_by`. `disabled`: extensions whose runtimes it must not use.
    """
    models = section.published_models
    if published is not None:
        models = tuple(model for model in section.models if model.name in published)
    if not models and section.models:
        raise invalid_field(f"runners.{section.name}.models", "none is published; set `publish: true` for one of them")
    state = home.state / "runners"
    has_children = section.engine.starts_engines or any(tool.type == "mcp_command" for tool in section.tools)
    leftovers = Leftovers(state / f"{section.name}.children") if has_children else None
    ports = None
    if section.port_range is not None:
        ports = EnginePorts(parse_port_range(section.port_range, f"runners.{section.name}.port_range"))
    context = replace(
        runner_context(section),
        environments=home.environments,
        disabled=disabled,
        leftovers=leftovers,
        ports=ports,
        estimator=MemoryEstimator(LearnedMemory(learned_file(state, section.name))),
    )
    stores = model_store or ModelStoreSettings()
    store = ModelStore(home.models)
    sources = ModelSources(store, stores, peers)

    def build(model: ModelSettings) -> ServedModel:
        return served_model(section, model, drain_seconds, context)

    def build_added(other: RunnerSettings, model: ModelSettings) -> ServedModel:
        return served_model(other, model, drain_seconds, replace(context, command=other.command))

    only = None if published is None else frozenset(_source_digests(models))
    adder, is_off = None, bool(why_off(section.runtime, disabled))
    if section.engine.formats and not is_off:
        adder = SectionAdder(section, sources, context, build_added)
    return RunnerConfig(
        name=section.name,
        runtime=section.runtime,
        host=socket.gethostname(),
        address=address,
        registry_address=registry_address,
        session_file=state / f"{section.name}.session",
        leftovers=leftovers,
        models=tuple(
            build(model) if is_off else sources.served(model, build) for model in with_replicas(section, models)
        ),
        followed=configured_servers(section, build_added, probes=context.probes),
        shared_models=SharedModels(store, stores.share_rate_bytes, only=only) if stores.share else None,
        server_adder=partial(attached_server, section, build_added, context.probes),
        adder=adder,
        observer=None if accelerators is None else host_observer(accelerators),
        device_indexes=section.devices,
        memory_wait_seconds=section.memory_wait_seconds,
        stored_prompts_mb=section.stored_prompts_mb,
        agents=published_agents(section),
        reserved_names=frozenset(taken_names),
        tools=tool_sources(section, os.environ),
        max_requests=section.max_requests,
        worker_hosts=section.worker_hosts,
        labels=section.labels,
    )


def _source_digests(models: Iterable[ModelSettings]) -> Iterator[str]:
    for model in models:
        if isinstance(model, SourcedModelSettings) and model.source is not None:
            yield source_digest(parse_source(model.source, f"{model.name}.source"))


@dataclass(slots=True)
class RunnerReload:
    """Reloads one runner, one reload at a time."""

    service: RunnerService
    section: RunnerSettings
    build: Callable[[RunnerSettings], RunnerConfig]
    """Returns the runner's configuration from its section."""
    reread: Callable[[], RunnerSettings]

    async def reload(self, dry_run: bool) -> pb.ReloadConfigurationResponse:
        """Serves the models and agents of the file. Raises INVALID_ARGUMENT without a change.

        Other changed settings are only returned: they need a restart of the process by the caller.
        """
        section = await asyncio.to_thread(self.reread)
        plan = plan_reload(WeftConfig(), WeftConfig(), [self.section], [section])
        response = pb.ReloadConfigurationResponse(changes=plan.changes)
        if dry_run or not plan.updated:
            return response
        built = await asyncio.to_thread(self.build, section)
        await self._carry_out(section, built, response)
        self.section = section
        return response

    async def _carry_out(
        self, section: RunnerSettings, built: RunnerConfig, response: pb.ReloadConfigurationResponse
    ) -> None:
        before = with_replicas(self.section, self.section.published_models)
        gone, served = plan_models(before, with_replicas(section, section.published_models))
        models = {model.name: model for model in built.models}
        for name in gone:
            if holders := self.service.holders_of(name):
                requests = "1 request that runs" if holders == 1 else f"{holders} requests that run"
                response.notes.append(f"{name} is removed after {requests}")
            self.service.withdraw(name)
            log.info("model is not in the configuration any more", model=name)
        self.service.publish_agents(built.agents)
        if gone and not await self.service.until_published(PUBLISH_SECONDS):
            response.notes.append(f"runner {section.name}: the registry does not answer; it learns of the change later")
        for name in served:
            if words := await self.service.replace(models[name]):
                response.notes.append(words)
            log.info("model is served as the configuration has it now", model=name)
        # The new models must be usable once the reload returns.
        await self.service.until_published(PUBLISH_SECONDS)


async def serve_runner(
    config: WeftConfig,
    home: WeftHome,
    listen: str | None,
    announce: Announce,
    *,
    name: str | None,
    make_http_api: MakeHttpApi | None = None,
    reread: Callable[[], WeftConfig] | None = None,
) -> None:
    """Serves a runner, and its HTTP API if any, until a signal arrives. Its backends have ended when this returns.

    `reread` reads the configuration for reloads; None: no reloads.
    """
    section = pick_runner(configured_runners(config), name)
    keys, registry = key_check(config, SystemClock()), registry_address(config, home)
    security = channel_security(config)
    peers = ModelPeers(section.name, registry, security)
    host = new_host(config, "runner", keys)
    address = host.bind(listen or home.address(f"runner-{section.name}"))

    def build(section: RunnerSettings) -> RunnerConfig:
        built = runner_config(
            section,
            home,
            address=address,
            registry_address=registry,
            drain_seconds=config.drain_seconds,
            accelerators=config.accelerators,
            model_store=config.model_store,
            peers=peers,
            taken_names=names_taken_by(config),
            disabled=config.extensions.disabled,
        )
        return replace(built, security=security)

    built = build(section)
    service = runner_svc.runner_service.build(built)
    companions: list[Service] = [*key_followers(keys, registry, built.security)]
    if reread is not None:
        reloads = RunnerReload(service, section, build, lambda: pick_runner(configured_runners(reread()), section.name))
        companions.append(ConfigurationService(reloads.reload))
    monitor = HealthMonitor([*service.health_checks, *CertificateExpiry(config).health_checks()], SystemClock())
    companions.append(ProcessService(monitor))
    page = None
    if make_http_api is not None or config.metrics.listen is not None:
        page = runner_page(config, service, section.name)
    companions += metrics_services(config, page, "runner", monitor, keys)
    if make_http_api is None or page is None:
        await serve_until_stopped(
            host, service, config, lambda: announce(address), companions=companions, monitor=monitor
        )
    else:
        made = make_http_api(service, built, monitor, page)

        def started() -> None:
            announce(address)
            announce(made.url)

        # The HTTP API starts first and stops last, to report that the runner is starting or stopping.
        await serve_until_stopped(host, made, config, started, companions=[service, *companions], monitor=monitor)


def names_taken_by(config: WeftConfig) -> Iterator[str]:
    """Yields the names that models from the lists of servers must not take: of runners, models, agents and aliases."""
    yield AUTO_MODEL
    yield from (alias.pattern or alias.name for alias in config.registry.aliases)
    for runner in configured_runners(config):
        yield runner.name
        yield from (model.name for model in runner.published_models)
        yield from (agent.name for agent in runner.agents)


def pick_runner(runners: tuple[RunnerSettings, ...], name: str | None) -> RunnerSettings:
    """Returns the runner with this name, or the only one. Raises INVALID_ARGUMENT listing the choices."""
    names = ", ".join(runner.name for runner in runners)
    if name is None and len(runners) == 1:
        return runners[0]
    found = next((runner for runner in runners if runner.name == name), None)
    if found is None:
        raise invalid_field("--runner", f"must be one of: {names}")
    return found
