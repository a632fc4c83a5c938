"""What has been shown of tasks while a reading is under way: an answer that was read earlier must not follow it."""

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager

from weft.durable.tasks import Task, TaskState

MAX_REMEMBERED = 10_000
"""Tasks that are remembered while readings are under way; beyond that the oldest is forgotten."""

_Key = tuple[str, str]
"""Tenant and id: to another tenant a task does not exist, which says nothing of it."""


class ShownTasks:
    """Remembers what is shown for as long as a reading that began before is not answered."""

    def __init__(self) -> None:
        self._moment = 0
        self._readings: dict[int, None] = {}
        """The moments at which readings under way began, oldest first."""
        self._shown: OrderedDict[_Key, tuple[int, Task | None]] = OrderedDict()
        """With the moment of each, oldest first; None instead of a task: it is gone."""

    @contextmanager
    def reading(self) -> Generator[None]:
        """A block that reads, shows what it has read, and awaits nothing between its last line and its answer."""
        began = self._next_moment()
        self._readings[began] = None
        try:
            yield
        finally:
            del self._readings[began]
            self._forget()

    def show(self, task: Task) -> Task | None:
        """What is to be answered for a task that was read: the task, or what was shown meanwhile and is newer.

        None: an answer said meanwhile that it does not exist.
        """
        key = (task.tenant, task.id)
        if key in self._shown:
            known = self._shown[key][1]
            if known is None or _progress(known) > _progress(task):
                return known
        self._remember(key, task)
        return task

    def show_gone(self, tenant: str, task_id: str) -> None:
        """The answer is that the tenant has no such task."""
        self._remember((tenant, task_id), None)

    def _remember(self, key: _Key, task: Task | None) -> None:
        self._shown[key] = (self._next_moment(), task)
        self._shown.move_to_end(key)
        if len(self._shown) > MAX_REMEMBERED:
            self._shown.popitem(last=False)

    def _forget(self) -> None:
        """Drop what every reading under way began after."""
        oldest = next(iter(self._readings), self._moment)
        while self._shown:
            moment, _ = next(iter(self._shown.values()))
            if moment > oldest:
                return
            self._shown.popitem(last=False)

    def _next_moment(self) -> int:
        self._moment += 1
        return self._moment


def _progress(task: Task) -> tuple[bool, int, bool]:
    """How far a task has come: an attempt that was given up is PENDING again, and later than while it ran."""
    return task.state.is_terminal, task.attempt, task.state is TaskState.PENDING
