"""The endpoints of durable tasks."""

from gateway.openapi import answers, answers_events, json_body
from gateway.routing import ApiRouter
from gateway.tasks import task_handlers as tasks
from gateway.tasks.task_handlers import NewTaskBody, TaskList, TaskObject
from weft.api.router.v1.task_pb2 import Task
from weft.api.router.v1.task_service_pb2 import GetTaskResponse, ListTasksResponse
from weft.kernel.access.principal import EDIT_REQUESTS, USE_MODELS, VIEW_REQUESTS

_TASKS, _TASK = "/api/v1/inference-tasks", "/api/v1/inference-tasks/{id}"
_RECORDS, _RECORD = "/v1/admin/tasks", "/v1/admin/tasks/{id}"
_SUBMITTED = json_body(NewTaskBody) | answers(TaskObject, status=202, also=200)
_DELETED = answers(TaskObject, query=("forget",), or_nothing="Forgotten")
_RECORD_PAGE = answers(ListTasksResponse, query=tasks.OPERATOR_LIST_PARAMETERS)
_EVENTS = answers_events(query=("after",))

TASKS = ApiRouter("tasks")
TASKS.add_post(_TASKS, USE_MODELS, tasks.submit_task, _SUBMITTED)
TASKS.add_get(_TASKS, VIEW_REQUESTS, tasks.list_tasks, answers(TaskList, query=tasks.LIST_PARAMETERS))
TASKS.add_get(_TASK, VIEW_REQUESTS, tasks.get_task, answers(TaskObject, query=("body",)))
TASKS.add_get(f"{_TASK}/events", VIEW_REQUESTS, tasks.watch_task, _EVENTS)
TASKS.add_post(f"{_TASK}/cancel", EDIT_REQUESTS, tasks.cancel_task, answers(TaskObject))
TASKS.add_delete(_TASK, EDIT_REQUESTS, tasks.delete_task, _DELETED)
TASKS.add_get(_RECORDS, VIEW_REQUESTS, tasks.list_task_records, _RECORD_PAGE)
TASKS.add_get(_RECORD, VIEW_REQUESTS, tasks.get_task_record, answers(GetTaskResponse))
TASKS.add_get(f"{_RECORD}/events", VIEW_REQUESTS, tasks.watch_task_record, _EVENTS)
TASKS.add_post(f"{_RECORD}/cancel", EDIT_REQUESTS, tasks.cancel_task_record, answers(Task))
TASKS.add_delete(_RECORD, EDIT_REQUESTS, tasks.delete_task_record, answers(None))
