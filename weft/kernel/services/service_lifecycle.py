"""The life cycle of services, their health, and background tasks."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from weft.kernel.services.health import HealthSource
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.cancellation import task_is_cancelled
from weft.kernel.time.clock import Clock

log = get_logger("weft.service")

CRITICAL_TASK = "weft_critical_task"
"""Key in the event loop's exception context with the name of a critical task that died."""
FIRST_RESTART_PAUSE_SECONDS = 1.0
MAX_RESTART_PAUSE_SECONDS = 60.0
STEADY_AFTER_SECONDS = 300.0
"""After running this long, a task that dies is restarted after the first pause again."""


class Service(Protocol):
    """A component that starts and stops; built by `weft_app.compose`. By default it has no gRPC services."""

    @property
    def service_names(self) -> Sequence[str]:
        """Full names of its gRPC services, for health and reflection."""
        return ()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds its servicers. Called once, before the server starts."""
        del server

    async def start(self) -> None:
        """Starts the service. Returns once it can be used."""
        ...

    async def stop(self, grace_seconds: float) -> None:
        """Stops, after work in progress has had `grace_seconds`. Safe to call twice, or when never started."""
        ...


class BackgroundLoop(ABC):
    """A component that is one critical loop. Life cycle: start, stop."""

    loop_name: str
    """The name of its task."""
    _task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the loop. Returns immediately."""
        self._task = start_critical(self._run(), name=self.loop_name)

    async def stop(self, grace_seconds: float = 0.0) -> None:  # noqa: ARG002 - as `Service.stop`
        """Stops the loop. Safe to call twice, or when never started."""
        task, self._task = self._task, None
        if task is not None:
            await stop_tasks([task])

    @abstractmethod
    async def _run(self) -> None:
        """Runs until it is cancelled."""


LIVENESS = ("", "liveness")
"""Service names that mean the liveness of the process."""


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """grpc.health.v1 for one server: liveness for `LIVENESS`, and whether a service works for its name.

    Each message reports the state when it is sent, not that of the last change.
    """

    def __init__(self) -> None:
        self._answers: dict[str, Callable[[], bool]] = dict.fromkeys(LIVENESS, lambda: True)
        """Functions that return whether a service serves, by its name."""
        self._changed = asyncio.Event()
        """Set at the next change, then replaced."""

    def register_check(self, server: grpc.aio.Server) -> None:
        """Adds only the Check rpc, for servers that accept unauthenticated callers."""
        check = grpc.unary_unary_rpc_method_handler(
            self.Check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        service = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Check": check}),))

    def register(self, server: grpc.aio.Server, service_names: Iterable[str]) -> None:
        """Adds health and reflection for `service_names` to the server."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)
        reflection.enable_server_reflection(
            (*service_names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME),
            server,
        )

    def set_serving(self, service_names: Iterable[str], *, serving: bool) -> None:
        """Reports the named services and readiness as serving or not; liveness is unchanged."""
        self._answers.update(dict.fromkeys((*service_names, "readiness"), lambda: serving))
        self.tell()

    def follow(self, service_names: Iterable[str], source: HealthSource) -> None:
        """Reports the named services, readiness and liveness from `source` from now on. Call `tell` when it changes."""
        self._answers.update({name: partial(_serves, source, name) for name in service_names})
        self._answers["readiness"] = lambda: source.report.is_ready
        self._answers.update(dict.fromkeys(LIVENESS, lambda: source.report.is_live))
        self.tell()

    def tell(self) -> None:
        """Notifies watchers of changes."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(  # noqa: N802 - the name of the rpc
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """See grpc.health.v1."""
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802 - the name of the rpc
        self,
        request: health_pb2.HealthCheckRequest,
        context: Any,  # noqa: ARG002
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse]:
        """See grpc.health.v1."""
        last = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            else:
                await changed.wait()

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        answer = self._answers.get(service)
        if answer is None:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        return health_pb2.HealthCheckResponse.SERVING if answer() else health_pb2.HealthCheckResponse.NOT_SERVING


def _serves(source: HealthSource, service: str) -> bool:
    return source.report.serves(service)


def start_task(work: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
    """Starts a background task that ends eventually. Logs its failure, which affects nothing else.

    Use `start_critical` or `start_restarting` for loops that run as long as the process.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_unforeseen_end)
    return task


def start_critical(work: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
    """Starts a loop that the process depends on: an unexpected end is logged and ends the process.

    The event loop's exception handler (`weft_app.compose.shutdown`) gets the task's name under CRITICAL_TASK.
    """
    task = start_task(work, name=name)
    task.add_done_callback(_report_death)
    return task


def start_restarting(
    make_work: Callable[[], Coroutine[None, None, None]], *, name: str, clock: Clock
) -> asyncio.Task[None]:
    """Starts a stateless loop that is logged and restarted after an unexpected end.

    The pause before a restart doubles from FIRST_RESTART_PAUSE_SECONDS to MAX_RESTART_PAUSE_SECONDS.
    """
    return start_critical(_restarted(make_work, name, clock), name=name)


async def _restarted(make_work: Callable[[], Coroutine[None, None, None]], name: str, clock: Clock) -> None:
    pause = FIRST_RESTART_PAUSE_SECONDS
    while True:
        began = clock.monotonic()
        try:
            await make_work()
        except (Exception, asyncio.CancelledError):
            if task_is_cancelled():
                raise
            if clock.monotonic() - began >= STEADY_AFTER_SECONDS:
                pause = FIRST_RESTART_PAUSE_SECONDS
            log.exception("background task died and is restarted", task=name, pause_seconds=pause)
        else:
            return
        await clock.sleep(pause)
        pause = min(2 * pause, MAX_RESTART_PAUSE_SECONDS)


def _log_unforeseen_end(task: asyncio.Task[Any]) -> None:
    if (error := _unforeseen_end(task)) is not None:
        log.critical("background task died", task=task.get_name(), exc_info=error)


def _report_death(task: asyncio.Task[Any]) -> None:
    if (error := _unforeseen_end(task)) is not None:
        name = task.get_name()
        context = {"message": f"background task {name} died", "exception": error, "task": task, CRITICAL_TASK: name}
        task.get_loop().call_exception_handler(context)


def _unforeseen_end(task: asyncio.Task[Any]) -> BaseException | None:
    """Returns the error that ended a task; None if it returned or was cancelled.

    A task that ended because a call it awaited was cancelled, for example with its channel, has failed too.
    """
    if not task.cancelled():
        return task.exception()
    return None if task.cancelling() else RuntimeError("a call that it waited for was cancelled")


async def stop_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels background tasks and waits until each has ended. Raises their errors."""
    pending = list(tasks)
    for task in pending:
        task.cancel()
    for task in pending:
        with suppress(asyncio.CancelledError):
            await task
