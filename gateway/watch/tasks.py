"""Durable tasks of the caller's tenant as a source of a watch."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from typing_extensions import override

from gateway.answers.answer_builder import encode_json
from gateway.tasks.handlers import task_json
from gateway.tasks.task_apis import TaskApis
from gateway.watch.source import Change, WatchCaller, WatchSource, delete, put, synced
from weft.api.router.v1 import task_pb2
from weft.durable.tasks import TaskClient
from weft.kernel.principal import Access, Resource, Role

PAST_TASKS = 100


class TasksOfTenant(WatchSource):
    """The newest tasks of the caller's tenant, then each that is new or changes; the name of one is its id."""

    kind = "task"
    access = Access(Resource.INFERENCE, Role.VIEW)
    by_name = False

    def __init__(self, tasks: TaskClient, task_apis: TaskApis) -> None:
        self._tasks = tasks
        self._task_apis = task_apis

    @override
    async def changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        async with aclosing(self._tasks.watch_all(caller.tenant, PAST_TASKS)) as responses:
            async for response in responses:
                if response.HasField("task"):
                    yield put(response.task.id, partial(self._encoded, response.task))
                elif response.deleted_id:
                    yield delete(response.deleted_id)
                elif response.synced:
                    yield synced()

    def _encoded(self, task: task_pb2.Task) -> bytes:
        return encode_json(task_json(task, self._task_apis))
