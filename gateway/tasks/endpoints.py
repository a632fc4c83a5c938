"""The endpoints of durable tasks."""

from gateway.openapi import (
    answers,
    answers_events,
    json_body,
)
from gateway.routing import ApiRouter
from gateway.tasks import handlers as tasks
from gateway.tasks.handlers import NewTaskBody, TaskList, TaskObject
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.documents.json_schema import record_schema
from weft.kernel.principal import EDIT_REQUESTS, USE_MODELS, VIEW_REQUESTS

_TASKS = "/api/v1/inference-tasks"
_TASK = f"{_TASKS}/{{id}}"
TASKS = ApiRouter("tasks")
TASKS.add_post(
    _TASKS,
    USE_MODELS,
    tasks.submit_task,
    json_body(NewTaskBody) | answers(TaskObject, status=202, also=200),
    status=202,
)
TASKS.add_get(_TASKS, VIEW_REQUESTS, tasks.list_tasks, answers(TaskList, query=tasks.LIST_PARAMETERS))
TASKS.add_get(_TASK, VIEW_REQUESTS, tasks.get_task, answers(TaskObject, path="id"))
TASKS.add_get(f"{_TASK}/events", VIEW_REQUESTS, tasks.watch_task, answers_events(path="id", query=("after",)))
TASKS.add_post(f"{_TASK}/cancel", EDIT_REQUESTS, tasks.cancel_task, answers(TaskObject, path="id"))
TASKS.add_delete(
    _TASK, EDIT_REQUESTS, tasks.delete_task, answers(TaskObject, path="id", query=("forget",), or_nothing="Forgotten")
)

_RECORDS = "/v1/admin/tasks"
_RECORD = f"{_RECORDS}/{{id}}"
TASKS.add_get(
    _RECORDS,
    VIEW_REQUESTS,
    tasks.list_task_records,
    answers(record_schema(task_service_pb2.ListTasksResponse), query=tasks.OPERATOR_LIST_PARAMETERS),
)
TASKS.add_get(
    _RECORD,
    VIEW_REQUESTS,
    tasks.get_task_record,
    answers(record_schema(task_service_pb2.GetTaskResponse), path="id"),
)
TASKS.add_get(f"{_RECORD}/events", VIEW_REQUESTS, tasks.watch_task_record, answers_events(path="id", query=("after",)))
TASKS.add_post(
    f"{_RECORD}/cancel", EDIT_REQUESTS, tasks.cancel_task_record, answers(record_schema(task_pb2.Task), path="id")
)
TASKS.add_delete(_RECORD, EDIT_REQUESTS, tasks.delete_task_record, answers(None, path="id"), status=204)
