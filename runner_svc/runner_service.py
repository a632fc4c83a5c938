"""The runner service: builds instances, session and servicers, and starts and stops them in order."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any

import grpc
from typing_extensions import override

from runner_svc.added_models import AddedModels
from runner_svc.added_models_file import SUFFIX
from runner_svc.backend.port import EnginePage
from runner_svc.cache.manager import CacheManager
from runner_svc.cache.prompt_store import PromptStore
from runner_svc.cache.prompt_transfer import PromptFetcher
from runner_svc.chat.chat_request import ChatSetup
from runner_svc.followed_servers import FollowedServers
from runner_svc.instance.admission import RequestLimit
from runner_svc.instance.instance import Instance
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.memory.device_meter import DeviceMeter, DeviceSampler
from runner_svc.memory.lease_manager import LeaseManager, LeaseManagerConfig
from runner_svc.memory.machine_memory import free_memory_bytes, machine_memory
from runner_svc.model_files.digest import model_digest
from runner_svc.policy.engine_health import engine_health
from runner_svc.policy.lifecycle import Phase
from runner_svc.policy.load_options import AS_CONFIGURED
from runner_svc.policy.memory_estimate import MEBIBYTE
from runner_svc.policy.model_sizing import MachineMemory
from runner_svc.policy.replacement import must_drain_first, replacement_words
from runner_svc.prewarmer import Prewarmer
from runner_svc.runner_config import RunnerConfig
from runner_svc.servicers.control import RunnerServicer
from runner_svc.servicers.inference import DataPlane
from runner_svc.servicers.request_admission import RequestAdmission, RunnerIdentity
from runner_svc.session.clock_offset import ClockOffset
from runner_svc.session.host_meter import HostMeter
from runner_svc.session.report import RunnerReport
from runner_svc.session.session import RunnerSession
from runner_svc.tools.mcp_servers import untracked_tag
from runner_svc.tools.tool_box import build_tool_box
from weft.api.registry.v1 import agent_pb2, runner_pb2, wake_pb2
from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.dispatch.tickets import PermitGate, TicketGate
from weft.kernel.channels.failover_channel import FailoverChannel
from weft.kernel.channels.rpc import ChannelPool, GenericHandlers, open_channel
from weft.kernel.services.health import WELL, HealthCheck, Observation, degraded
from weft.kernel.services.service_lifecycle import Service, start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock, MeshClock, SystemClock
from weft.kernel.values.names import new_id
from weft.link.carried_calls import CARRY, CarriedCalls
from weft.wake.run import run_recipe

if TYPE_CHECKING:
    from weft.dispatch.fleet import FleetView

log = get_logger("weft.runner")

DRAIN_CHECK_SECONDS = 0.05
PUBLISHED_CHECK_SECONDS = 1.0
"""Interval of checks whether the registry has this runner's models, before prompts of their agents are processed."""
REPLACEMENT_SECONDS = 1.0
"""Maximum wait for a replacing instance; after that requests may have to wait for it."""
_IN_MEMORY = frozenset({Phase.LOADING, Phase.READY, Phase.DRAINING, Phase.STOPPING})
"""Phases in which a model uses memory."""


def build(config: RunnerConfig, *, clock: Clock | None = None) -> "RunnerService":
    """Builds a runner; `start` starts it."""
    return RunnerService(config, clock or SystemClock())


