"""Files and batches over a channel as in the process: broken streams, whose they are, what a crash left."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from kit.messages import LineCounts, counts_of
from kit.serving import served
from structlog.testing import capture_logs

from router_svc.durable.batches.batch_servicer import BatchService
from router_svc.durable.files import FileServicer
from router_svc.durable.limits import BatchLimits, TaskLimits
from router_svc.durable.tasks.task_events import TaskEventBus
from router_svc.durable.tasks.task_records import ItemEnded
from router_svc.store.database import RouterDatabase
from weft.api.common.v1 import chat_pb2, event_pb2
from weft.api.router.v1 import (
    batch_service_pb2,
    batch_service_pb2_grpc,
    file_service_pb2,
    file_service_pb2_grpc,
    task_pb2,
)
from weft.dispatch.agents import KnownNames
from weft.dispatch.fleet import FleetView
from weft.durable.batches import MAX_LINES_PER_MESSAGE, MAX_PIECE_BYTES, BatchClient, FileClient
from weft.kernel.access.principal import LOCAL, MESH_ACCESS, Access, Principal, Resource, Role
from weft.kernel.access.rpc_auth import _CALLER, RpcGuard
from weft.kernel.channels.rpc import error_from_call, new_server, open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.timestamps import stamp_of
from weft_app.compose.grpc_host import GrpcHost
from weft_testing.fake_clock import FakeClock

NEW_FILE = file_service_pb2.File(tenant="ann", name="lines.jsonl", purpose="batch")
SILENCE_SECONDS = 0.05
ANNS_KEY = Principal(
    name="key:ann", tenant="ann", access=frozenset({Access(Resource.INFERENCE, Role.CREATE)}), names_tenants=False
)
GATEWAY = Principal(name="key:gateway", access=frozenset({MESH_ACCESS}), names_tenants=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Where files and batches are kept."""

    files: FileClient
    batches: BatchClient
    path: Path
    events: TaskEventBus
    channel: grpc.aio.Channel | None = None

    def count(self, table: str) -> int:
        with sqlite3.connect(self.path) as reader:
            return int(reader.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    def write(self, statement: str) -> None:
        with sqlite3.connect(self.path) as writer:
            writer.execute("PRAGMA foreign_keys=ON")
            writer.execute(statement)


def built(
    path: Path, clock: FakeClock | None = None, events: TaskEventBus | None = None, **limits: Any
) -> BatchService:
    database = RouterDatabase(f"sqlite:///{path}")
    return BatchService(database, BatchLimits(**limits), TaskLimits(), events or TaskEventBus(), clock=clock)


@asynccontextmanager
async def in_process(path: Path, clock: FakeClock | None = None, **limits: Any) -> AsyncIterator[Kept]:
    events = TaskEventBus()
    service = built(path, clock, events, **limits)
    await service.start()
    try:
        yield Kept(files=service.files, batches=service.batches, path=path, events=events)
    finally:
        await service.stop(1)


@asynccontextmanager
async def behind_a_channel(path: Path, guard: RpcGuard | None = None) -> AsyncIterator[Kept]:
    host = GrpcHost(guard=guard)
    address = host.bind(f"unix:{path.parent}/s")
    events = TaskEventBus()
    await host.start([built(path, events=events)])
    channel = open_channel(address)
    try:
        files, batches = FileClient(channel), BatchClient(channel)
        yield Kept(files=files, batches=batches, path=path, events=events, channel=channel)
    finally:
        await channel.close()
        await host.stop(1)


BOTH = pytest.mark.parametrize("make", [in_process, behind_a_channel])
Make = Callable[[Path], Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "router.db"


def new_batch(**fields: Any) -> batch_service_pb2.Batch:
    known: dict[str, Any] = {
        "tenant": "ann",
        "endpoint": "/v1/chat/completions",
        "input_file": "file-1",
        "window_end_time": stamp_of(datetime.now(UTC) + timedelta(days=1)),
        "metadata": {"for": "Ännchen"},
    }
    return batch_service_pb2.Batch(**(known | fields))


def line(name: str, origin: bytes = b"{}") -> batch_service_pb2.BatchLine:
    content = [chat_pb2.ContentPart(text="hello")]
    payload = chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=content)])
    return batch_service_pb2.BatchLine(
        custom_id=name, spec=task_pb2.TaskSpec(model="qwen", chat=payload, origin=origin)
    )


