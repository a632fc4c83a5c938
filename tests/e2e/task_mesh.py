"""A mesh apart with durable tasks, and TaskService as a caller sees it."""

import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

from apart_mesh import START_SECONDS, Apart
from kit.warm_python import warm
from mesh_process import user_environment, write_config

from tools.torture.history import Event, Kind, read_backend_log, read_router_log
from tools.torture.submitter import until_known
from weft.api.common.v1 import chat_pb2, sampling_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2, task_service_pb2_grpc
from weft.kernel.channels.rpc import open_channel

MODEL = "m-a"
CALL_SECONDS = 10.0
WATCH_SECONDS = 60.0
LEASE_SECONDS = 1.0
QUICK_TASKS = {
    "lease_seconds": LEASE_SECONDS,
    "retry_delay_seconds": 0.05,
    "max_retry_delay_seconds": 0.2,
    "poll_interval_seconds": 0.5,
    "piece_interval_seconds": 0.1,
    # With pauses as short as these, a runner that has died takes several attempts until the mesh knows that it has.
    "max_attempts": 100,
}
"""Section `router.tasks`: what takes minutes otherwise takes a second."""


class TaskMesh(Apart):
    """Services apart, whose router may be one that kills itself."""

    def __init__(self, folder: Path, config: Path) -> None:
        super().__init__(folder / "home", config)
        self._folder = folder
        self._file = config

    @property
    def address(self) -> str:
        """Of the router."""
        return f"unix:{self.home}/run/router.sock"

    def start_deadly_router(self, kill_at: str) -> None:
        """A router that kills itself at a failpoint, such as `claimed:1`."""
        where = ["--home", str(self.home), "--config", str(self._file), "--kill-at", kill_at]
        with (self._folder / "deadly.out").open("wb") as errors:
            process = subprocess.Popen(
                [*warm("kit.torture_router"), *where],
                env=user_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._processes["router"] = process
        assert process.stdout is not None
        assert "serves at" in process.stdout.readline(), (self._folder / "deadly.out").read_text()

    def wait_dead(self) -> None:
        """Until the router has killed itself."""
        process = self._processes.pop("router")
        assert process.wait(START_SECONDS) == -signal.SIGKILL
        assert process.stdout is not None
        process.stdout.close()

    def start_runner(self, name: str) -> None:
        """A runner by its name; `end` knows it as `runner-<name>`."""
        self.start("runner", "--runner", name)
        self._processes[f"runner-{name}"] = self._processes.pop("runner")

    def backend_events(self, task: str, note: str) -> list[Event]:
        """What backends wrote of a task: `begun`, `finished` or `cancelled`."""
        events = read_backend_log(self._folder / "backend.jsonl")
        return [event for event in events if (event.task, event.note) == (task, note)]

    def router_events(self, *kinds: Kind) -> list[Event]:
        """What routers wrote of tasks."""
        return [event for event in read_router_log(self.home / "logs" / "router.log") if event.kind in kinds]


@contextmanager
def running_task_mesh(folder: Path, *runners: dict[str, Any]) -> Iterator[TaskMesh]:
    """A registry and these runners, none of them started; what is left at the end ends with exit code 0."""
    for runner in runners:
        runner["command"] += ["--request-log", str(folder / "backend.jsonl")]
    mesh = TaskMesh(folder, write_config(folder, *runners, router={"tasks": QUICK_TASKS}))
    try:
        mesh.start("registry")
        yield mesh
    finally:
        codes = mesh.end_all()
    assert set(codes) <= {0}


class Tasks:
    """TaskService over a channel that outlives the routers behind it."""

    def __init__(self, stub: Any) -> None:
        self.stub = stub

    async def submit(
        self, tokens: int, *, model: str = MODEL, key: str = "", is_once: bool = False
    ) -> task_service_pb2.SubmitTaskResponse:
        """Send a chat whose answer has so many tokens, until it is acknowledged; `is_once`: only once."""
        question = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text="hi")])
        sampling = sampling_pb2.SamplingParams(max_tokens=tokens)
        chat = chat_pb2.ChatPayload(messages=[question], sampling=sampling)
        spec = task_pb2.TaskSpec(model=model, chat=chat, wait_for_model=True)
        request = task_service_pb2.SubmitTaskRequest(spec=spec, idempotency_key=key)
        if is_once:
            return await self.stub.SubmitTask(request, timeout=CALL_SECONDS)  # type: ignore[no-any-return]
        return await until_known(lambda: self.stub.SubmitTask(request, timeout=CALL_SECONDS))

    async def get(self, task: str) -> task_service_pb2.GetTaskResponse:
        """With its attempts."""
        request = task_service_pb2.GetTaskRequest(id=task)
        return await until_known(lambda: self.stub.GetTask(request, timeout=CALL_SECONDS))

    async def cancel(self, task: str) -> task_pb2.Task:
        """As it is then."""
        request = task_service_pb2.CancelTaskRequest(id=task)
        return (await self.stub.CancelTask(request, timeout=CALL_SECONDS)).task  # type: ignore[no-any-return]

    async def listed(
        self, model: str, *states: task_pb2.TaskState.ValueType, page_size: int = 1000
    ) -> list[task_pb2.Task]:
        """At most a page of those for a model."""
        request = task_service_pb2.ListTasksRequest(model=model, states=states, page_size=page_size)
        return list((await until_known(lambda: self.stub.ListTasks(request, timeout=CALL_SECONDS))).tasks)

    async def of_request(self, request_id: str) -> list[task_pb2.Task]:
        """Those of a journaled request."""
        request = task_service_pb2.ListTasksRequest(request_id=request_id)
        return list((await until_known(lambda: self.stub.ListTasks(request, timeout=CALL_SECONDS))).tasks)

    async def until_it_says_something(self, task: str) -> None:
        """Until a piece of its answer is kept."""
        async for news in self._watch(task):
            if news.HasField("piece") and any(event.HasField("delta") for event in news.piece.output.events):
                return
        raise AssertionError("it ended without an answer")

    async def answer(self, task: str) -> tuple[task_pb2.Task, str]:
        """The task at its end, and what its last attempt said."""
        return await until_known(lambda: self._answer(task))

    async def _answer(self, task: str) -> tuple[task_pb2.Task, str]:
        last, texts = task_pb2.Task(), dict[int, str]()
        async for news in self._watch(task):
            if news.HasField("task"):
                last = news.task
            else:
                said = "".join(event.delta.text for event in news.piece.output.events)
                texts[news.piece.attempt] = texts.get(news.piece.attempt, "") + said
        return last, texts.get(last.attempt, "")

    async def _watch(self, task: str) -> AsyncIterator[task_service_pb2.WatchTaskResponse]:
        call = self.stub.WatchTask(task_service_pb2.WatchTaskRequest(id=task), timeout=WATCH_SECONDS)
        try:
            async for news in call:
                yield news
        finally:
            call.cancel()


@asynccontextmanager
async def task_service(address: str) -> AsyncIterator[Tasks]:
    """The service of the router at an address."""
    async with open_channel(address) as channel:
        yield Tasks(cast("Any", task_service_pb2_grpc.TaskServiceStub(channel)))
