"""The ASGI application of a gateway: its endpoints, with the request middleware around them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from gateway.admin.keys import KeysDeps
from gateway.admin.ports import AdminPorts, KeysPort
from gateway.admin.request import AdminDeps
from gateway.auth.authentication import Gate, KeyGate, KeyRingSource, OpenGate
from gateway.auth.rate_limits import TenantRateLimits
from gateway.batches.deps import batch_deps, file_deps
from gateway.batches.finishing import FinishingJobs
from gateway.config import GatewayConfig, MediaConfig
from gateway.deps import GatewayDeps, InferenceDeps
from gateway.endpoints import (
    ACCESS_RULES,
    ADMIN,
    ANTHROPIC,
    BATCHES,
    DOCUMENT,
    FILES,
    GATEWAY_GROUPS,
    HEALTH,
    KEYS,
    OPENAI,
    REQUESTS,
    RESOURCES,
    RESPONSES,
    SETTINGS,
    TASKS,
    published_schemas,
)
from gateway.http.event_watches import EventWatches
from gateway.media import MediaSource, NoMediaSource
from gateway.metrics import GatewayMetrics
from gateway.middleware import EdgeMiddleware
from gateway.ports import RegistryPort, RequestDispatcher
from gateway.responses.create import responses_deps
from gateway.routing import EndpointApp, EndpointGroup
from gateway.tasks.dispatcher import BoundedTasks, DurableDispatcher
from gateway.tasks.handlers import TaskDeps
from gateway.tasks.task_apis import task_apis_of
from weft.dispatch.fleet import FleetSource
from weft.dispatch.remote_router import RequestSource, RouterSource
from weft.durable.batches import BatchPort, FilePort
from weft.durable.responses import ResponseStore
from weft.durable.tasks import TaskPort
from weft.kernel.clock import Clock, SystemClock


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPorts:
    """Services and stores that one gateway calls."""

    dispatcher: RequestDispatcher
    fleet: FleetSource
    registry: RegistryPort
    admin: AdminPorts | None = None
    """None: there are no admin endpoints."""
    keys: KeyRingSource | None = None
    """The valid API keys; None: callers need none."""
    api_keys: KeysPort | None = None
    """Creates and revokes keys; None, or where callers need no keys: no endpoints for it."""
    responses: ResponseStore | None = None
    """Stores responses; None: they are not stored."""
    tasks: TaskPort | None = None
    """Runs durable tasks; None: there are none."""
    files: FilePort | None = None
    """Stores files; None: there are neither files nor batches."""
    batches: BatchPort | None = None
    """Stores batches; None: there are none."""
    requests: RequestSource | None = None
    """Request records; None: there are none."""
    router: RouterSource | None = None
    """Whether a router is reachable; None: it runs in this process."""
    media: MediaSource | None = None
    """Fetches media by address; None: as the configuration allows."""


def create_app(
    config: GatewayConfig,
    ports: GatewayPorts,
    *,
    watches: EventWatches | None = None,
    finishing: FinishingJobs | None = None,
    metrics: GatewayMetrics | None = None,
    clock: Clock | None = None,
) -> EndpointApp:
    """Returns the application of one gateway. Its only state is its metrics."""
    ticking = clock or SystemClock()
    tasks = None if ports.tasks is None else BoundedTasks(ports.tasks, timeout_seconds=config.task_timeout_seconds)
    deps = GatewayDeps(
        config=config,
        dispatcher=ports.dispatcher if tasks is None else DurableDispatcher(ports.dispatcher, tasks, ticking),
        can_be_durable=tasks is not None,
        fleet=ports.fleet,
        registry=ports.registry,
        router=ports.router,
        watches=watches or EventWatches(config.max_event_watches),
        metrics=metrics or GatewayMetrics(),
        clock=ticking,
        media=ports.media or media_source(config.media, ticking),
        gate=gate_of(ports.keys, ticking),
        rate_limits=None if config.rate_limits is None else TenantRateLimits(config.rate_limits, ticking),
    )
    app = bare_app("weft gateway", deps, GATEWAY_GROUPS)
    for group in (OPENAI, ANTHROPIC):
        app.add_group(group, deps)
    app.add_group(RESPONSES, responses_deps(deps, ports.responses, tasks))
    for own in (RESOURCES, SETTINGS, HEALTH):
        app.add_group(own, deps)
    _add_management(app, deps, ports)
    if tasks is not None:
        app.add_group(TASKS, TaskDeps(gateway=deps, tasks=tasks, task_apis=task_apis_of(deps)))
    _add_files_and_batches(app, deps, ports, finishing or FinishingJobs(config.batches.max_finishing))
    app.add_group(DOCUMENT, app)
    return app


def bare_app(title: str, deps: InferenceDeps, groups: Sequence[EndpointGroup[Any]] = ()) -> EndpointApp:
    """Returns an application without endpoints, inside the middleware; `groups` are those of its OpenAPI document."""
    layer = partial(EdgeMiddleware, config=deps.config, metrics=deps.metrics, clock=deps.clock, gate=deps.gate)
    return EndpointApp(layer, title=title, version=version("weft"), schemas=published_schemas(groups))


def gate_of(keys: KeyRingSource | None, clock: Clock) -> Gate:
    """Returns a gate that admits requests with a valid key; every request where `keys` is None."""
    return OpenGate() if keys is None else KeyGate(keys, ACCESS_RULES, clock)


def _add_management(app: EndpointApp, deps: GatewayDeps, ports: GatewayPorts) -> None:
    if ports.admin is not None:
        app.add_group(ADMIN, AdminDeps(gateway=deps, ports=ports.admin))
    if ports.keys is not None and ports.api_keys is not None:
        app.add_group(KEYS, KeysDeps(gateway=deps, keys=ports.api_keys))
    if ports.requests is not None:
        app.add_group(REQUESTS, ports.requests)


def _add_files_and_batches(app: EndpointApp, deps: GatewayDeps, ports: GatewayPorts, finishing: FinishingJobs) -> None:
    if ports.files is None:
        return
    app.add_group(FILES, file_deps(deps, ports.files))
    if ports.batches is not None:
        app.add_group(BATCHES, batch_deps(deps, ports.files, ports.batches, task_apis_of(deps), finishing))


def media_source(config: MediaConfig, clock: Clock) -> MediaSource:
    """Returns a fetcher where the operator allows any host; else one that refuses."""
    if not config.allowed_hosts:
        return NoMediaSource()
    # Its HTTP client takes time and memory at every start.
    from gateway.media.fetcher import MediaFetcher  # noqa: PLC0415

    return MediaFetcher(config, clock=clock)
