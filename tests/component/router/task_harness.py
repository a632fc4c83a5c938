"""A router's tasks with a scheduler and runners that do what the test says."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from inline_task_store import InlineTaskStore
from kit.messages import news_of

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.failpoints import Failpoint, Failpoints
from router_svc.durable.tasks.task_call import CallMaker, Gate, TaskCall
from router_svc.durable.tasks.task_media import TaskMedia
from router_svc.durable.tasks.task_records import Lane, LaneFilled, NewTask, PendingTask
from router_svc.durable.tasks.task_service import TaskService
from weft.api.common.v1 import chat_pb2, embedding_pb2, event_pb2, receipt_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft_testing.fake_clock import FakeClock, let_all_run

NOTICE_SECONDS = 10.0
TENANT = "ann"
FINISHED = event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt_pb2.Receipt(host="titan")))


def text(words: str) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(delta=event_pb2.Delta(text=words))


def chat_spec(model: str = "qwen", words: str = "hello") -> task_pb2.TaskSpec:
    spec = task_pb2.TaskSpec(model=model)
    spec.chat.messages.add(role=chat_pb2.ROLE_USER).content.add(text=words)
    return spec


def embedding_spec(model: str = "qwen") -> task_pb2.TaskSpec:
    payload = embedding_pb2.EmbeddingPayload()
    payload.inputs.add(text="hello")
    return task_pb2.TaskSpec(model=model, embedding=payload)


@dataclass(slots=True)
class ScriptedCall(TaskCall):
    """One offer of a task; the test grants it, refuses it, and lets its runner speak."""

    task: PendingTask
    gate: Gate
    words: asyncio.Queue[task_pb2.TaskOutput | BaseException | None] = field(default_factory=asyncio.Queue)
    """What the runner says; None: nothing comes any more."""
    granted: asyncio.Event = field(default_factory=asyncio.Event)
    claimed: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """The reader has left: its runner's work ends."""
    is_unary: bool | None = None
    refusal: WeftError | None = None
    receipt: receipt_pb2.Receipt | None = None

    def set_unary(self, unary: bool) -> None:
        self.is_unary = unary

    async def outputs(self) -> AsyncGenerator[task_pb2.TaskOutput]:
        try:
            waiting = event_pb2.InferenceEvent(queued=event_pb2.Queued(position=1, reason="every slot is taken"))
            yield task_pb2.TaskOutput(events=[waiting])
            await self.granted.wait()
            if self.refusal is not None:
                raise self.refusal
            await self.gate()
            self.claimed.set()
            while True:
                word = await self.words.get()
                if isinstance(word, BaseException):
                    raise word
                if word is None:
                    return
                if word.events[-1].WhichOneof("event") == "finished":
                    self.receipt = word.events[-1].finished.receipt
                yield word
        finally:
            self.left.set()

    def say(self, *events: event_pb2.InferenceEvent) -> None:
        self.words.put_nowait(task_pb2.TaskOutput(events=events))

    def fail(self, error: BaseException) -> None:
        self.words.put_nowait(error)

    def finish(self) -> None:
        self.say(FINISHED)
        self.words.put_nowait(None)

    def refuse(self, error: WeftError) -> None:
        self.refusal = error
        self.granted.set()

    async def grant(self) -> None:
        """Let it have a slot; return once the task is claimed."""
        self.granted.set()
        async with asyncio.timeout(NOTICE_SECONDS):
            await self.claimed.wait()


class ScriptedCalls(CallMaker):
    """Its calls are held by the test."""

    def __init__(self) -> None:
        self.made: list[ScriptedCall] = []
        self._fresh: asyncio.Queue[ScriptedCall] = asyncio.Queue()

    def make(self, task: PendingTask, gate: Gate) -> ScriptedCall:
        call = ScriptedCall(task, gate)
        self.made.append(call)
        self._fresh.put_nowait(call)
        return call

    async def next(self) -> ScriptedCall:
        """The next offer that the test has not seen."""
        async with asyncio.timeout(NOTICE_SECONDS):
            return await self._fresh.get()

    @property
    def unseen(self) -> int:
        return self._fresh.qsize()


