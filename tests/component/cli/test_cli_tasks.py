"""The commands about durable tasks, against a scripted TaskService."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cli_harness import refuse, served_home
from kit.home_gateway import home_gateway
from typer.testing import CliRunner, Result

from weft.api.common.v1 import event_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2_grpc
from weft.api.router.v1 import task_service_pb2 as pb
from weft.api.router.v1.webhook_pb2 import WebhookEvent
from weft.kernel.errors.reasons import Reason
from weft_app.cli import follow, tasks
from weft_app.cli.main import app

ID = "task-5f0c0d2b7a9e4c31d6a8b2f4"
PENDING, RUNNING = task_pb2.TASK_STATE_PENDING, task_pb2.TASK_STATE_RUNNING
COMPLETED, FAILED, CANCELLED = (
    task_pb2.TASK_STATE_COMPLETED,
    task_pb2.TASK_STATE_FAILED,
    task_pb2.TASK_STATE_CANCELLED,
)
AGE = timedelta(seconds=65)


def task(state: int = PENDING, *, task_id: str = ID, attempt: int = 0, **fields: Any) -> task_pb2.Task:
    made = task_pb2.Task(
        id=task_id,
        tenant="default",
        state=state,  # type: ignore[arg-type]  # a number of the enum
        model="qwen",
        attempt=attempt,
        max_attempts=5,
        **fields,
    )
    made.create_time.FromDatetime(datetime.now(UTC) - AGE)
    return made


def failed() -> task_pb2.Task:
    error = task_pb2.TaskError(reason=Reason.WORKER_LOST.value, message="the runner went away")  # type: ignore[arg-type]
    return task(FAILED, attempt=5, error=error)


def piece(text: str, *, attempt: int = 1, index: int = 1) -> task_pb2.TaskPiece:
    event = event_pb2.InferenceEvent(delta=event_pb2.Delta(text=text))
    return task_pb2.TaskPiece(
        attempt=attempt, last_event=attempt << 32 | index, output=task_pb2.TaskOutput(events=[event])
    )


@dataclass
class TaskScript:
    """What the service tells, and what it was asked."""

    home: Path
    tasks: list[task_pb2.Task] = field(default_factory=list)
    news: list[task_pb2.Task | task_pb2.TaskPiece] = field(default_factory=list)
    attempts: list[task_pb2.TaskAttempt] = field(default_factory=list)
    webhook: WebhookEvent | None = None
    submitted: list[pb.SubmitTaskRequest] = field(default_factory=list)
    listed: list[pb.ListTasksRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    notice: str = ""
    restarts: list[int] = field(default_factory=list)
    """After how many news a watch breaks off, watch by watch."""
    watched_after: list[int] = field(default_factory=list)

    def run(self, *arguments: str) -> Result:
        """A `weft` command to its end."""
        return CliRunner().invoke(app, arguments, env={"WEFT_HOME": str(self.home), "COLUMNS": "200"})


class _Service(task_service_pb2_grpc.TaskServiceServicer):
    def __init__(self, script: TaskScript) -> None:
        self._script = script

    def SubmitTask(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._script.submitted.append(request)
        return pb.SubmitTaskResponse(task=task())

    def GetTask(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetTaskResponse(
            task=self._found(request.id, context), attempts=self._script.attempts, webhook=self._script.webhook
        )

    def ListTasks(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._script.listed.append(request)
        return pb.ListTasksResponse(tasks=self._script.tasks[: request.page_size], notice=self._script.notice)

    def CancelTask(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = self._found(request.id, context)
        self._script.cancelled.append(request.id)
        return pb.CancelTaskResponse(task=found if found.state >= COMPLETED else task(CANCELLED, task_id=found.id))

    def DeleteTask(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self._found(request.id, context).state < COMPLETED:
            refuse(context, Reason.RESOURCE_IN_USE, "the task is not at its end; cancel it first")
        self._script.deleted.append(request.id)
        return pb.DeleteTaskResponse()

    def WatchTask(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self._found(request.id, context)
        self._script.watched_after.append(request.after_event)
        told = self._script.restarts.pop(0) if self._script.restarts else None
        for news in self._script.news[:told]:
            if isinstance(news, task_pb2.Task):
                yield pb.WatchTaskResponse(task=news)
            else:
                yield pb.WatchTaskResponse(piece=news)
        if told is not None:
            del self._script.news[:told]
            refuse(context, Reason.SERVICE_UNAVAILABLE, "the router stops")

    def WatchTasks(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        raise NotImplementedError

    def _found(self, task_id: str, context: Any) -> task_pb2.Task:
        found = [each for each in self._script.tasks if each.id == task_id]
        if not found:
            refuse(context, Reason.NOT_FOUND, f"no task {task_id} is kept")
        return found[0]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[TaskScript]:
    script = TaskScript(tmp_path / "home", tasks=[task()])
    add = partial(task_service_pb2_grpc.add_TaskServiceServicer_to_server, _Service(script))
    with served_home(script.home, add) as address, home_gateway(script.home, address):
        yield script


def test_async_chat_prints_only_its_task_id(script: TaskScript) -> None:
    done = script.run("chat", "qwen", "--async", "-m", "Hello", "-s", "Be brief.", "--max-tokens", "7")
    assert (done.exit_code, done.stdout) == (0, f"{ID}\n")
    assert f"pending; `weft logs task/{ID} -f` prints its answer" in done.stderr
    spec = script.submitted[0].spec
    assert [message.content[0].text for message in spec.chat.messages] == ["Be brief.", "Hello"]
    assert (spec.model, spec.chat.sampling.max_tokens, spec.options.priority) == ("qwen", 7, 0)


@pytest.mark.parametrize(("command", "asked"), [("image", "a cat"), ("transcribe", "talk.wav"), ("speak", "Hello.")])
def test_detached_media_command_names_the_command_that_fetches(
    script: TaskScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, asked: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("talk.wav").write_bytes(b"sound")
    done = script.run("media", command, asked, "--model", "m", "--detach")
    assert (done.exit_code, done.stdout) == (0, f"{ID}\n"), done.output
    assert f"`weft media {command} --fetch {ID}` waits for it" in done.stderr


def test_single_task_is_one_document(script: TaskScript) -> None:
    assert json.loads(script.run("get", f"task/{ID}", "-o", "json").stdout)["kind"] == "task"
    assert script.run("get", "tasks", "-o", "name").stdout == f"task/{ID}\n"


def test_describe_shows_every_attempt_with_its_reason(script: TaskScript) -> None:
    script.tasks = [failed()]
    for number in (1, 2):
        lost = task_pb2.TaskAttempt(attempt=number, owner="router-a/01", message="the runner went away")
        lost.reason = Reason.WORKER_LOST.value  # type: ignore[assignment]  # a number of the enum
        lost.claim_time.FromDatetime(datetime.now(UTC) - AGE)
        lost.end_time.FromDatetime(datetime.now(UTC) - AGE)
        lost.receipt.attempts.add(runner="atlas", reason=Reason.WORKER_LOST.value)
        script.attempts.append(lost)
    done = script.run("describe", "task", ID)
    assert "State:     failed" in done.stdout
    assert "Error:     worker_lost: the runner went away" in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [line.split(".")[0].strip() for line in lines] == ["1", "2"]
    assert all("by router-a, on atlas (worker_lost), worker_lost: the runner went away" in line for line in lines)


def test_describe_shows_the_event_of_a_task_with_its_attempts(script: TaskScript) -> None:
    script.tasks = [task(COMPLETED)]
    script.webhook = WebhookEvent(id="evt_1", type="task.completed", object_id=ID, state=WebhookEvent.STATE_WAITING)
    error = task_pb2.TaskError(reason=Reason.BACKEND_ERROR.value, message="status 500")  # type: ignore[arg-type]
    script.webhook.attempts.add(error=error).start_time.FromDatetime(datetime.now(UTC))
    script.webhook.next_time.FromDatetime(datetime.now(UTC))
    lines = script.run("describe", "task", ID).stdout.splitlines()
    assert lines[-2].startswith("Webhook: task.completed waiting, next at ")
    assert lines[-1].endswith(": backend_error: status 500")
    script.webhook.state = WebhookEvent.STATE_DELIVERED
    script.webhook.attempts[0].ClearField("error")
    script.webhook.ClearField("next_time")
    lines = script.run("describe", "task", ID).stdout.splitlines()
    assert lines[-2] == "Webhook: task.completed delivered"
    assert lines[-1].endswith(": accepted")


@pytest.mark.parametrize(
    ("news", "options", "code", "shown", "words"),
    [
        ([task(), task(RUNNING, attempt=1), task(COMPLETED, attempt=1)], ("--timeout", "5s"), 0, "completed", ""),
        ([task(), failed()], (), 1, "failed", "the runner went away"),
        ([task(), task(RUNNING, attempt=1)], ("--for", "status=running"), 0, "running", ""),
        ([task(COMPLETED)], ("--for", "status=running"), 1, "completed", ""),
        ([task()], ("--timeout", "0"), 5, "", "is pending"),
    ],
    ids=["until its end", "that fails", "for a state", "for a state that is over", "longer than the timeout"],
)
def test_wait_ends_with_the_state_of_the_task(
    script: TaskScript, news: list[Any], options: tuple[str, ...], code: int, shown: str, words: str
) -> None:
    script.news = news
    done = script.run("mesh", "wait", f"task/{ID}", *options)
    assert (done.exit_code, done.stdout) == (code, f"task/{ID}: {shown}\n" if shown else "")
    assert words in done.stderr


@pytest.mark.parametrize("expected", ["condition=Ready", "status=asleep", "exists"])
def test_invalid_task_state_is_rejected(script: TaskScript, expected: str) -> None:
    assert script.run("mesh", "wait", "task", ID, "--for", expected).exit_code == 2


def test_task_worker_is_shown_as_the_router_name_of_get_routers(script: TaskScript) -> None:
    owners = ("router-box-5f1c02/8c6d2f0e9a7b4c1d5e3f2a10", "router-of-an-older-release")
    script.tasks = [task(RUNNING, attempt=1, owner=owner) for owner in owners]
    workers = [line.split()[5] for line in script.run("get", "tasks").stdout.splitlines()[1:]]
    assert workers == ["router-box-5f1c02", "router-of-an-older-release"]


def test_logs_print_the_answer_stored_so_far(script: TaskScript) -> None:
    script.tasks = [task(RUNNING, attempt=1)]
    script.news = [task(RUNNING, attempt=1, last_event=1 << 32 | 2), piece("Hel"), piece("lo", index=2), piece("!")]
    done = script.run("logs", f"task/{ID}")
    assert (done.exit_code, done.stdout) == (0, "Hello\n")
    assert "is running" in done.stderr


@pytest.mark.parametrize(
    ("words", "shown", "said"),
    [(("task", ID, "-f"), "Hel\nHello\n", "attempt 1 was lost"), ((f"task/{ID}",), "Hel\n", "is pending")],
    ids=["followed to the end", "stopped at the lost attempt"],
)
def test_logs_report_a_restarted_answer(script: TaskScript, words: tuple[str, ...], shown: str, said: str) -> None:
    script.news = [
        task(RUNNING, attempt=1, last_event=1 << 32 | 2),
        piece("Hel"),
        task(PENDING, attempt=1),
        task(RUNNING, attempt=2),
        piece("Hello", attempt=2),
        task(COMPLETED, attempt=2),
    ]
    done = script.run("logs", *words)
    assert (done.exit_code, done.stdout) == (0, shown)
    assert said in done.stderr


def test_logs_of_a_failed_task_end_with_its_error(script: TaskScript) -> None:
    script.news = [failed()]
    done = script.run("logs", f"task/{ID}")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "worker_lost: the runner went away" in done.stderr


def test_logs_report_a_watch_that_ends_before_the_task_is_sent(script: TaskScript) -> None:
    done = script.run("logs", f"task/{ID}")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "weft: the mesh ended the watch before it sent the task; try again\n"


def test_cancel_reports_the_outcome_of_each_task(script: TaskScript) -> None:
    script.tasks = [task(), task(COMPLETED, task_id="task-2")]
    done = script.run("cancel", f"task/{ID}", "task/task-none", "task/task-2")
    assert done.exit_code == 3
    assert done.stdout == f"task/{ID} cancelled\ntask/task-2 had already completed\n"
    assert "no task task-none is kept" in done.stderr
    assert script.cancelled == [ID, "task-2"]


def test_only_ended_tasks_can_be_deleted(script: TaskScript) -> None:
    script.tasks = [task(), task(COMPLETED, task_id="task-2")]
    done = script.run("delete", "task", ID, "task-2")
    assert done.exit_code == 4
    assert (done.stdout, script.deleted) == ("task/task-2 deleted\n", ["task-2"])


@pytest.mark.parametrize(
    "arguments",
    [("cancel", "model", "qwen"), ("cancel", "task"), ("mesh", "wait", "task"), ("describe", "task"), ("logs", "task"),
     ("logs", "task/a", "model/b"), ("chat", "qwen", "--async", "-m", " ")],
)  # fmt: skip
def test_usage_error_exits_with_code_2(script: TaskScript, arguments: tuple[str, ...]) -> None:
    assert script.run(*arguments).exit_code == 2


def test_followed_logs_resume_after_a_mesh_restart(script: TaskScript, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_app.cli.tasks.RETRY_PAUSE_SECONDS", 0.01)
    script.restarts = [2, 0]
    script.news = [task(RUNNING, attempt=1), piece("Hel"), piece("lo", index=2), task(COMPLETED, attempt=1)]
    script.news.insert(2, task(RUNNING, attempt=1))
    done = script.run("logs", f"task/{ID}", "-f")
    assert (done.exit_code, done.stdout) == (0, "Hello\n")
    assert script.watched_after == [0, 1 << 32 | 1, 1 << 32 | 1]


def test_followed_logs_end_if_the_mesh_does_not_return(script: TaskScript, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "Breaks", lambda _, *reasons, **options: follow.Breaks(0.0, *reasons, **options))
    script.restarts = [1] + 10 * [0]
    script.news = [task(RUNNING, attempt=1)]
    done = script.run("logs", f"task/{ID}", "-f")
    assert done.exit_code == 1
    assert "the router stops" in done.stderr


def test_task_store_notice_is_printed_on_stderr_beside_the_list(script: TaskScript) -> None:
    script.notice = "the router's database is older\x1b[2J"
    result = script.run("get", "tasks")
    assert ID in result.stdout
    assert "older" not in result.stdout
    assert "weft: warning: the router's database is older [2J" in result.stderr
    assert json.loads(script.run("get", "tasks", "-o", "json").stdout)["items"]


def test_tasks_filter_by_caller_and_show_their_labels(script: TaskScript) -> None:
    script.tasks = [task(caller="key:k1", user="eve", metadata={"job": "42"}, request_id="mine")]
    wide = script.run("get", "tasks", "--caller", "key:k1", "-o", "wide").stdout.splitlines()
    assert {"CALLER", "USER"} <= set(wide[0].split())
    assert {"key:k1", "eve"} <= set(wide[1].split())
    assert [asked.caller for asked in script.listed] == ["key:k1"]
    page = script.run("describe", "task", ID).stdout
    assert [word in page for word in ("key:k1", "eve", "job=42", "mine")] == [True] * 4
    (document,) = json.loads(script.run("get", "tasks", "-o", "json").stdout)["items"]
    assert (document["caller"], document["metadata"], document["requestId"]) == ("key:k1", {"job": "42"}, "mine")


def test_caller_option_applies_only_to_tasks(script: TaskScript) -> None:
    refused = script.run("get", "models", "--caller", "key:k1")
    assert (refused.exit_code, "--caller" in refused.stderr) == (2, True)
