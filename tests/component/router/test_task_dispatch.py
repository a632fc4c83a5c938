"""Tasks through the real scheduler and database, to runners that answer over gRPC."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kit.fleet import model_view, ready, runner_view
from kit.scheduling import placement_request, scheduling_loop
from kit.serving import served
from task_harness import FINISHED, NOTICE_SECONDS, chat_spec, embedding_spec, text

import router_svc.durable.tasks.task_service
from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.task_call import CallMaker
from router_svc.durable.tasks.task_recorder import TaskRecorder
from router_svc.loop import RouterRecords
from router_svc.placement import LocalPlacement
from router_svc.request_record import EndedRequest, RecordedTask
from router_svc.store.database import RouterDatabase
from weft.api.common.v1 import embedding_pb2, event_pb2, priority_pb2, receipt_pb2
from weft.api.common.v1.sampling_pb2 import SamplingParams
from weft.api.registry.v1.alias_pb2 import Alias, AliasManifest
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.api.runner.v1 import (
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    ticket_pb2,
)
from weft.dispatch.agents import KnownNames
from weft.dispatch.fleet import FleetView
from weft.durable.tasks import TaskClient, is_terminal
from weft.kernel.channels.rpc import ChannelPool, answering
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.time.clock import SystemClock
from weft.kernel.values.names import process_name
from weft.link.carried_calls import CallStreams
from weft_testing.carried import carry
from weft_testing.fake_clock import let_all_run

TENANT = "ann"
FAST = TaskLimits(retry_delay_seconds=0.02, max_retry_delay_seconds=0.05, lease_seconds=3.0, poll_interval_seconds=0.5)


class Runner(
    generation_service_pb2_grpc.GenerationServiceServicer, embedding_service_pb2_grpc.EmbeddingServiceServicer
):
    """Says what the test puts into it, one call after the other."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.calls: list[Any] = []
        self.metadata: list[dict[str, Any]] = []
        self.words: asyncio.Queue[event_pb2.InferenceEvent | WeftError | None] = asyncio.Queue()
        self.begun = asyncio.Event()
        self.given_up = asyncio.Event()

    async def Generate(  # noqa: N802 - the rpc's name
        self, request: generation_service_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[generation_service_pb2.GenerateResponse]:
        self._note(request, context)
        async with answering(context):
            try:
                while (word := await self.words.get()) is not None:
                    if isinstance(word, WeftError):
                        raise word
                    yield generation_service_pb2.GenerateResponse(events=[word])
                    if word.HasField("finished"):
                        return
            except asyncio.CancelledError:
                self.given_up.set()
                raise

    async def Embed(  # noqa: N802 - the rpc's name
        self, request: embedding_service_pb2.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> embedding_service_pb2.EmbedResponse:
        self._note(request, context)
        vectors = [embedding_pb2.Embedding(index=0, values=[1.0, 2.0])]
        return embedding_service_pb2.EmbedResponse(embeddings=vectors, receipt=receipt_pb2.Receipt(host="titan"))

    def say(self, *words: event_pb2.InferenceEvent | WeftError | None) -> None:
        for word in words:
            self.words.put_nowait(word)

    def _note(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.calls.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.begun.set()


class Mesh:
    """A scheduler and what it knows."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        records = RouterRecords.empty(SystemClock())
        self.requests = records.requests
        self.loop = scheduling_loop(records=records)
        self.view = FleetView()
        self.aliases: dict[str, Alias] = {}
        self.channels = ChannelPool()
        self.tell: list[Callable[[FleetView], None]] = []

    def show(self, *, slots: int = 1, model: bool = True) -> None:
        """The registry reports the runner, with so many slots, or without a model."""
        instances = {"qwen": ready(slots=slots)} if model else {}
        runner = runner_view("laptop", address=self.runner.address, instances=instances)
        qwen = model_view(runner="laptop", operations=frozenset({Operation.CHAT, Operation.EMBEDDING}))
        models = {"qwen": qwen} if model else {}
        self.view = FleetView(self.view.revision + 1, {"laptop": runner}, models, aliases=self.aliases)
        self.loop.update_view(self.view)
        for tell in self.tell:
            tell(self.view)


@asynccontextmanager
async def mesh_of(
    tmp_path: Path, limits: TaskLimits = FAST, *, keep_records_seconds: float = 60.0
) -> AsyncIterator[tuple[Mesh, TaskClient]]:
    """A router's tasks, and a runner that the mesh does not know yet."""
    runner = Runner(f"unix:{tmp_path}/r")
    mesh = Mesh(runner)
    calls = CallMaker(
        placement=LocalPlacement(mesh.loop),
        streams=CallStreams(mesh.channels),
        fleet=mesh,
        clock=SystemClock(),
        names=KnownNames(mesh),
    )
    database = RouterDatabase(f"sqlite:///{tmp_path / 'router.db'}")
    service = router_svc.durable.tasks.task_service.build(database, limits, calls, router_name="router-box-5f1c02")
    recorder = TaskRecorder(mesh.requests, mesh.loop.task_ended, SystemClock(), service.utc_now)
    service.record_with(recorder, keep_records_seconds)
    mesh.tell.append(service.engine.mesh_changed)
    requests = (generation_service_pb2, embedding_service_pb2)
    async with served(tmp_path / "r", (lambda servicer, server: carry(server, servicer, *requests), runner)):
        await service.start()
        try:
            yield mesh, service.tasks
        finally:
            await service.stop(0)
            mesh.loop.close()
            await mesh.channels.close()


async def submit(tasks: TaskClient, spec: task_pb2.TaskSpec | None = None) -> str:
    return (await tasks.submit(TENANT, task_service_pb2.SubmitTaskRequest(spec=spec or chat_spec()))).task.id


async def end_of(tasks: TaskClient, task_id: str) -> tuple[task_pb2.Task, list[event_pb2.InferenceEvent]]:
    """The task at its end, and what is kept of its answer."""
    events: list[event_pb2.InferenceEvent] = []
    async with asyncio.timeout(NOTICE_SECONDS):
        async for news in tasks.watch(TENANT, task_id):
            if news.HasField("piece"):
                events += news.piece.output.events
            else:
                last = news.task
                if not is_terminal(last):
                    events.clear()
    return last, events


async def begun(runner: Runner) -> None:
    async with asyncio.timeout(NOTICE_SECONDS):
        await runner.begun.wait()
    runner.begun.clear()


async def test_task_runs_as_a_lowest_priority_request_with_its_own_id(tmp_path: Path) -> None:
    async with mesh_of(tmp_path) as (mesh, tasks):
        mesh.show()
        spec = chat_spec()
        spec.traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        task_id = await submit(tasks, spec)
        mesh.runner.say(text("hello"), FINISHED)
        task, events = await end_of(tasks, task_id)
        assert (task.state, task.attempt) == (task_pb2.TASK_STATE_COMPLETED, 1)
        assert [event.delta.text for event in events] == ["hello", ""]
        receipt = events[-1].finished.receipt
        assert (receipt.request_id, receipt.attempts[0].runner) == (task_id, "laptop")
        (request,) = mesh.runner.calls
        assert request.options.priority == priority_pb2.PRIORITY_DURABLE
        assert request.chat == spec.chat
        claims = ticket_pb2.TicketClaims.FromString(request.ticket.claims)
        assert (claims.request_id, claims.tenant) == (task_id, TENANT)
        assert mesh.runner.metadata[0]["traceparent"] == spec.traceparent


async def test_end_that_was_not_recorded_before_a_kill_is_recorded_with_its_time_until_records_expire(
    tmp_path: Path,
) -> None:
    async with mesh_of(tmp_path) as (mesh, tasks):
        mesh.show()
        task_id = await submit(tasks)
        mesh.runner.say(text("hello"), FINISHED)
        task, _ = await end_of(tasks, task_id)
    # Records are only in memory here, so each process begins without any.
    async with mesh_of(tmp_path) as (mesh, _):
        ended = mesh.requests.find(task_id, time.monotonic())
        assert isinstance(ended, EndedRequest)
        assert ended.ended_at == pytest.approx(task.end_time.ToNanoseconds() / 1e9, abs=0.002)
    async with mesh_of(tmp_path, keep_records_seconds=1e-6) as (mesh, _):
        assert mesh.requests.find(task_id, time.monotonic()) is None, "it was recorded and counted again"


async def test_task_owner_has_the_router_name_and_a_unique_id_per_start(tmp_path: Path) -> None:
    owners = []
    for _ in range(2):
        async with mesh_of(tmp_path) as (mesh, tasks):
            mesh.show()
            task_id = await submit(tasks)
            mesh.runner.say(FINISHED)
            await end_of(tasks, task_id)
            owners.append((await tasks.details(TENANT, task_id)).attempts[0].owner)
    assert {process_name(owner) for owner in owners} == {"router-box-5f1c02"}
    assert len(set(owners)) == 2


async def test_task_with_its_own_priority_waits_in_that_class_and_streams(tmp_path: Path) -> None:
    async with mesh_of(tmp_path) as (mesh, tasks):
        mesh.show()
        spec = chat_spec()
        spec.options.priority = priority_pb2.PRIORITY_HIGH
        task_id = await submit(tasks, spec)
        mesh.runner.say(FINISHED)
        await end_of(tasks, task_id)
        options = mesh.runner.calls[0].options
        assert (options.priority, options.whole) == (priority_pb2.PRIORITY_HIGH, False)


async def test_task_that_waited_gets_the_preset_that_its_alias_has_when_it_runs(tmp_path: Path) -> None:
    async with mesh_of(tmp_path) as (mesh, tasks):
        spec = chat_spec()
        spec.asked_model, spec.chat.sampling.temperature = "calm", 1
        task_id = await submit(tasks, spec)
        mesh.runner.say(event_pb2.InferenceEvent(started=event_pb2.Started()), text("hello"), FINISHED)
        calm = AliasManifest(name="calm", pattern="calm", target="qwen", forced_params=SamplingParams(temperature=0.25))
        mesh.aliases = {"calm": Alias(manifest=calm)}
        mesh.show()
        _, events = await end_of(tasks, task_id)
        assert mesh.runner.calls[0].chat.sampling.temperature == 0.25
        assert [event.warning.field for event in events if event.HasField("warning")] == ["temperature"]
        [changed] = events[-1].finished.receipt.changed_parameters
        assert changed.author == "alias/calm"


async def test_embedding_runs_as_a_task(tmp_path: Path) -> None:
    async with mesh_of(tmp_path) as (mesh, tasks):
        mesh.show()
        task_id = await submit(tasks, embedding_spec())
        async with asyncio.timeout(NOTICE_SECONDS):
            news = [each async for each in tasks.watch(TENANT, task_id)]
        (piece,) = (each.piece for each in news if each.HasField("piece"))
        assert [list(vector.values) for vector in piece.output.embeddings] == [[1.0, 2.0]]
        assert piece.output.events[-1].finished.receipt.host == "titan"


@pytest.mark.slow("runs whole services")
@pytest.mark.parametrize("shown", ["a mesh without the model", "nothing"])
async def test_task_waits_for_its_pool_and_starts_with_the_first_runner(shown: str, tmp_path: Path) -> None:
    async with mesh_of(tmp_path) as (mesh, tasks):
        if shown != "nothing":
            mesh.show(model=False)
        spec = chat_spec()
        spec.wait_for_model = True
        task_id = await submit(tasks, spec)
        mesh.runner.say(FINISHED)
        async with asyncio.timeout(NOTICE_SECONDS):
            while shown != "nothing" and not (await tasks.get(TENANT, task_id)).waiting_for:
                await let_all_run()
        assert (await tasks.get(TENANT, task_id)).attempt == 0
        mesh.show()
        task, _ = await end_of(tasks, task_id)
        assert (task.state, task.attempt) == (task_pb2.TASK_STATE_COMPLETED, 1)


@pytest.mark.slow("runs whole services")
async def test_task_waiting_for_its_model_is_not_recorded_as_a_failed_request(tmp_path: Path) -> None:
    """Each look for the model was a request of the task's id that had ended with model_not_found."""
    async with mesh_of(tmp_path) as (mesh, tasks):
        mesh.show(model=False)
        spec = chat_spec()
        spec.wait_for_model = True
        task_id = await submit(tasks, spec)
        async with asyncio.timeout(NOTICE_SECONDS):
            while "qwen" not in (await tasks.get(TENANT, task_id)).waiting_for:
                await let_all_run()
        waiting = mesh.requests.find(task_id, 0.0, TENANT)
        assert isinstance(waiting, RecordedTask)
        assert (waiting.attempts, waiting.retry) == ([], None)
        mesh.runner.say(FINISHED)
        mesh.show()
        await end_of(tasks, task_id)
        ended, count = mesh.requests.ended(2, 0.0, TENANT, lambda _: True)
        assert ([each.request_id for each in ended], count) == ([task_id], 1)
        assert ended[0].reason is Reason.UNSPECIFIED


async def test_cancel_reaches_the_runner(tmp_path: Path) -> None:
    async with mesh_of(tmp_path) as (mesh, tasks):
        mesh.show()
        task_id = await submit(tasks)
        await begun(mesh.runner)
        assert (await tasks.cancel(TENANT, task_id)).state == task_pb2.TASK_STATE_CANCELLED
        async with asyncio.timeout(NOTICE_SECONDS):
            await mesh.runner.given_up.wait()
        assert (await end_of(tasks, task_id))[0].state == task_pb2.TASK_STATE_CANCELLED


async def test_task_cancelled_while_queued_for_a_slot_leaves_the_queue(tmp_path: Path) -> None:
    async with mesh_of(tmp_path) as (mesh, tasks):
        mesh.show(slots=1)
        holder = placement_request("r", tenant="bob")
        async with LocalPlacement(mesh.loop).place(holder) as place:
            assert (await place.next_decision()).HasField("granted")
            task_id = await submit(tasks)
            async with asyncio.timeout(NOTICE_SECONDS):
                while not mesh.loop.scheduler.waiting:
                    await let_all_run()
            await tasks.cancel(TENANT, task_id)
            async with asyncio.timeout(NOTICE_SECONDS):
                while mesh.loop.scheduler.waiting:
                    await let_all_run()
        assert not mesh.runner.calls


async def test_slot_granted_to_a_deleted_task_is_freed_immediately(tmp_path: Path) -> None:
    async with mesh_of(tmp_path) as (mesh, tasks):
        mesh.show(slots=1)
        holder = placement_request("r", tenant="bob")
        async with LocalPlacement(mesh.loop).place(holder) as place:
            assert (await place.next_decision()).HasField("granted")
            gone, next_one = await submit(tasks), await submit(tasks)
            async with asyncio.timeout(NOTICE_SECONDS):
                while mesh.loop.scheduler.waiting < 2:
                    await let_all_run()
            # As another router would do it: nobody tells this one.
            store = tasks._calls._servicer._deps.store  # type: ignore[attr-defined]
            assert (await store.cancel(TENANT, gone, SystemClock().utc_now().timestamp()))[1]
        mesh.runner.say(FINISHED)
        task, _ = await end_of(tasks, next_one)
        assert task.state == task_pb2.TASK_STATE_COMPLETED
        assert len(mesh.runner.calls) == 1
        async with asyncio.timeout(NOTICE_SECONDS):
            while mesh.loop.scheduler.running:
                await let_all_run()
