"""Requests that have ended, for the observers of extensions: each with its answer, in the background."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

from typing_extensions import override

from weft.api.common.v1 import chat_pb2, completion_pb2, event_pb2, receipt_pb2
from weft.api.router.v1 import task_pb2
from weft.dispatch.fleet import FleetView
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.request_receipt import RequestContext
from weft.dispatch.run_observer import ObservedRun, RunObserver
from weft.durable.tasks import TaskClient
from weft.extension import Extension, load_hook
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock

log = get_logger("weft.observers")

MAX_KEPT_BYTES = 1_048_576
"""Maximum bytes of the payload and the answer of an observed request; larger ones are skipped."""
MAX_WAITING = 16
"""Maximum ended requests that wait for one observer, at most 16 MiB. Further ones are dropped."""
STOP_SECONDS = 1.0
_NOT_KEPT = frozenset({"queued", "loading", "progress", "work_progress"})


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request with a text answer, as far as that was sent."""

    context: RequestContext
    payload: GenerationPayload
    answer: task_pb2.TaskOutput
    """Its events without those about waiting."""
    receipt: receipt_pb2.Receipt


class RequestObserver(Protocol):
    """What the hook `observers` of an extension adds. It can neither delay nor fail a request."""

    def wants(self, view: FleetView, context: RequestContext, payload: GenerationPayload) -> bool:
        """Whether it wants a request with a text answer, which is about to run. Returns immediately."""
        ...

    async def ended(self, request: EndedRequest) -> None:
        """Takes an ended request, one after the other. It runs on the event loop of requests, so it must not block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverParts:
    """What an observer may use."""

    tasks: Callable[[], TaskClient | None]
    """Returns the task store; None: there is none now."""
    view: Callable[[], FleetView]
    """Returns the newest view of the mesh."""
    clock: Clock


class _FollowedRequest(ObservedRun):
    """A request that runs, with its answer so far."""

    stores_text = False

    def __init__(
        self, context: RequestContext, payload: GenerationPayload, take: Callable[[EndedRequest], None]
    ) -> None:
        self._context = context
        self._payload = payload
        self._answer = task_pb2.TaskOutput()
        self._bytes_left = MAX_KEPT_BYTES
        self._take = take

    @override
    def add(self, frame: Frame) -> None:
        kept = [event for event in frame if event.WhichOneof("event") not in _NOT_KEPT]
        self._bytes_left -= sum(map(event_pb2.InferenceEvent.ByteSize, kept))
        if self._bytes_left >= 0:
            self._answer.events.extend(kept)

    @override
    def end(self, receipt: receipt_pb2.Receipt) -> None:
        # The payload of a task gets its images after the start of its run.
        if self._payload.ByteSize() <= self._bytes_left:
            self._take(EndedRequest(self._context, self._payload, self._answer, receipt))


class EndedRequests(RunObserver):
    """Follows the requests that one observer wants, and passes them on in the background once they have ended."""

    def __init__(self, name: str, observer: RequestObserver) -> None:
        """`name`: that of the extension, for the log."""
        self.name = name
        self._observer = observer
        self._is_broken = False
        self._turn = asyncio.Lock()
        self._waiting: set[asyncio.Task[None]] = set()

    @override
    def observe(self, view: FleetView, context: RequestContext, payload: Any) -> ObservedRun | None:
        if self._is_broken or not isinstance(payload, (chat_pb2.ChatPayload, completion_pb2.CompletionPayload)):
            return None
        try:
            is_wanted = self._observer.wants(view, context, payload)
        except Exception:
            self._is_broken = True
            log.exception("observer failed, and is asked for nothing until a restart", observer=self.name)
            return None
        return _FollowedRequest(context, payload, self._take) if is_wanted else None

    async def stop(self) -> None:
        """Waits a moment for what the observer is about to take, and drops the rest. Safe to call twice."""
        if self._waiting:
            await asyncio.wait(self._waiting, timeout=STOP_SECONDS)
            await stop_tasks(list(self._waiting))

    def _take(self, request: EndedRequest) -> None:
        if len(self._waiting) >= MAX_WAITING:
            log.warning("ended request dropped", observer=self.name, why=f"{MAX_WAITING} wait for the observer")
            return
        task = start_task(self._pass_on(request), name=f"observer {self.name}")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _pass_on(self, request: EndedRequest) -> None:
        async with self._turn:
            try:
                await self._observer.ended(request)
            except Exception:
                log.exception("ended request dropped by the fault of its observer", observer=self.name)


def ended_requests(extensions: Iterable[Extension], parts: ObserverParts) -> tuple[EndedRequests, ...]:
    """Returns the observers of extensions. Imports them; one that fails is logged, and left out."""
    return tuple(_observers(extensions, parts))


def _observers(extensions: Iterable[Extension], parts: ObserverParts) -> Iterator[EndedRequests]:
    for each in extensions:
        for hook in each.observers:
            try:
                observer: RequestObserver = load_hook(hook.place, FunctionType)(parts)
            except Exception:
                log.exception("observer cannot be used", observer=each.name)
            else:
                yield EndedRequests(each.name, observer)