class RunnerService(Service):
    """A runner as a weft.kernel.services.service_lifecycle.Service."""

    def __init__(self, config: RunnerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._mesh_clock = MeshClock(clock)
        self._clock_offset = ClockOffset(clock, self._mesh_clock)
        self._session: RunnerSession | None = None
        self._incarnation = incarnation = new_id("run")
        limit = RequestLimit(config.max_requests)
        make_tag = config.leftovers.begin if config.leftovers is not None else untracked_tag
        self._tools = build_tool_box(
            config.tools,
            where=f"runners.{config.name}.tools",
            make_tag=make_tag,
            # A request names tools, and agents of others could name any.
            only={tool for agent in config.agents for tool in agent.behaviour.tools} if config.is_joined else None,
        )
        self._leases = self._lease_manager(config)
        self.meter = DeviceMeter(clock)
        self._sampler = self._device_sampler(config)
        self._limit = limit
        self._instances = {model.name: self._instance(model, limit) for model in config.models}
        self._by_name = {name: instance for instance in self._instances.values() for name in instance.names}
        """Instances by every name that they serve: models and adapters."""
        self._in_order = list(self._instances.values())
        self._chats: dict[str, ChatSetup] = {}
        self._leaving: dict[asyncio.Task[None], str] = {}
        """Models of instances that finish their last requests and accept no others."""
        self._coming: set[asyncio.Task[None]] = set()
        """Instances that load once others of the same model have ended."""
        store, budget_bytes = config.session_file.with_suffix(".prompts"), config.stored_prompts_mb * MEBIBYTE
        self._caches = CacheManager(
            self._instances.values(),
            config.session_file.parent,
            PromptStore(store, budget_bytes, self._note_change) if budget_bytes else None,
            # The ticket of a request names the address.
            PromptFetcher(ChannelPool(security=config.security)) if budget_bytes and not config.is_joined else None,
        )
        self._followed = FollowedServers(self, clock)
        self.on_left_out: Callable[[Sequence[runner_pb2.LeftOut]], None] = lambda _: None
        """Called after each opening of the session with what the registry does not publish."""
        self._added: AddedModels | None = None
        if config.adder is not None or config.server_adder is not None:
            file = config.session_file.with_suffix(SUFFIX)
            self._added = AddedModels(config.adder, self, file, self._followed, config.server_adder)
        for instance in self._instances.values():
            self._prepare(instance)
        self._gate = TicketGate(runner=config.name, incarnation=incarnation)
        self._permits = PermitGate(runner=config.name, incarnation=incarnation)
        self._report = RunnerReport(
            config,
            incarnation,
            self._in_order,
            self._caches.figures,
            self._tools.names,
            self._clock_offset,
            lambda: [] if self._added is None else self._added.servers,
        )
        self._report.followed_servers = lambda: self._followed.counts
        self._report.left_out = lambda: self._followed.left_out + ([] if self._added is None else self._added.left_out)
        self._followed.is_reserved, self._followed.until_published = self._is_reserved, self.until_published
        self._report.state_kind = self._caches.kind
        self._report.host_use = HostMeter(clock).use
        self._control = RunnerServicer(
            self._report,
            self._by_name,
            permits=self._permits,
            tickets=self._gate,
            cache=self._caches,
            clock=self._mesh_clock,
            added=self._added,
        )
        """Calls of dispatchers on its machine, and of those in its process."""
        self._control.shared = config.shared_models
        self.admission = RequestAdmission(
            identity=RunnerIdentity(runner=config.name, incarnation=incarnation, host=config.host),
            gate=self._gate,
            instances=self._by_name,
            caches=self._caches,
            clock=self._mesh_clock,
            clock_offset=self._clock_offset,
        )
        """Admits requests with tickets, over gRPC and over HTTP."""
        self.carried: CarriedCalls | None = None
        """Calls of dispatchers on shared streams; None before `register`."""
        self._registry: grpc.aio.Channel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._digesting: asyncio.Task[None] | None = None

    @property
    def health_checks(self) -> tuple[HealthCheck, ...]:
        """The checks of its engines and its session; a failed check means degraded, because the runner can recover."""

        def probe_engines() -> Observation:
            return engine_health({name: instance.phase for name, instance in self._instances.items()})

        def probe_session() -> Observation:
            if self._session is not None and self._session.is_acknowledged:
                return WELL
            return degraded("no_registry", "the registry does not answer; admitted requests are served")

        return (
            HealthCheck(name="engines", probe=probe_engines, is_essential=False),
            HealthCheck(name="registry", probe=probe_session, is_essential=False),
        )

    @override
    @property
    def service_names(self) -> tuple[str, ...]:
        return (runner_service_pb2.DESCRIPTOR.services_by_name["RunnerService"].full_name, CARRY.service)

    @override
    def register(self, server: grpc.aio.Server) -> None:
        self._chats |= {name: self._chat_setup(name, instance.config) for name, instance in self._by_name.items()}
        self.carried = DataPlane(self.admission, self._chats).add_to_server(server)
        # Generic, so that the link of a joined runner may forward calls that name another runner.
        add: Any = runner_service_pb2_grpc.add_RunnerServiceServicer_to_server
        add(self._control, GenericHandlers(server))

    async def start(self) -> None:
        """Starts instances, tools and session. Backends load in the background and report changes to the registry."""
        self._registry = open_channel(self._config.registry_address, self._config.security)
        self._session = RunnerSession(
            registry=self._registry,
            report=self._report,
            gates=(self._gate, self._permits),
            incarnation=self._incarnation,
            session_file=self._config.session_file,
            clock=self._clock,
            jitter=SystemRandom().random,
        )
        self._session.requires_all = self._config.requires_all
        self._session.on_left_out = self._note_left_out
        self._session.on_host = self._note_host
        if isinstance(self._registry, FailoverChannel):
            self._registry.on_move(self._session.note_other_registry)
        if self._config.leftovers is not None:
            await asyncio.to_thread(self._config.leftovers.sweep)
        if self._leases is not None:
            await self._leases.start(self._registry)
        if self._sampler is not None:
            await self._sampler.start()
        await self._caches.open()
        for instance in self._instances.values():
            await instance.start()
        for server in self._config.followed:
            await self._followed.follow(server)
        if self._added is not None:
            await self._added.restore()
        # After the instances, which load meanwhile: the start of an unreachable tool server takes until its timeout.
        await self._tools.start()
        await self._session.start()
        self._reading = start_task(self._read_models(), name="model-files")

    async def serve(self, model: ServedModel) -> None:
        """Serves another model, or replaces the one with its name; see `replace`."""
        await self.replace(model)

    async def replace(self, model: ServedModel) -> str:
        """Serves a new model, or replaces the one with its name; running requests of the replaced one finish.

        The new one loads beside the old one if memory allows both, otherwise after it. Returns a sentence about the
        order; empty for a new model.
        """
        instance = self._instance(model, self._limit)
        self._prepare(instance)
        await self._foresee(instance)
        drains_first, words = await self._replacement(instance)
        if drains_first:
            self.withdraw(model.name)
            coming = start_task(self._start_after_others(instance), name=f"coming-{model.name}")
            self._coming.add(coming)
            coming.add_done_callback(self._coming.discard)
        else:
            await instance.start()
            if model.name in self._instances:
                try:
                    await self._until_ready(instance)
                except BaseException:
                    await instance.stop()
                    raise
                self.withdraw(model.name)
        self._caches.add(instance)
        for name in instance.names:
            self._chats[name] = self._chat_setup(name, model)
            self._by_name[name] = instance
        self._instances[model.name] = instance
        self._in_order.append(instance)
        self._report.models.append(model)
        self._note_models()
        if model.model_path is not None or model.list_price is not None:
            self._read_digests_again()
        return words

    async def _replacement(self, instance: Instance) -> tuple[bool, str]:
        """Returns whether the others of an instance's model end first, and a sentence; empty if there are none."""
        old, is_leaving = self._instances.get(instance.model), instance.model in self._leaving.values()
        is_loaded = is_leaving or (old is not None and old.phase in _IN_MEMORY)
        needed = None if instance.memory.expected is None else instance.memory.expected.bytes
        free = None
        if is_loaded and needed and not instance.config.hibernation.attached:
            free = await free_memory_bytes(self._leases)
        drains_first = must_drain_first(is_loaded=is_loaded, needed_bytes=needed, free_bytes=free)
        if old is None:
            return drains_first, ""
        words = replacement_words(instance.model, drains_first=drains_first, needed_bytes=needed, free_bytes=free)
        return drains_first, words

    async def _start_after_others(self, instance: Instance) -> None:
        """Starts an instance once all earlier ones of its model have ended, unless it has been replaced meanwhile."""
        while earlier := [task for task, model in self._leaving.items() if model == instance.model]:
            await asyncio.wait(earlier)
        if self._instances.get(instance.model) is instance:
            await instance.start()

    def is_served(self, name: str) -> bool:
        """Whether a model or an adapter of this name is served."""
        return name in self._by_name

    async def machine_memory(self) -> MachineMemory:
        """Returns the memory for sizing a model without configuration."""
        return await machine_memory(self._leases)

    async def remove(self, name: str) -> int:
        """Stops serving a model: its requests end within its drain time, then its engine and its lease.

        Returns the bytes of accelerator memory that it held. Does nothing for an unknown name.
        """
        instance = self._instances.get(name)
        if instance is None:
            return 0
        held = instance.memory.held_bytes
        leaving = self._retire(instance)
        self._note_models()
        timer = asyncio.create_task(self._clock.sleep(instance.config.hibernation.drain_seconds))
        await asyncio.wait({leaving, timer}, return_when=asyncio.FIRST_COMPLETED)
        await stop_tasks([timer, leaving])
        return held

    def withdraw(self, name: str) -> None:
        """Stops serving a model; its running requests finish. Does nothing for an unknown name."""
        instance = self._instances.get(name)
        if instance is not None:
            self._retire(instance)
            self._note_models()

    def publish_agents(self, agents: Sequence[agent_pb2.AgentManifest]) -> None:
        """Publishes these agents instead of the current ones."""
        self._report.published_agents = tuple(agents)
        self._followed.note_taken({agent.name for agent in agents})
        self._note_models()

    def _note_left_out(self, items: Sequence[runner_pb2.LeftOut]) -> None:
        self._followed.note_left_out(items)
        self.on_left_out(items)

    async def until_published(self, seconds: float) -> bool:
        """Waits until the registry has the current models and agents; returns whether it has within this time."""
        return self._session is not None and await self._session.until_published(seconds)

    def holders_of(self, name: str) -> int:
        """Returns the number of a model's running requests; 0 if it is not served."""
        instance = self._instances.get(name)
        return 0 if instance is None else len(instance.slots.holders)

    def _is_reserved(self, name: str) -> bool:
        agents = {agent.name for agent in self._report.published_agents}
        return name == self._config.name or name in agents or name in self._config.reserved_names

    def _retire(self, instance: Instance) -> "asyncio.Task[None]":
        """Stops admitting requests to an instance; returns the task that ends it after its running requests."""
        name = instance.model
        del self._instances[name]
        self._in_order.remove(instance)
        for served in instance.names:
            del self._by_name[served]
        self._report.models[:] = [model for model in self._report.models if model.name != name]
        instance.drain()
        task = start_task(self._end_once_idle(instance), name=f"leaving-{name}")
        self._leaving[task] = name
        task.add_done_callback(lambda done: self._leaving.pop(done, None))
        return task

    async def _end_once_idle(self, instance: Instance) -> None:
        """Ends an instance after its last request; requests have their own limits."""
        try:
            while instance.slots.holders:
                await self._clock.sleep(DRAIN_CHECK_SECONDS)
        finally:
            await instance.stop()
            self._caches.remove(instance)

    async def _until_ready(self, instance: Instance) -> None:
        """Waits until an instance admits requests, at most REPLACEMENT_SECONDS."""
        deadline = self._clock.monotonic() + REPLACEMENT_SECONDS
        while instance.phase is not Phase.READY and self._clock.monotonic() < deadline:
            await self._clock.sleep(DRAIN_CHECK_SECONDS)

    def _note_models(self) -> None:
        if self._session is not None:
            self._session.note_models()

    async def stop(self, grace_seconds: float) -> None:
        """Rejects new requests, lets running ones finish, ends the backends, releases leases, closes the session."""
        self._control.end_tails()
        await self._followed.stop()
        await self._drain(grace_seconds)
        await stop_tasks([task for task in (self._reading, self._digesting) if task is not None])
        self._reading = self._digesting = None
        await self._caches.close()
        await stop_tasks([*self._coming, *self._leaving])
        ends = await asyncio.gather(*(instance.stop() for instance in self._instances.values()), return_exceptions=True)
        for instance, end in zip(self._instances.values(), ends, strict=True):
            if isinstance(end, Exception):
                # A failure must not prevent stopping the others, the tools and the connection.
                log.error("a model did not stop cleanly", model=instance.model, error=repr(end)[:512])
        await self._caches.settle()
        # After the instances, which end the remaining requests with their reasons.
        if self.carried is not None:
            await self.carried.stop()
        if self._sampler is not None:
            await self._sampler.stop()
        # Only now: leases are released after their engines have ended, while the session is still open.
        if self._leases is not None:
            await self._leases.stop()
        if self._session is not None:
            await self._session.stop()
        await self._tools.stop()
        if self._registry is not None:
            await self._registry.close(grace=None)
            self._registry = None

    def describe(self) -> runner_service_pb2.DescribeResponse:
        """Describes the runner and its instances like RunnerService.Describe, without log lines."""
        return self._report.describe(0)

    def engine_pages(self) -> dict[str, EnginePage]:
        """Returns the metrics pages of the engines that have one, by model."""
        pages = {instance.model: instance.backend.engine_page for instance in self._in_order}
        return {model: page for model, page in pages.items() if page is not None}

    def reopen_session(self) -> None:
        """Reopens the session immediately because the path to the registry changed. Does nothing before `start`."""
        if self._session is not None:
            self._session.reopen()

    def note_mesh_time(self, now: datetime) -> None:
        """Sets the mesh's time (UTC), which determines when tickets and permits expire."""
        self._mesh_clock.set(now)

    def _instance(self, model: ServedModel, limit: RequestLimit) -> Instance:
        ledger = None if model.hibernation.attached else self._leases
        if ledger is not None:
            hibernation = replace(model.hibernation, memory_wait_seconds=self._config.memory_wait_seconds)
            model = replace(model, hibernation=hibernation)
        instance = Instance(
            model, model.make_backend(), self._clock, self._note_change, self._run_recipe, limit=limit, ledger=ledger
        )
        if ledger is not None:
            instance.meter = self.meter
        return instance

    def _lease_manager(self, config: RunnerConfig) -> LeaseManager | None:
        starts_engines = config.adder is not None or any(not model.hibernation.attached for model in config.models)
        if config.observer is None or not starts_engines:
            return None
        settings = LeaseManagerConfig(
            runner=config.name,
            incarnation=self._incarnation,
            device_indexes=config.device_indexes,
            max_wait_seconds=config.memory_wait_seconds,
        )
        return LeaseManager(settings, config.observer, self._session_id, self._clock, SystemRandom().random)

    def _device_sampler(self, config: RunnerConfig) -> DeviceSampler | None:
        """Returns the device sampler; None: no engine of this runner can hold a device."""
        if self._leases is None or config.observer is None:
            return None
        return DeviceSampler(
            config.observer, self.meter, self._leases.processes, self._clock, config.device_sample_seconds
        )

    def _note_host(self, host: str) -> None:
        if self._leases is not None:
            self._leases.host = host

    def _session_id(self) -> str:
        return "" if self._session is None else self._session.session_id

    def _chat_setup(self, name: str, model: ServedModel) -> ChatSetup:
        return ChatSetup(
            runner=self._config.name,
            model=name,
            settings=model.chat,
            tools=self._tools,
            clock=self._mesh_clock,
        )

    async def _run_recipe(self, recipe: wake_pb2.WakeRecipe, timeout_seconds: float) -> None:
        await run_recipe(recipe, timeout_seconds=timeout_seconds, environment=self._config.environment)

    async def _drain(self, grace_seconds: float) -> None:
        self._report.draining = True
        for instance in self._instances.values():
            instance.drain()
        if self._session is not None:
            await self._session.report_now()
        deadline = self._clock.monotonic() + grace_seconds
        while self._clock.monotonic() < deadline and (
            self._leaving or any(instance.slots.holders for instance in self._in_order)
        ):
            await self._clock.sleep(DRAIN_CHECK_SECONDS)

    async def _read_models(self) -> None:
        # Forecasts first, because they are fast and routers need them to choose a host with enough memory.
        for instance in list(self._instances.values()):
            await self._foresee(instance)
        self._note_change()
        await self._read_digests()

    async def _read_digests(self) -> None:
        memory, published = self._config.session_file.with_name("digests.json"), self._report.manifests()
        read: set[str] = set()
        # Models may be added meanwhile.
        while left := [each for each in self._instances.values() if each.model not in read]:
            for instance in left:
                read.add(instance.model)
                await self._read_facts(instance, memory)
        if self._report.manifests() != published:
            self._note_models()

    async def _read_facts(self, instance: Instance, memory: Path) -> None:
        """Reads the digests of a model's files, and its price."""
        instance.digest = instance.digest or await _digest(instance.model, instance.model_path, memory)
        for adapter in instance.config.adapters:
            instance.adapter_digests[adapter.name] = await _digest(adapter.name, adapter.file, memory)
        if instance.price is None and instance.config.list_price is not None:
            instance.price = await asyncio.to_thread(instance.config.list_price)

    def _prepare(self, instance: Instance) -> None:
        instance.on_adopted = self._note_adopted
        instance.set_after_start(partial(self._caches.check_restores, instance))
        instance.set_before_end(partial(self._caches.put_away, instance))
        instance.set_idle_work(Prewarmer(instance, self._caches, self._chats, self._mesh_view, self._clock))

    async def _mesh_view(self) -> "FleetView":
        """Waits until the mesh has the models and agents of this runner; returns it. Raises as the registry."""
        from weft.dispatch.fleet import read_fleet  # noqa: PLC0415 - the prewarmer alone needs it

        while self._registry is None or not await self.until_published(0.0):
            await self._clock.sleep(PUBLISHED_CHECK_SECONDS)
        return await read_fleet(self._registry)

    def _note_adopted(self) -> None:
        """Reads the digests of a model's pulled files."""
        self._read_digests_again()
        self._note_change()

    def _read_digests_again(self) -> None:
        """Reads the digests of files that arrived after the start."""
        if self._digesting is None or self._digesting.done():
            self._digesting = start_task(self._read_digests(), name="model-digests")

    async def _foresee(self, instance: Instance) -> None:
        """Forecasts a model's memory before its first load."""
        if instance.memory.expected is None:
            await instance.memory.foresee(AS_CONFIGURED)

    def _note_change(self) -> None:
        if self._session is not None:
            self._session.note_change()


async def _digest(name: str, file: Path | None, memory: Path) -> str:
    """Returns the file digest of a model or an adapter; empty: it has no file, or it is unreadable."""
    if file is None:
        return ""
    try:
        return await model_digest(file, memory)
    except OSError as error:
        log.warning("no digest of the model file", model=name, error=error.strerror)
        return ""
