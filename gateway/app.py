"""The ASGI application of a gateway, with the middleware for request ids, authentication and errors."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admin.admin_endpoints import ADMIN, CAPTURES, JOIN_TOKENS, KEYS, REQUESTS, SECRETS, USAGE
from gateway.admin.admin_operations import AdminPorts
from gateway.auth.authentication import Gate
from gateway.auth.rate_limits import TenantRateLimits
from gateway.batches.finishing import BatchFinisher
from gateway.deps import GatewayDeps, InferenceDeps
from gateway.endpoints import DEFERRED_APIS, DOCUMENT, WATCH, WORKBENCH, core_routers, kinds_with
from gateway.errors import (
    ClientGoneError,
    Dialect,
    cancellation,
    dialect_of,
    envelope,
    error_headers,
    http_status,
    internal_error,
)
from gateway.gateway_config import GatewayConfig, MediaConfig
from gateway.gateway_health import HEALTH, METRICS, PROBES
from gateway.gateway_metrics import GatewayMetrics
from gateway.http.cors import CrossOrigin, embedding_headers
from gateway.http.event_watches import EventWatches
from gateway.http_api import HttpApi
from gateway.intake.concurrency_limit import ConcurrencyLimit
from gateway.intake.headers import request_id_of, validate_head
from gateway.media import MediaSource, NoMediaSource
from gateway.openai.openai_endpoints import OPENAI, QUOTES
from gateway.openapi import shown_path
from gateway.ports import GatewayPorts
from gateway.request_facts import FACTS_KEY, RequestFacts, headers_of
from gateway.resources.resource_endpoints import SETTINGS, resource_router
from gateway.result_links import ResultLinks
from gateway.routing import ApiRouter, DeferredApi, EdgeApp
from gateway.running_responses import RunningResponses
from gateway.sealed_texts import SealedTexts
from gateway.server_tools.request_tools import ServerTools
from gateway.tasks.task_apis import TaskApis, task_apis_of
from gateway.tasks.task_endpoints import TASKS
from gateway.visible_names import with_visible_names
from gateway.watch.sources import tasks_of_tenant
from gateway.workbench.page_files import PageFiles
from gateway.workbench.pdf_text import MAX_CONCURRENT as MAX_PDFS
from weft.dispatch.call import LayeredDispatcher
from weft.dispatch.fleet import FleetSource
from weft.dispatch.quoter import Quoter
from weft.durable.durable_call import durable_calls
from weft.durable.journal_policy import JournalPolicy
from weft.durable.requests import RequestClient
from weft.durable.tasks import TaskClient
from weft.durable.usage import UsageClient
from weft.extension import ApiHook, load_hook
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.tracing import Attribute, AttributeValue, ServiceName, Span, SpanKind, Tracing, error_type
from weft.kernel.time.clock import Clock, SystemClock


def gateway_deps(
    config: GatewayConfig,
    ports: GatewayPorts,
    *,
    watches: EventWatches | None = None,
    metrics: GatewayMetrics | None = None,
    clock: Clock | None = None,
    earlier: GatewayDeps | None = None,
) -> GatewayDeps:
    """Returns the collaborators of one gateway; `earlier`: those of its former configuration.

    Counts of tenants and connections to media hosts are kept if their settings are unchanged, running responses always.
    """
    ticking = clock or SystemClock()
    tasks = ports.tasks
    layers = () if tasks is None else (durable_calls(tasks, ticking, files=ports.files),)
    rate_limits = None if config.rate_limits is None else TenantRateLimits(config.rate_limits, ticking)
    if earlier is not None and earlier.config.rate_limits == config.rate_limits:
        rate_limits = earlier.rate_limits
    is_same_media = earlier is not None and earlier.config.media == config.media
    return GatewayDeps(
        config=config,
        dispatcher=LayeredDispatcher(ports.dispatcher, *layers),
        prompt_counts=ports.prompt_counts,
        can_be_durable=tasks is not None,
        files=ports.files,
        links=_links(config, ports, ticking),
        summaries=None if ports.result_key is None else SealedTexts(ports.result_key, "summary"),
        journal_policy=ports.journal or JournalPolicy(ports.fleet, is_possible=tasks is not None),
        fleet=ports.fleet,
        registry=ports.registry,
        running=RunningResponses(config.max_running_responses) if earlier is None else earlier.running,
        router=ports.router,
        watches=watches or EventWatches(config.max_event_watches),
        metrics=metrics or GatewayMetrics(),
        clock=ticking,
        media=earlier.media
        if earlier is not None and is_same_media
        else ports.media or media_source(config.media, ticking),
        gate=Gate(ports.keys, ticking, is_behind_proxy=config.is_behind_proxy),
        rate_limits=rate_limits,
        tracing=ports.tracing,
        health=ports.health,
        server_tools=_server_tools(config, ports),
    )


def _server_tools(config: GatewayConfig, ports: GatewayPorts) -> ServerTools | None:
    hooks = [hook for extension in ports.extensions for hook in extension.server_tools]
    if not hooks:
        return None
    return ServerTools(
        hooks, config, ports.fleet, rules=ports.remote_rules, key=ports.result_key, calls=ports.tool_calls
    )


def _links(config: GatewayConfig, ports: GatewayPorts, clock: Clock) -> ResultLinks | None:
    if ports.files is None or ports.result_key is None:
        return None
    results = config.results
    return ResultLinks(
        ports.result_key,
        clock,
        link_seconds=results.link_seconds,
        public_url=results.public_url,
        public_scheme=config.public_scheme,
    )


def finisher_over(deps: GatewayDeps, ports: GatewayPorts) -> BatchFinisher | None:
    """Returns the writer of batch results; None: there is no batch store."""
    if ports.files is None or ports.batches is None:
        return None
    return BatchFinisher(ports.files, ports.batches, task_apis_of(deps, ports.extensions), deps)


def app_over(deps: GatewayDeps, ports: GatewayPorts) -> EdgeApp:
    """Returns the application over these collaborators."""
    tasks, task_apis = ports.tasks, task_apis_of(deps, ports.extensions)
    app = bare_app("weft gateway", deps, core_routers(ports.extensions))
    given: dict[type, object] = {InferenceDeps: deps, GatewayDeps: deps}
    app.serve(OPENAI, given)
    for router in (resource_router(kinds_with(ports.extensions)), SETTINGS, HEALTH, PROBES, METRICS):
        app.serve(router, given)
    of_tasks = () if tasks is None else (tasks_of_tenant(tasks, task_apis),)
    app.serve(WATCH, {"watch sources": {source.kind: source for source in (*ports.watched, *of_tasks)}})
    _serve_management(app, ports)
    if tasks is not None:
        app.serve(TASKS, {TaskClient: tasks, TaskApis: task_apis})
    pdf_texts = ConcurrencyLimit(MAX_PDFS, "PDFs are being read already")
    pages = PageFiles(pages=[page for extension in ports.extensions for page in extension.pages])
    app.serve(WORKBENCH, {PageFiles: pages, "pdf_texts": pdf_texts, "join commands": ports.join_command})
    app.serve(DOCUMENT)
    app.off_paths = ports.off_paths
    for hook in (*DEFERRED_APIS, *(hook for extension in ports.extensions for hook in extension.apis)):
        app.defer(DeferredApi(name=hook.place, paths=hook.paths, load=partial(_loaded, hook, deps, ports)))
    return app


def _loaded(hook: ApiHook, deps: GatewayDeps, ports: GatewayPorts) -> Callable[[EdgeApp], None]:
    return partial(load_hook(hook.place, HttpApi).serve, deps=deps, ports=ports)


def bare_app(title: str, deps: InferenceDeps, routers: Sequence[ApiRouter] = ()) -> EdgeApp:
    """Returns an application with middleware and without endpoints; `routers` are those of its OpenAPI document."""
    edge = partial(
        EdgeMiddleware,
        config=deps.config,
        metrics=deps.metrics,
        clock=deps.clock,
        fleet=deps.fleet,
        spans=ServerSpans(deps.tracing, deps.clock, deps.service),
    )
    return EdgeApp(title, version("weft"), gate=deps.gate, config=deps.config, edge=edge, routers=routers)


def _serve_management(app: EdgeApp, ports: GatewayPorts) -> None:
    """Serves the routes whose collaborators exist."""
    routes: tuple[tuple[ApiRouter, dict[Any, object]], ...] = (
        (ADMIN, {AdminPorts: ports.admin}),
        (KEYS, {"keys": ports.api_keys}),
        (JOIN_TOKENS, {"join tokens": ports.join_tokens, "join commands": ports.join_command}),
        (SECRETS, {"secrets": ports.secrets}),
        (CAPTURES, {"captures": ports.captures}),
        (REQUESTS, {RequestClient: ports.requests}),
        (USAGE, {UsageClient: ports.usage}),
        (QUOTES, {Quoter: ports.quotes}),
    )
    for router, given in routes:
        if None not in given.values():
            app.serve(router, given)


def media_source(config: MediaConfig, clock: Clock) -> MediaSource:
    """Returns a fetcher if the operator allows any host, otherwise a source that refuses."""
    if not config.allowed_hosts:
        return NoMediaSource()
    # Importing its HTTP client takes time and memory.
    from gateway.media.fetcher import MediaFetcher  # noqa: PLC0415

    return MediaFetcher(config, clock=clock)


TASK_HEADER = b"x-weft-task-id"

log = get_logger("weft.gateway")


TRACEPARENT = b"traceparent"
_FIRST_SERVER_ERROR = 500
_PROBES = frozenset({"health", "metrics"})


class ServerSpans:
    """Begins the trace of each HTTP request, and records its span if the trace is recorded."""

    def __init__(self, tracing: Tracing, clock: Clock, service: ServiceName = ServiceName.GATEWAY) -> None:
        """`service`: the service that answers."""
        self._service = service
        self._tracing = tracing
        self._clock = clock

    def begin(self, scope: Scope, facts: RequestFacts) -> None:
        """Gives a request its place in a trace: below the caller's span, if the caller sends one."""
        sampling = self._tracing.sampling
        if sampling is not None:
            header = headers_of(scope).get(TRACEPARENT)
            facts.trace, facts.caller_span = sampling.begin(None if header is None else header.decode("latin-1"))

    def end(self, scope: Scope, facts: RequestFacts, ended: float) -> None:
        """Records the span of a request that ended at `ended`, in seconds on the clock of `facts.arrived`."""
        context, seconds = facts.trace, ended - facts.arrived
        if context is None or not self._tracing.records(context, has_failed=_has_failed(facts), seconds=seconds):
            return
        found: dict[str, AttributeValue] = {
            Attribute.HTTP_METHOD: scope["method"],
            Attribute.PATH: scope["path"],
            Attribute.SCHEME: scope.get("scheme", "http"),
            Attribute.HTTP_STATUS: facts.status,
            Attribute.REQUEST_ID: facts.request_id,
            Attribute.CALLER: facts.principal.name,
        }
        route = shown_path(scope["route"].path) if "route" in scope else ""
        if route:
            found[Attribute.HTTP_ROUTE] = route
        if facts.task_id:
            found[Attribute.TASK_ID] = facts.task_id
        now = self._clock.utc_now().timestamp() - (self._clock.monotonic() - ended)
        span = Span(
            name=f"{scope['method']} {route}".rstrip(),
            service=self._service,
            context=context,
            parent_id=None if facts.caller_span is None else facts.caller_span.span_id,
            start=int((now - seconds) * 1e9),
            end=int(now * 1e9),
            kind=SpanKind.SERVER,
            attributes=found,
            error="" if facts.error is None else error_type(facts.error.reason),
        )
        self._tracing.record([span])


