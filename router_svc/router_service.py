"""The router as a service: the scheduling loop, fed by the registry watch, behind its gRPC services."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import grpc
from typing_extensions import override

from router_svc.fleet_view import view_of_runner
from router_svc.inference_servicer import InferenceServicer
from router_svc.loop import LoopDeps, RouterRecords, SchedulingLoop, TicketIssuer
from router_svc.memory_watch import MemoryWatch
from router_svc.observer import RouterState, SchedulingObserver
from router_svc.placement import LocalPlacement, PlacementServicer, add_placement_to_server
from router_svc.prefix_watch import PrefixWatch
from router_svc.relay import Relay
from router_svc.request_record import RequestHistory
from router_svc.request_servicer import JournaledTasks, RequestServicer
from router_svc.router_config import RouterConfig
from router_svc.spans import CallSpans
from router_svc.waker import Waker
from weft.api.operations.v1 import operation_service_pb2, operation_service_pb2_grpc
from weft.api.registry.v1 import lease_service_pb2, secret_service_pb2, secret_service_pb2_grpc
from weft.api.router.v1 import (
    inference_service_pb2,
    placement_service_pb2,
    request_pb2,
    request_service_pb2,
    request_service_pb2_grpc,
)
from weft.dispatch.aliases import asked_name
from weft.dispatch.call import LayeredDispatcher
from weft.dispatch.captured import CaptureSender
from weft.dispatch.dispatcher import Dispatcher
from weft.dispatch.fleet import ExpectedMesh, FleetListener, FleetView, FleetWatcher, probe_fleet
from weft.durable.batches import FileClient
from weft.durable.durable_call import durable_calls
from weft.durable.ended_requests import ObserverParts, ended_requests
from weft.durable.journal_policy import JournalPolicy
from weft.durable.tasks import TaskClient
from weft.extension import Extension
from weft.kernel.channels.rpc import ChannelPool, calling, open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.health import HealthCheck
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.tracing import NO_TRACING, Tracing
from weft.kernel.time.clock import Clock, MeshClock, SystemClock
from weft.link.carried_calls import CARRY, CallStreams, CarriedCalls
from weft.wake.run import run_recipe

log = get_logger("weft.router")

REGISTRY_TIMEOUT_SECONDS = 2.0
"""Time limit for the audit entry of a cancellation, and for reading a webhook."""


def build(
    config: RouterConfig,
    *,
    clock: Clock | None = None,
    tracing: Tracing = NO_TRACING,
    observer: SchedulingObserver | None = None,
    extensions: Iterable[Extension] = (),
) -> "RouterService":
    """Build a router that is not started; `observer` receives its scheduling events."""
    return RouterService(config, clock or SystemClock(), tracing, observer, extensions)


class RouterService(Service):
    """The scheduling loop with its waker, records and relay, behind the gRPC services of a router."""

    def __init__(
        self,
        config: RouterConfig,
        clock: Clock,
        tracing: Tracing = NO_TRACING,
        observer: SchedulingObserver | None = None,
        extensions: Iterable[Extension] = (),
    ) -> None:
        self._config = config
        self.name = config.name
        """Its name among the routers; empty: none."""
        self.tracing = tracing
        """Receives the spans of requests and tasks."""
        self.outbound = config.outbound
        observer = observer or SchedulingObserver()
        self._clock = clock
        # Uses the registry's time like runners do, as this machine's clock may be off or be set.
        self._mesh_clock = MeshClock(clock)
        self.channels = ChannelPool(security=config.security)
        self.streams = CallStreams(self.channels)
        """Channels to runners for dispatchers in this process; closed when the router stops."""
        run_wake_recipe = partial(run_recipe, environment=config.wake_environment, outbound=config.outbound)
        self.captures = CaptureSender(lambda: self._registry)
        parts = ObserverParts(tasks=lambda: self._tasks, view=lambda: self._view, clock=clock)
        self.ended_requests = ended_requests(extensions, parts)
        self.observers = (self.captures, *self.ended_requests)
        """For dispatchers in this process."""
        self._waker = Waker(run_wake_recipe, self.channels, clock, config.wake_recipes)
        records = self.records = RouterRecords.empty(
            clock,
            clients=config.clients,
            rate_limits=config.rate_limits,
            request_log=config.request_log,
            figures=config.figures,
        )
        self._loop = SchedulingLoop(
            config.limits,
            config.settings,
            clock,
            LoopDeps(
                waker=self._waker,
                tickets=TicketIssuer(self._mesh_clock),
                records=records,
                observer=observer,
                tracing=tracing,
                on_waiting=self._hurry_memory,
            ),
        )
        self._prefixes = PrefixWatch(self.channels, clock, self._loop.note_prefixes)
        self.placement = LocalPlacement(self._loop)
        """For dispatchers in this process."""
        self.task_ended = self._loop.task_ended
        scheduler = self._loop.scheduler
        self.memory = scheduler.memory
        """To be stored for a restart, like `records`."""
        observer.show(
            RouterState(
                queues=scheduler.queues,
                hosts=lambda: {} if self._memory is None else self._memory.hosts,
                memory_age_seconds=lambda: None if self._memory is None else self._memory.age_seconds,
                tracing=tracing,
                view_revision=lambda: self._view.revision,
                watch_lag_seconds=lambda: None if self._fleet is None else self._fleet.lost_seconds,
                fair_share=scheduler.fair_share,
                active_tenants=lambda: scheduler.active_tenants,
                quotes=scheduler.quotes.coverage,
            )
        )
        self.requests = RequestServicer(
            records.requests,
            records.clients,
            clock,
            self._loop,
            self._audit_cancellation,
            figures=records.figures,
            watches=config.watches,
        )
        self._memory: MemoryWatch | None = None
        self._carried: CarriedCalls | None = None
        self.relay = None if config.relay is None else Relay(config.relay, self._mesh_clock, self.channels)
        self._registry: grpc.aio.Channel | None = None
        self._fleet: FleetWatcher | None = None
        self._view = self._registry_view = FleetView()
        self._tasks: TaskClient | None = None
        self._task_files: FileClient | None = None
        self._expected = ExpectedMesh()
        self._listeners: list[FleetListener] = []

    def journal_to(self, tasks: TaskClient, files: FileClient, journaled: JournaledTasks) -> None:
        """Journal requests there if settings require it. Call it before the start; otherwise such requests are refused.

        `files` stores their images and recordings; `journaled` finds tasks by the ids of their requests.
        """
        self._tasks, self._task_files = tasks, files
        self.requests.look_into(journaled)

    def reconfigure(self, config: RouterConfig) -> None:
        """Apply changed client profiles and rate limits; all other settings are unchanged."""
        self.records.clients.reconfigure(config.clients, config.rate_limits)

    def expect(self, expected: ExpectedMesh) -> None:
        """Treat these models and agents as known until their runners have registered."""
        self._expected.add(expected)
        self._show_again()

    def expect_not(self, expected: ExpectedMesh) -> None:
        """Remove those of the expected models and agents that have not registered."""
        self._expected.drop(expected)
        self._show_again()

    def expect_no_more(self) -> None:
        """Remove the expected models that have not registered."""
        self._expected.clear()
        self._show_again()

    def _show_again(self) -> None:
        if self._registry_view.revision:
            self._update_view(self._registry_view)

    def subscribe(self, listener: FleetListener) -> None:
        """Call `listener` with every new view from the event loop, after the scheduler has it."""
        self._listeners.append(listener)

    def look_back_in(self, history: RequestHistory) -> None:
        """Also find requests in the database. Call it before the start."""
        self.requests.look_back_in(history)
        self.placement.look_back_in(history)

    @property
    def view(self) -> FleetView:
        """Return the newest view of the mesh; revision 0 before the registry's first snapshot."""
        return self._view

    @property
    def load(self) -> tuple[int, int]:
        """Return the numbers of waiting and running requests."""
        return self._loop.scheduler.waiting, self._loop.scheduler.running

    def health_checks(self) -> tuple[HealthCheck, ...]:
        """Returns the check of its view of the fleet, which it needs to place requests."""
        return (HealthCheck(name="fleet_view", probe=lambda: probe_fleet(self._fleet), services=self.service_names),)

    @override
    @property
    def service_names(self) -> tuple[str, ...]:
        return (
            inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
            placement_service_pb2.DESCRIPTOR.services_by_name["PlacementService"].full_name,
            request_service_pb2.DESCRIPTOR.services_by_name["RequestService"].full_name,
            CARRY.service,
        )

    @override
    def register(self, server: grpc.aio.Server) -> None:
        config, tasks = self._config, self._tasks
        journal = JournalPolicy(self, config.journal, is_possible=tasks is not None)
        layers = () if tasks is None else (durable_calls(tasks, self._clock, files=self._task_files),)
        dispatcher = Dispatcher(self.placement, self.streams, clock=self._clock, fleet=self, tracing=self.tracing)
        dispatcher.observers = self.observers
        InferenceServicer(
            LayeredDispatcher(dispatcher, *layers),
            config.default_timeout_seconds,
            config.schemas,
            journal,
            asked=lambda model, tenant: asked_name(self._view, model, tenant),
            spans=CallSpans(self._clock, self.tracing),
        ).add_to_server(server)
        forward = None if self.relay is None else self.relay.forward
        self._carried = add_placement_to_server(PlacementServicer(self.placement, journal), server, forward)
        request_service_pb2_grpc.add_RequestServiceServicer_to_server(self.requests, server)
        if self.relay is not None:
            server.add_generic_rpc_handlers((self.relay.services(),))

    async def start(self) -> None:
        """Starts the router. It places requests after the registry's first snapshot."""
        self._registry = open_channel(self._config.registry_address, self._config.security)
        if self.relay is not None:
            self.relay.start(self._registry)
        self._fleet = FleetWatcher(self._registry, self._clock, include_ticket_keys=True, service="router")
        self._fleet.subscribe(self._update_view)
        await self._fleet.start()
        self._memory = MemoryWatch(
            self._registry,
            self._clock,
            self._loop.update_memory,
            self._mesh_clock.set,
            self._note_figures,
        )
        await self._memory.start()

    def close(self) -> None:
        """Refuse waiting requests, which their dispatchers place elsewhere, and end watches. Safe to call twice."""
        self._loop.close()
        self.requests.close()

    async def stop(self, grace_seconds: float) -> None:
        """Stops the router. Waiting requests are refused, and their dispatchers place them elsewhere.

        Streams forwarded to dial-out runners continue within the grace period; others do not depend on the router.
        """
        self.close()
        await self._waker.stop()
        for each in self.ended_requests:
            await each.stop()
        await self.captures.stop()
        await self._prefixes.stop()
        if self._memory is not None:
            await self._memory.stop()
            self._memory = None
        if self._fleet is not None:
            await self._fleet.stop()
            self._fleet = None
        if self.relay is not None:
            await self.relay.stop(grace_seconds)
        if self._carried is not None:
            await self._carried.stop()
        if self._registry is not None:
            await self._registry.close(grace=None)
            self._registry = None
        await self.channels.close()

    async def _audit_cancellation(self, record: request_pb2.RequestRecord) -> None:
        """Write a cancellation to the registry's audit log; if that fails, only to the log."""
        if self._registry is None:
            return
        request = operation_service_pb2.RecordCancellationRequest(
            request_id=record.request_id, tenant=record.tenant, cancelled_by=record.cancelled_by
        )
        stub: Any = operation_service_pb2_grpc.OperationServiceStub(self._registry)
        try:
            with calling(Reason.SERVICE_UNAVAILABLE):
                await stub.RecordCancellation(request, timeout=REGISTRY_TIMEOUT_SECONDS)
        except WeftError as error:
            log.warning("cancellation not in the audit log", request_id=record.request_id, why=error.message)

    async def get_webhook(self, tenant: str) -> secret_service_pb2.GetWebhookResponse:
        """Returns the webhook of a tenant. Raises what the registry answers, and SERVICE_UNAVAILABLE."""
        if self._registry is None:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the router is not started")
        stub: Any = secret_service_pb2_grpc.SecretServiceStub(self._registry)
        request = secret_service_pb2.GetWebhookRequest(tenant=tenant)
        with calling(Reason.SERVICE_UNAVAILABLE):
            response: secret_service_pb2.GetWebhookResponse = await stub.GetWebhook(
                request, timeout=REGISTRY_TIMEOUT_SECONDS
            )
        return response

    def _hurry_memory(self) -> None:
        if self._memory is not None:
            self._memory.hurry()

    def _note_figures(self, hosts: Iterable[lease_service_pb2.HostMemory]) -> None:
        self.records.figures.note_devices(hosts)
        self.records.figures.note_speeds(self._view)

    def _update_view(self, view: FleetView) -> None:
        self._registry_view, only = view, self._config.only_runner
        view = self._expected.shown(view)
        self._view = view_of_runner(view, only) if only else view
        # The waker first, so that it has the view in which the loop decides.
        self._waker.update_view(self._view)
        self._loop.update_view(self._view)
        self._prefixes.update_view(self._view)
        for listener in self._listeners:
            listener(self._view)