class NotedFailpoints(Failpoints):
    """Notes where tasks were, and lets the test do something there."""

    def __init__(self) -> None:
        self.reached: list[tuple[Failpoint, str]] = []
        self.held: dict[Failpoint, asyncio.Event] = {}

    async def reach(self, point: Failpoint, task_id: str) -> None:
        self.reached.append((point, task_id))
        if point in self.held:
            await self.held[point].wait()


@dataclass(slots=True)
class TaskBench:
    """One router's tasks."""

    clock: FakeClock
    store: InlineTaskStore
    calls: ScriptedCalls
    service: TaskService
    failpoints: NotedFailpoints

    async def submit(
        self, spec: task_pb2.TaskSpec | None = None, *, tenant: str = TENANT, key: str = ""
    ) -> task_pb2.Task:
        request = task_service_pb2.SubmitTaskRequest(spec=spec or chat_spec(), idempotency_key=key)
        return (await self.service.tasks.submit(tenant, request)).task

    async def submit_line(self, task_id: str) -> None:
        """An item of a batch, as the batch manager submits it."""
        lane, now = Lane("qwen", TENANT, Priority.DURABLE), self.clock.utc_now().timestamp()
        new = NewTask(
            task=task_pb2.Task(id=task_id, tenant=lane.tenant, model=lane.model, batch="batch-1", max_attempts=5),
            band=lane.band,
            digest=b"",
            spec=chat_spec().SerializeToString(),
            pending_limit_seconds=60.0,
            created_at=now,
        )
        await self.store.submit(new)
        self.service.events.publish(LaneFilled(lane))

    async def begun(self, spec: task_pb2.TaskSpec | None = None) -> tuple[task_pb2.Task, ScriptedCall]:
        """A task that runs."""
        task = await self.submit(spec)
        call = await self.calls.next()
        await call.grant()
        return task, call

    async def get(self, task_id: str) -> task_pb2.Task:
        return await self.service.tasks.get(TENANT, task_id)

    async def until(self, task_id: str, state: "task_pb2.TaskState.ValueType") -> task_pb2.Task:
        """The task, once it has a state."""
        async with asyncio.timeout(NOTICE_SECONDS):
            while (task := await self.get(task_id)).state != state:
                await let_all_run()
        return task

    async def attempts(self, task_id: str) -> list[str]:
        """Why its attempts ended."""
        return [Reason(each.reason).name for each in (await self.service.tasks.details(TENANT, task_id)).attempts]

    async def settle(self) -> None:
        """Let everybody go on who can."""
        await let_all_run()

    async def advance(self, seconds: float) -> None:
        await self.settle()
        await self.clock.advance(seconds)
        await self.settle()

    def watch(self, task_id: str, after_event: int = 0) -> "Watch":
        return Watch(self.service.tasks.watch(TENANT, task_id, after_event))


class Watch:
    """A watch whose events the test takes one by one."""

    def __init__(self, news: AsyncGenerator[task_service_pb2.WatchTaskResponse]) -> None:
        self._news = news

    async def next(self) -> task_pb2.Task | task_pb2.TaskPiece:
        async with asyncio.timeout(NOTICE_SECONDS):
            return news_of(await anext(self._news))

    async def rest(self) -> list[task_pb2.Task | task_pb2.TaskPiece]:
        async with asyncio.timeout(NOTICE_SECONDS):
            return [news_of(news) async for news in self._news]

    async def close(self) -> None:
        await self._news.aclose()


@asynccontextmanager
async def task_bench(
    *,
    limits: TaskLimits | None = None,
    store: InlineTaskStore | None = None,
    clock: FakeClock | None = None,
    grace_seconds: float = 0.0,
    media: TaskMedia | None = None,
) -> AsyncIterator[TaskBench]:
    """Tasks of one router; `store` and `clock` of an earlier life, or of another router."""
    clock, store, calls, failpoints = (
        clock or FakeClock(),
        store or InlineTaskStore(),
        ScriptedCalls(),
        NotedFailpoints(),
    )
    service = TaskService(store, limits or TaskLimits(), calls, clock, failpoints, media=media)
    await service.start()
    try:
        yield TaskBench(clock, store, calls, service, failpoints)
    finally:
        await service.stop(grace_seconds)