def _has_failed(facts: RequestFacts) -> bool:
    """Whether a request is recorded for its failure: not after a disconnect, for a refused stranger, or for a probe."""
    if facts.error is None or facts.surface in _PROBES or isinstance(facts.error, ClientGoneError):
        return False
    return facts.was_dispatched or facts.status >= _FIRST_SERVER_ERROR


class EdgeMiddleware:
    """Wraps the application. Answers its errors, unless the status has been sent."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        clock: Clock,
        fleet: FleetSource,
        spans: ServerSpans,
    ) -> None:
        self._app = app
        self._spans = spans
        self._fleet = fleet
        self._cors = CrossOrigin(config)
        self._config = config
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        headers = headers_of(scope)
        dialect = dialect_of(scope["path"], headers)
        facts = RequestFacts(request_id_of(headers), self._clock.monotonic(), dialect=dialect)
        scope[FACTS_KEY] = facts
        self._spans.begin(scope, facts)
        sender = _IdentifyingSender(self._cors.sender(headers, send), facts, embedding_headers(scope))
        try:
            validate_head(scope, self._config)
            app = self._cors.preflight(scope) or self._app
            await app(scope, receive, sender)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - each becomes an answer
            await self._fail(error, sender, facts)
        finally:
            ended = self._clock.monotonic()
            self._metrics.request_ended(facts, ended - facts.arrived)
            self._spans.end(scope, facts, ended)
            _drop_traceback(facts.error)

    async def _fail(self, error: BaseException, sender: "_IdentifyingSender", facts: RequestFacts) -> None:
        match error:
            case ClientGoneError():
                facts.error, facts.status = error, http_status(error)
            case WeftError():
                await self._answer(error, sender, facts)
            case asyncio.CancelledError():
                await self._answer(cancellation(), sender, facts)
            case _:
                log.error("request failed unexpectedly", exc_info=error, request_id=facts.request_id)
                await self._answer(internal_error(), sender, facts)

    async def _answer(self, error: WeftError, sender: "_IdentifyingSender", facts: RequestFacts) -> None:
        error = with_visible_names(error, self._fleet.view, facts.principal)
        facts.error = error
        if not facts.was_dispatched:
            log.info(
                "refused", request_id=facts.request_id, reason=error.reason.name.lower(), message=error.log_message
            )
        if facts.status:
            # The response has begun and cannot be replaced: raising aborts the connection.
            raise error
        body = envelope(error, facts.request_id, facts.dialect)
        headers = error_headers(error, body, facts.dialect)
        await sender({"type": "http.response.start", "status": http_status(error), "headers": headers})
        await sender({"type": "http.response.body", "body": body})


def _drop_traceback(error: WeftError | None) -> None:
    """Drops an error's traceback: its frames hold the body, and the request's facts hold the error.

    Measured: the 10 MB of a refused body otherwise stay until the next full collection, which may be hours away.
    """
    if error is not None:
        error.__traceback__ = error.__cause__ = error.__context__ = None


class _IdentifyingSender:
    """Adds the ids of request and task, and `more` headers, to the response and records the status."""

    __slots__ = ("_facts", "_more", "_send")

    def __init__(self, send: Send, facts: RequestFacts, more: Sequence[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._facts = facts
        self._more = more

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self._facts.status = message["status"]
            request_id = self._facts.request_id.encode("ascii")
            message["headers"] = [*message["headers"], *self._more, (b"x-request-id", request_id)]
            if self._facts.task_id:
                message["headers"].append((TASK_HEADER, self._facts.task_id.encode("ascii")))
            if self._facts.dialect is Dialect.ANTHROPIC:
                message["headers"].append((b"request-id", request_id))
        return self._send(message)
