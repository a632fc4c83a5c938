"""Watching a task: only what is on disk, from an event on, until its end."""

from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager

from router_svc.tasks.answers import TaskAnswers
from router_svc.tasks.config import MEBIBYTE, TaskLimits
from router_svc.tasks.signals import TaskSignals
from router_svc.tasks.store_port import TaskStore
from router_svc.tasks.waiting import wait_for_news
from weft.durable.tasks import Task, TaskChunk, TaskEvent, attempt_of, index_of, task_not_found
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_READ_BYTES = MEBIBYTE
"""Of pieces that are read at once."""


class TaskWatcher:
    """Watches tasks for callers."""

    def __init__(
        self, answers: TaskAnswers, store: TaskStore, signals: TaskSignals, clock: Clock, limits: TaskLimits
    ) -> None:
        self._answers = answers
        self._store = store
        self._signals = signals
        self._clock = clock
        self._limits = limits
        self._watches = 0

    async def watch(self, tenant: str, task_id: str, after_event: int) -> AsyncGenerator[TaskEvent]:
        """See TaskPort.watch."""
        with self._counted(), self._signals.watching(task_id) as news:
            told: Task | None = None
            last = after_event
            while True:
                # Cleared first: what is told while it is read is looked at again.
                news.clear()
                task = await self._answers.get(tenant, task_id)
                if told is None or (_has_moved(told, task) and not task.state.is_terminal):
                    yield task
                told = task
                async for piece in self._pieces(task, last):
                    last = piece.last_event
                    yield piece
                if task.state.is_terminal:
                    if attempt_of(last) <= task.attempt and last < task.last_event:
                        # It was deleted while its answer was read: the part that was told is not the whole.
                        raise task_not_found(task_id)
                    yield task
                    return
                await wait_for_news(news, self._clock, self._limits.watch_poll_seconds)

    async def _pieces(self, task: Task, after_event: int) -> AsyncGenerator[TaskChunk]:
        """What is kept behind an event; one of an attempt that was lost counts as none."""
        index = index_of(after_event) if attempt_of(after_event) == task.attempt else 0
        while task.attempt:
            pieces = await self._store.pieces(task.id, task.attempt, index, MAX_READ_BYTES)
            if not pieces:
                return
            for piece in pieces:
                yield piece
            index = index_of(pieces[-1].last_event)

    @contextmanager
    def _counted(self) -> Generator[None]:
        if self._watches >= self._limits.max_watches:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                "as many watch tasks as may (router.tasks.max_watches); ask for the task now and then",
                retry_after_seconds=self._limits.watch_poll_seconds,
            )
        self._watches += 1
        try:
            yield
        finally:
            self._watches -= 1


def _has_moved(before: Task, now: Task) -> bool:
    return (before.state, before.attempt) != (now.state, now.attempt)
