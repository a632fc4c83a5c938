"""Records of tasks in the router's request log, one per task over all its attempts, and their counts."""

from collections.abc import Callable

from router_svc.durable.tasks.task_records import EndedTask, StoreEvent, TaskOffered, TaskPaused, TasksEnded
from router_svc.request_log import RequestLog
from router_svc.request_record import RecordedTask
from weft.api.common.v1 import receipt_pb2
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation, Priority
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import optional_datetime

CountEnd = Callable[[PlacementRequest, receipt_pb2.Receipt], None]
"""Counts the end of a task; see `SchedulingLoop.task_ended`."""


class TaskRecorder:
    """A listener to the events of tasks. Call it from the router's event loop."""

    def __init__(self, log: RequestLog, count: CountEnd, clock: Clock, utc_now: Callable[[], float]) -> None:
        """`utc_now`: the clock of stored tasks."""
        self._log = log
        self._count = count
        self._clock = clock
        self._utc_now = utc_now

    def __call__(self, event: StoreEvent) -> None:
        """Records an event."""
        match event:
            case TaskOffered(task):
                lane = task.lane
                self._begin(_spec_of(task.id, lane.tenant, lane.model, lane.band), task.created_at)
            case TaskPaused(task_id, retry):
                at = optional_datetime(retry, "next_time")
                pause = 0.0 if at is None else max(0.0, at.timestamp() - self._utc_now())
                self._log.pause_task(task_id, retry, pause, self._clock.monotonic())
            case TasksEnded(tasks):
                for each in tasks:
                    self._end(each)

    def resume(self, tried: EndedTask) -> None:
        """Records an unfinished task of an earlier process with its attempts."""
        _, known = self._begin_stored(tried)
        if known is not None and not known.attempts and known.placement is None:
            known.attempts = list(tried.receipt.attempts)
            known.retry = tried.task.retry if tried.task.HasField("retry") else None

    def _end(self, ended: EndedTask) -> None:
        spec, known = self._begin_stored(ended)
        self._count(spec if known is None else known.spec, ended.receipt)
        if known is not None:
            self._log.end_task(known, ended.receipt, ended.task.error.message, self._clock.monotonic())

    def _begin_stored(self, stored: EndedTask) -> tuple[PlacementRequest, RecordedTask | None]:
        task = stored.task
        spec = _spec_of(task.id, task.tenant, task.model, stored.band)
        return spec, self._begin(spec, task.create_time.ToNanoseconds() / 1e9)

    def _begin(self, spec: PlacementRequest, created_at: float) -> RecordedTask | None:
        age = max(0.0, self._utc_now() - created_at)
        return self._log.begin_task(spec, age, self._clock.monotonic(), self._clock.utc_now())


def _spec_of(task_id: str, tenant: str, model: str, band: Priority) -> PlacementRequest:
    """Returns what is known of a task that was not placed; its first placement says more."""
    return PlacementRequest(
        request_id=task_id, tenant=tenant, model=model, operation=Operation.CHAT, priority=band, task_id=task_id
    )
