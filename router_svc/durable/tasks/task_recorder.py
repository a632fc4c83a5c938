"""Records of tasks in the router's request log, one per task over all its attempts, and their counts."""

from collections.abc import Callable

from router_svc.durable.tasks.task_records import (
    EndedTask,
    PendingTask,
    StoreEvent,
    TaskOffered,
    TaskPaused,
    TasksEnded,
)
from router_svc.request_log import RequestLog
from router_svc.request_record import RecordedTask
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import task_pb2
from weft.kernel.clock import Clock
from weft.kernel.placement_request import PlacementRequest
from weft.kernel.reasons import Reason, reason_of
from weft.kernel.request import Operation, Priority
from weft.kernel.timestamps import datetime_of

CountEnd = Callable[[PlacementRequest, Reason, receipt_pb2.Receipt], None]
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
                self._begin(_spec_of(task), task.created_at)
            case TaskPaused(task_id, retry):
                at = datetime_of(retry.next_time).timestamp() if retry.HasField("next_time") else 0.0
                self._log.pause_task(task_id, retry, max(0.0, at - self._utc_now()), self._clock.monotonic())
            case TasksEnded(tasks):
                for each in tasks:
                    self._end(each)

    def resume(self, task: task_pb2.Task, band: Priority, attempts: list[receipt_pb2.Attempt]) -> None:
        """Records an unfinished task of an earlier process with its attempts."""
        known = self._begin(_asked(task, band), datetime_of(task.create_time).timestamp())
        if known is not None and not known.attempts and known.placement is None:
            known.attempts = attempts
            known.retry = task.retry if task.HasField("retry") else None

    def _begin(self, spec: PlacementRequest, created_at: float) -> RecordedTask | None:
        age = max(0.0, self._utc_now() - created_at)
        return self._log.begin_task(spec, age, self._clock.monotonic(), self._clock.utc_now())

    def _end(self, ended: EndedTask) -> None:
        task, receipt = ended.task, ended.receipt
        known = self._begin(_asked(task, ended.band), datetime_of(task.create_time).timestamp())
        reason = reason_of(receipt.reason) if receipt.reason else Reason.UNSPECIFIED
        self._count(_asked(task, ended.band) if known is None else known.spec, reason, receipt)
        if known is not None:
            self._log.end_task(known, receipt, task.error.message, self._clock.monotonic())


def _spec_of(task: PendingTask) -> PlacementRequest:
    lane = task.lane
    return _request(task.id, lane.tenant, lane.model, lane.band)


def _asked(task: task_pb2.Task, band: Priority) -> PlacementRequest:
    return _request(task.id, task.tenant, task.model, band)


def _request(task_id: str, tenant: str, model: str, band: Priority) -> PlacementRequest:
    """Returns what is known of a task that was not placed; its first placement says more."""
    return PlacementRequest(
        request_id=task_id, tenant=tenant, model=model, operation=Operation.CHAT, priority=band, task_id=task_id
    )