async def stream(*given: Any) -> AsyncIterator[Any]:
    for each in given:
        yield each


async def refused(reason: Reason, awaited: Awaitable[object]) -> str:
    with pytest.raises(WeftError) as found:
        await awaited
    assert found.value.reason is reason, found.value
    return found.value.message


async def said(call: Any) -> WeftError:
    with pytest.raises(grpc.aio.AioRpcError) as found:
        await call
    return error_from_call(found.value, Reason.SERVICE_UNAVAILABLE)


async def read(files: FileClient, file_id: str, tenant: str = "ann") -> bytes:
    return b"".join([data async for data in files.read(tenant, file_id)])


def output(text: str) -> task_pb2.TaskOutput:
    return task_pb2.TaskOutput(events=[event_pb2.InferenceEvent(delta=event_pb2.Delta(text=text))])


@pytest.mark.slow("runs whole services")
@BOTH
async def test_rejection_is_returned_while_the_upload_continues(make: Make, path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(MAX_PIECE_BYTES)

    async with make(path) as kept:
        bad = file_service_pb2.File(tenant="ann", name="a/b", purpose="batch")
        assert "file.name" in await refused(Reason.INVALID_ARGUMENT, kept.files.save(bad, endless()))

        async def endless_lines() -> AsyncIterator[batch_service_pb2.BatchLine]:
            while True:
                yield line("the same")

        words = await refused(Reason.INVALID_ARGUMENT, kept.batches.create(new_batch(), endless_lines()))
        assert words.startswith("lines[1].custom_id: ")


@BOTH
async def test_upload_with_a_failing_source_stores_nothing_and_reports_why(make: Make, path: Path) -> None:
    async def breaking() -> AsyncIterator[bytes]:
        yield bytes(3 * MAX_PIECE_BYTES)
        raise ConnectionError("the caller left")

    async def breaking_lines() -> AsyncIterator[batch_service_pb2.BatchLine]:
        for number in range(2 * MAX_LINES_PER_MESSAGE + 1):
            yield line(str(number))
        raise ConnectionError("the caller left")

    async with make(path) as kept:
        with pytest.raises(ConnectionError):
            await kept.files.save(NEW_FILE, breaking())
        with pytest.raises(ConnectionError):
            await kept.batches.create(new_batch(), breaking_lines())
        # Behind a channel nobody waits for the removal.
        while kept.count("files") or kept.count("batches"):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
    assert kept.count("file_pieces") == kept.count("tasks") == 0


@BOTH
async def test_cancelled_upload_stores_nothing(make: Make, path: Path) -> None:
    waiting = asyncio.Event()

    async def stalling() -> AsyncIterator[bytes]:
        yield bytes(3 * MAX_PIECE_BYTES)
        waiting.set()
        await asyncio.Event().wait()

    async with make(path) as kept:
        saving = asyncio.create_task(kept.files.save(NEW_FILE, stalling()))
        await waiting.wait()
        while not kept.count("file_pieces"):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        # Behind a channel nobody waits for the removal.
        while kept.count("files"):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
    assert kept.count("file_pieces") == 0


async def test_stream_that_ends_without_its_byte_count_stores_nothing(path: Path) -> None:
    pb, batch_pb = file_service_pb2, batch_service_pb2
    file, whole = pb.File(name="a", purpose="batch"), pb.UploadFileRequest(file=pb.File(byte_count=3))
    batch = batch_pb.Batch(endpoint="/v1/chat/completions")
    batch.window_end_time.FromDatetime(datetime.now(UTC) + timedelta(days=1))
    first, lines = batch_pb.CreateBatchRequest(batch=batch), [batch_pb.BatchLine(custom_id="a", spec=line("a").spec)]
    async with behind_a_channel(path) as kept:
        files: Any = file_service_pb2_grpc.FileServiceStub(kept.channel)  # type: ignore[arg-type] # it has one
        batches: Any = batch_service_pb2_grpc.BatchServiceStub(kept.channel)  # type: ignore[arg-type] # it has one
        start, data = pb.UploadFileRequest(file=file), pb.UploadFileRequest(data=b"abc")
        for broken in ([], [start], [start, data]):
            found = await said(files.UploadFile(stream(*broken)))
            assert found.reason is Reason.CANCELLED
        for wrong in ([start, whole, data], [start, data, data, whole]):
            found = await said(files.UploadFile(stream(*wrong)))
            assert (found.reason, found.metadata["field"]) == (Reason.INVALID_ARGUMENT, "file.byte_count")
        for cut in ([], [first, batch_pb.CreateBatchRequest(lines=lines)]):
            found = await said(batches.CreateBatch(stream(*cut)))
            assert found.reason is Reason.CANCELLED
        wrong_end = batch_pb.CreateBatchRequest(lines=lines, batch=batch_pb.Batch(total_count=2))
        found = await said(batches.CreateBatch(stream(first, wrong_end)))
        assert (found.reason, found.metadata["field"]) == (Reason.INVALID_ARGUMENT, "batch.total_count")
        assert [kept.count(table) for table in ("files", "file_pieces", "batches", "tasks")] == [0] * 4
        # What is right is taken, in as few messages as may be.
        file.byte_count = 3
        assert (await files.UploadFile(stream(pb.UploadFileRequest(file=file, data=b"abc")))).file.byte_count == 3
        batch.total_count = 1
        made = await batches.CreateBatch(stream(batch_pb.CreateBatchRequest(batch=batch, lines=lines)))
        assert (made.batch.tenant, made.batch.total_count) == ("default", 1)


async def test_oversized_message_is_rejected(path: Path) -> None:
    pb, batch_pb = file_service_pb2, batch_service_pb2
    async with behind_a_channel(path) as kept:
        files: Any = file_service_pb2_grpc.FileServiceStub(kept.channel)  # type: ignore[arg-type] # it has one
        start = pb.UploadFileRequest(file=pb.File(name="a", purpose="batch"))
        data = pb.UploadFileRequest(data=bytes(MAX_PIECE_BYTES + 1))
        found = await said(files.UploadFile(stream(start, data)))
        assert (found.reason, found.metadata["field"]) == (Reason.INVALID_ARGUMENT, "data")
        batches: Any = batch_service_pb2_grpc.BatchServiceStub(kept.channel)  # type: ignore[arg-type] # it has one
        batch = batch_pb.Batch(endpoint="/v1/chat/completions")
        no_window = await said(batches.CreateBatch(stream(batch_pb.CreateBatchRequest(batch=batch))))
        assert no_window.metadata["field"] == "batch.window_end_time"
        batch.window_end_time.FromDatetime(datetime.now(UTC) + timedelta(days=1))
        lines = [batch_pb.BatchLine()] * (MAX_LINES_PER_MESSAGE + 1)
        found = await said(batches.CreateBatch(stream(batch_pb.CreateBatchRequest(batch=batch, lines=lines))))
        assert (found.reason, found.metadata["field"]) == (Reason.INVALID_ARGUMENT, "lines")


@pytest.mark.slow("runs whole services")
@BOTH
async def test_batch_is_created_counted_cancelled_and_its_results_are_written(make: Make, path: Path) -> None:
    async with make(path) as kept:
        names = [f"line-{number}" for number in range(MAX_LINES_PER_MESSAGE + 3)]
        made = await kept.batches.create(new_batch(), stream(*(line(name, origin=name.encode()) for name in names)))
        assert (made.state, counts_of(made), dict(made.metadata)) == (
            batch_service_pb2.BATCH_STATE_IN_PROGRESS,
            LineCounts(total=len(names)),
            {"for": "Ännchen"},
        )
        found = await kept.batches.get("ann", made.id)
        assert found == made
        kept.write(
            f"UPDATE tasks SET state = {task_pb2.TASK_STATE_COMPLETED:d}, attempt = 1, ended_at = 1e9 WHERE line = 1"
        )
        chunks = ", ".join(
            f"((SELECT id FROM tasks WHERE line = 1), 1, {index}, 1, X'{output(text).SerializeToString().hex()}')"
            for index, text in enumerate(("well", " done"), start=1)
        )
        kept.write(f"INSERT INTO task_pieces VALUES {chunks}")
        await refused(Reason.RESOURCE_IN_USE, kept.batches.finish("ann", made.id, output_file="", error_file=""))
        found = await kept.batches.cancel("ann", made.id)
        assert counts_of(found) == LineCounts(total=len(names), completed=1, cancelled=len(names) - 1)
        assert found.HasField("cancel_time")
        results = [result async for result in kept.batches.results("ann", made.id)]
        assert [(result.custom_id, result.origin) for result in results] == [(name, name.encode()) for name in names]
        assert [result.outputs for result in results[:3]] == [(), (output("well"), output(" done")), ()]
        assert results[1].task.state == task_pb2.TASK_STATE_COMPLETED
        file = await kept.files.save(
            file_service_pb2.File(tenant="ann", name="o", purpose="batch_output"), stream(b"{}")
        )
        finished = await kept.batches.finish("ann", made.id, output_file=file.id, error_file="")
        assert (finished.state, finished.output_file) == (batch_service_pb2.BATCH_STATE_FINISHED, file.id)
        page = await kept.batches.list_page("ann", limit=1)
        assert (list(page.batches), page.has_more) == ([finished], False)


@BOTH
async def test_finished_batch_is_assigned_to_one_writer_and_reassigned_if_it_leaves(make: Make, path: Path) -> None:
    """It was found only when a caller asked for the batch."""
    async with make(path) as kept:
        made = await kept.batches.create(
            new_batch(result_base="https://weft.example.org"), stream(line("a"), line("b"))
        )
        async with aclosing(kept.batches.ended()) as first, aclosing(kept.batches.ended()) as second:
            waiting = [asyncio.ensure_future(anext(each)) for each in (first, second)]
            await asyncio.sleep(SILENCE_SECONDS)
            for number in (0, 1):
                kept.write(f"UPDATE tasks SET state = 3, ended_at = 1e9 WHERE line = {number}")
                kept.events.publish(ItemEnded(made.id))
                await asyncio.sleep(0)
            done, left = await asyncio.wait(waiting, timeout=10, return_when=asyncio.FIRST_COMPLETED)
            (handed,) = [each.result() for each in done]
            assert (handed.id, handed.result_base) == (made.id, "https://weft.example.org")
            assert (handed.state, handed.completed_count) == (batch_service_pb2.BATCH_STATE_FINALIZING, 2)
            problem = batch_service_pb2.BatchLineError(code="too_many_resources", message="full")
            told = await kept.batches.finish("ann", made.id, problem=problem)
            assert told.problem == (await kept.batches.get("ann", made.id)).problem == problem
            for each in left:
                each.cancel()
            await asyncio.wait(left)
        finished = await kept.batches.finish("ann", made.id)
        assert (finished.state, finished.HasField("problem")) == (batch_service_pb2.BATCH_STATE_FINISHED, False)


@BOTH
async def test_batch_waiting_for_a_writer_is_reassigned_after_a_restart_and_when_its_writer_leaves(
    make: Make, path: Path
) -> None:
    async with make(path) as kept:
        made = await kept.batches.create(new_batch(), stream(line("a")))
        kept.write(f"UPDATE tasks SET state = 3, ended_at = {datetime.now(UTC).timestamp()}")
    async with make(path) as kept:
        for _ in range(2):
            async with asyncio.timeout(10), aclosing(kept.batches.ended()) as ended:
                assert (await anext(ended)).id == made.id


class Doorkeeper(RpcGuard):
    """Believes a call who it is of."""

    def check(self, method: str, context: Any) -> None:
        who = dict(context.invocation_metadata()).get("who", "")
        _CALLER.set({"ann": ANNS_KEY, "gateway": GATEWAY}.get(who, LOCAL))


async def test_key_is_limited_to_its_tenant_and_cannot_write_results(path: Path) -> None:
    pb, batch_pb = file_service_pb2, batch_service_pb2
    ann, gateway = (("who", "ann"),), (("who", "gateway"), ("x-tenant-id", "bob"))
    async with behind_a_channel(path, Doorkeeper()) as kept:
        files: Any = file_service_pb2_grpc.FileServiceStub(kept.channel)  # type: ignore[arg-type] # it has one
        batches: Any = batch_service_pb2_grpc.BatchServiceStub(kept.channel)  # type: ignore[arg-type] # it has one
        results = pb.UploadFileRequest(file=pb.File(name="a", purpose="batch_output", byte_count=1), data=b"a")
        found = await said(files.UploadFile(stream(results), metadata=ann))
        assert found.reason is Reason.PERMISSION_DENIED
        assert (await files.UploadFile(stream(results), metadata=gateway)).file.tenant == "bob"
        upload = pb.UploadFileRequest(file=pb.File(name="a", purpose="batch", byte_count=1), data=b"a")
        assert (await files.UploadFile(stream(upload), metadata=ann)).file.tenant == "ann"
        others = (*ann, ("x-tenant-id", "bob"))
        assert (await said(files.UploadFile(stream(upload), metadata=others))).reason is Reason.PERMISSION_DENIED
        assert (await said(batches.GetBatch(batch_pb.GetBatchRequest(id="a"), metadata=others))).reason is (
            Reason.PERMISSION_DENIED
        )
        batch = batch_pb.Batch(endpoint="/v1/chat/completions", total_count=1)
        batch.window_end_time.FromDatetime(datetime.now(UTC) + timedelta(days=1))
        spec = line("a").spec
        spec.options.allow_remote = True
        request = batch_pb.CreateBatchRequest(batch=batch, lines=[batch_pb.BatchLine(custom_id="a", spec=spec)])
        found = await said(batches.CreateBatch(stream(request), metadata=ann))
        assert (found.reason, "remote:create" in found.message) == (Reason.PERMISSION_DENIED, True)
        assert (kept.count("files"), kept.count("batches"), kept.count("tasks")) == (2, 0, 0)


async def test_incomplete_uploads_of_an_earlier_run_are_removed_at_router_start(path: Path) -> None:
    clock = FakeClock()
    async with in_process(path, clock) as kept:
        window_ends_at = clock.utc_now() + timedelta(days=1)
        await kept.files.save(NEW_FILE, stream(b"a"))
        await kept.batches.create(new_batch(window_end_time=window_ends_at), stream(line("a")))
        kept.write("UPDATE files SET is_whole = false")
        kept.write("UPDATE batches SET state = 0")
        kept.write("UPDATE tasks SET state = 0")
        file = await kept.files.save(NEW_FILE, stream(b"b"))
        batch = await kept.batches.create(new_batch(window_end_time=window_ends_at), stream(line("a")))
    await clock.advance(1)
    async with in_process(path, clock) as kept:
        assert [kept.count(table) for table in ("files", "file_pieces", "batches", "tasks", "task_specs")] == [1] * 5
        assert await read(kept.files, file.id) == b"b"
        assert (await kept.batches.get("ann", batch.id)).state == batch_service_pb2.BATCH_STATE_IN_PROGRESS


async def test_concurrent_uploads_and_creations_are_limited(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router_svc.durable.files.MAX_UPLOADS", 1)
    monkeypatch.setattr("router_svc.durable.batches.batch_servicer.MAX_CREATIONS", 1)
    waiting, go_on = asyncio.Event(), asyncio.Event()

    async def slow(last: Any) -> AsyncIterator[Any]:
        waiting.set()
        await go_on.wait()
        yield last

    async with in_process(path) as kept:
        for first, second in (
            (kept.files.save(NEW_FILE, slow(b"a")), lambda: kept.files.save(NEW_FILE, stream(b"b"))),
            (
                kept.batches.create(new_batch(), slow(line("a"))),
                lambda: kept.batches.create(new_batch(), stream(line("b"))),
            ),
        ):
            running = asyncio.ensure_future(first)
            await waiting.wait()
            await refused(Reason.TOO_MANY_RESOURCES, second())
            go_on.set()
            await running
            await second()
            waiting.clear()
            go_on.clear()


async def test_failed_sweep_is_logged_and_retried(path: Path) -> None:
    clock = FakeClock()
    async with in_process(path, clock, keep_file_seconds=200.0) as kept:
        await kept.files.save(NEW_FILE, stream(b"a"))
        await clock.wait_for_sleepers(1)
        kept.write("ALTER TABLE files RENAME TO elsewhere")
        with capture_logs() as lines:
            await clock.advance(301, sleepers=1)
        told = [line for line in lines if line["event"] == "not swept"]
        assert [(line["kind"], line["reason"], line["log_level"]) for line in told] == [
            ("files", "SERVICE_UNAVAILABLE", "error")
        ]
        kept.write("ALTER TABLE elsewhere RENAME TO files")
        await clock.advance(300, sleepers=1)
        assert kept.count("files") == 0


class SilentServices(grpc.GenericRpcHandler):
    """Every service; they hear, and say nothing."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        return grpc.stream_stream_rpc_method_handler(self._hear)

    async def _hear(self, requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for _request in requests:
            self.called.set()
        await asyncio.Event().wait()
        yield b""


@pytest.mark.slow("kills or restarts a service")
async def test_silent_or_stopping_store_behind_a_channel_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, server = SilentServices(), new_server()
    server.add_generic_rpc_handlers((silent,))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    async with open_channel(f"unix:{tmp_path}/s") as channel:
        with monkeypatch.context() as patch:
            patch.setattr("weft.durable.store_calls.COMMIT_TIMEOUT_SECONDS", SILENCE_SECONDS)
            files = FileClient(channel, timeout_seconds=SILENCE_SECONDS)
            batches = BatchClient(channel, timeout_seconds=SILENCE_SECONDS)
            for asked in (
                files.get("ann", "file-1"),
                files.save(NEW_FILE, stream(b"a")),
                read(files, "file-1"),
                batches.get("ann", "batch-1"),
                anext(batches.results("ann", "batch-1")),
            ):
                await refused(Reason.SERVICE_UNAVAILABLE, asked)
        silent.called.clear()
        uploading = asyncio.create_task(FileClient(channel).save(NEW_FILE, stream(b"a")))
        await silent.called.wait()
        await server.stop(None)
        await refused(Reason.SERVICE_UNAVAILABLE, uploading)


async def test_upload_from_a_silent_caller_times_out(tmp_path: Path) -> None:
    database = RouterDatabase("sqlite://")
    files = FileServicer(database, BatchLimits(), FakeClock(), idle_seconds=SILENCE_SECONDS)
    await database.open()
    add = file_service_pb2_grpc.add_FileServiceServicer_to_server
    async with served(tmp_path / "s", (add, files)) as channel:
        stub: Any = file_service_pb2_grpc.FileServiceStub(channel)
        call = stub.UploadFile()
        await call.write(file_service_pb2.UploadFileRequest(file=file_service_pb2.File(name="a", purpose="batch")))
        found = await said(call)
        assert (found.reason, "sent nothing" in found.message) == (Reason.DEADLINE_EXCEEDED, True)
    await files.stop(1)
    await database.close()


class SlowFiles(FileServicer):
    """Accepts the first chunk when the test allows it."""

    def __init__(self) -> None:
        self.called, self.go_on = asyncio.Event(), asyncio.Event()
        self._idle_seconds = 60.0

    async def save(self, new: file_service_pb2.File, content: AsyncIterator[bytes]) -> file_service_pb2.File:
        self.called.set()
        await self.go_on.wait()
        return file_service_pb2.File(id="file-1", byte_count=sum([len(data) async for data in content]))


async def test_slow_store_write_is_awaited_beyond_the_response_timeout(tmp_path: Path) -> None:
    """A store on a slow disk gets the time that it needs, as long as it makes progress."""
    slow, content = SlowFiles(), [bytes(MAX_PIECE_BYTES)] * 16
    async with served(tmp_path / "s", (file_service_pb2_grpc.add_FileServiceServicer_to_server, slow)) as channel:
        files = FileClient(channel, timeout_seconds=SILENCE_SECONDS)
        saving = asyncio.create_task(files.save(NEW_FILE, stream(*content)))
        await slow.called.wait()
        over, _ = await asyncio.wait({saving}, timeout=4 * SILENCE_SECONDS)
        assert not over
        slow.go_on.set()
        assert (await saving).byte_count == len(content) * MAX_PIECE_BYTES


class NoMesh:
    """A mesh that has nothing."""

    view = FleetView(1, {}, {})


async def test_line_for_an_unknown_model_is_rejected_by_number_and_nothing_is_stored(path: Path) -> None:
    """The batch was accepted, and in progress until its window ended."""
    database = RouterDatabase(f"sqlite:///{path}")
    service = BatchService(database, BatchLimits(), TaskLimits(), TaskEventBus(), names=KnownNames(NoMesh()))
    await service.start()
    try:
        waits, misspelt = line("a"), line("b")
        waits.spec.wait_for_model = True
        words = await refused(Reason.MODEL_NOT_FOUND, service.batches.create(new_batch(), stream(waits, misspelt)))
        assert words.startswith("lines[1].spec.model: there is no model, pool, agent, route or workflow qwen")
        assert (await service.batches.create(new_batch(), stream(waits))).total_count == 1
    finally:
        await service.stop(1)
