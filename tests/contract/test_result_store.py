"""Images and recordings of tasks, on every kind of database that a router may have: their bounds, and when they go."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kit.refusals import refusal_of
from stored_batches import NEW_FILE, content

from router_svc.durable.files import FileServicer
from router_svc.durable.limits import BatchLimits, ResultLimits, TaskLimits
from router_svc.durable.tasks.spec_validation import checked_task
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_media import TaskMedia
from router_svc.durable.tasks.task_records import TaskLease, TaskOutcome
from router_svc.durable.uploads import UPLOAD_LIMIT_SECONDS
from router_svc.store.database import RouterDatabase
from weft.api.common.v1 import audio_pb2, chat_pb2, image_pb2
from weft.api.router.v1 import file_service_pb2 as pb
from weft.api.router.v1 import task_pb2
from weft.durable.batches import RESULT, TASK_INPUT, FileClient
from weft.durable.tasks import task_error
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

pytest_plugins = ("database_fixtures",)

HOUR = 3600.0


class Store:
    """The files and the tasks of one router."""

    def __init__(self, database: RouterDatabase, clock: FakeClock, **limits: Any) -> None:
        self.clock = clock
        self.files = FileServicer(database, BatchLimits(), clock, results=ResultLimits(**limits))
        self.tasks = SqlTaskStore(database)

    def now(self) -> float:
        return self.clock.utc_now().timestamp()

    async def save(self, size: int = 3, *, tenant: str = "ann", task: str = "", attempt: int = 1) -> pb.File:
        purpose = RESULT if attempt else TASK_INPUT
        new = pb.File(tenant=tenant, name="a.png", purpose=purpose, media_type="image/png", task=task, attempt=attempt)
        return await self.files.save(new, content(bytes(size)))

    async def claimed(self) -> TaskLease:
        """A task that runs."""
        spec = task_pb2.TaskSpec(model="sdxl", image=image_pb2.ImagePayload(prompt="a lighthouse"))
        row = checked_task(spec, TaskLimits(), "spec", tenant="ann", caller="local", created_at=self.now())
        await self.tasks.submit(row)
        return await self.claim(row.task.id)

    async def claim(self, task_id: str) -> TaskLease:
        claim = await self.tasks.claim(task_id, "router-1", self.now(), self.now() + 10 * HOUR)
        assert claim is not None
        return claim

    async def end(self, claim: TaskLease, state: "task_pb2.TaskState.ValueType") -> None:
        failure = None if state == task_pb2.TASK_STATE_COMPLETED else task_error(Reason.INTERNAL, "why")
        assert await self.tasks.end(
            claim, TaskOutcome(state=state, chunks=(), failure=failure, receipt=b""), self.now()
        )

    async def kept(self, *files: pb.File) -> list[bool]:
        """Which of these files are there."""
        found = []
        for file in files:
            try:
                await self.files.get(file.tenant, file.id)
                found.append(True)
            except WeftError:
                found.append(False)
        return found

    async def sweep_later(self) -> None:
        """A sweep, once what was just written counts as left behind."""
        await self.clock.advance(UPLOAD_LIMIT_SECONDS + 1)
        await self.files.sweep()


@asynccontextmanager
async def opened(database_url: str, **limits: Any) -> AsyncIterator[Store]:
    database = RouterDatabase(database_url)
    await database.open()
    store = Store(database, FakeClock(), **limits)
    await store.tasks.start()
    try:
        yield store
    finally:
        await store.files.stop(0)
        await store.tasks.stop()
        await database.close()


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    async with opened(database_url) as store:
        yield store


async def test_result_keeps_its_type_task_and_bytes(store: Store) -> None:
    saved = await store.save(5, task="task-1", attempt=2)
    assert await store.files.get("ann", saved.id) == saved
    assert (saved.purpose, saved.media_type, saved.task, saved.attempt) == (RESULT, "image/png", "task-1", 2)
    assert b"".join([data async for data in store.files.read("ann", saved.id)]) == bytes(5)
    await refusal_of(Reason.NOT_FOUND, store.files.get("bob", saved.id))


async def test_file_list_excludes_results_unless_requested(store: Store) -> None:
    uploaded, result = await store.files.save(NEW_FILE, content(b"a")), await store.save()
    assert [file.id for file in (await FileClient(store.files).list_page("ann")).files] == [uploaded.id]
    assert [file.id for file in (await FileClient(store.files).list_page("ann", purpose=RESULT)).files] == [result.id]


@pytest.mark.parametrize(
    ("limits", "tenants", "reason"),
    [
        ({"max_bytes": 1024}, [("ann", 1025)], Reason.REQUEST_TOO_LARGE),
        ({"max_tenant_bytes": 2048}, [("ann", 1024), ("ann", 1025)], Reason.TOO_MANY_RESOURCES),
        ({"max_total_bytes": 2048}, [("ann", 1024), ("bob", 1025)], Reason.TOO_MANY_RESOURCES),
        ({"max_per_tenant": 1}, [("ann", 1), ("ann", 1)], Reason.TOO_MANY_RESOURCES),
    ],
)
async def test_result_over_a_limit_is_rejected_with_its_reason_and_leaves_nothing(
    database_url: str, limits: dict[str, int], tenants: list[tuple[str, int]], reason: Reason
) -> None:
    async with opened(database_url, **limits) as store:
        *fitting, (tenant, size) = tenants
        for name, bytes_ in fitting:
            await store.save(bytes_, tenant=name)
        before = [len((await FileClient(store.files).list_page(name, purpose=RESULT)).files) for name in ("ann", "bob")]
        await refusal_of(reason, store.save(size, tenant=tenant))
        after = [len((await FileClient(store.files).list_page(name, purpose=RESULT)).files) for name in ("ann", "bob")]
        assert after == before


async def test_results_and_uploads_have_separate_limits(database_url: str) -> None:
    async with opened(database_url, max_tenant_bytes=1024) as store:
        await store.save(1024)
        await store.files.save(NEW_FILE, content(bytes(5000)))
        await refusal_of(Reason.TOO_MANY_RESOURCES, store.files.require_room("ann", RESULT, 1))


async def test_expired_result_is_gone_immediately_and_deleted_by_the_next_sweep(database_url: str) -> None:
    async with opened(database_url, keep_seconds=60.0) as store:
        saved = await store.save()
        await store.clock.advance(59)
        assert await store.kept(saved) == [True]
        await store.clock.advance(1)
        assert await store.kept(saved) == [False]
        await store.files.sweep()
        assert not (await FileClient(store.files).list_page("ann", purpose=RESULT)).files


async def test_inputs_of_an_open_task_outlive_their_expiry_and_are_deleted_at_its_end(database_url: str) -> None:
    async with opened(database_url, keep_seconds=60.0) as store:
        claim = await store.claimed()
        given = await store.save(task=claim.task_id, attempt=0)
        await store.sweep_later()
        assert await store.kept(given) == [True]
        await store.end(claim, task_pb2.TASK_STATE_COMPLETED)
        await store.sweep_later()
        assert await store.kept(given) == [False]


@pytest.mark.parametrize("state", [task_pb2.TASK_STATE_COMPLETED, task_pb2.TASK_STATE_FAILED])
async def test_sweep_keeps_only_results_of_the_completed_attempt(
    store: Store, state: "task_pb2.TaskState.ValueType"
) -> None:
    first = await store.claimed()
    lost = await store.save(task=first.task_id, attempt=first.attempt)
    failure = task_error(Reason.WORKER_LOST, "gone")
    assert await store.tasks.revert(first, failure, receipt=b"", counts=True, now=store.now(), ready_at=store.now())
    second = await store.claim(first.task_id)
    made = await store.save(task=second.task_id, attempt=second.attempt)
    await store.sweep_later()
    assert await store.kept(lost, made) == [False, True]
    await store.end(second, state)
    await store.sweep_later()
    assert await store.kept(made) == [state == task_pb2.TASK_STATE_COMPLETED]


async def test_orphaned_files_are_swept_after_a_grace_period(store: Store) -> None:
    orphan, of_nobody = await store.save(task="task-never", attempt=0), await store.save()
    await store.files.sweep()
    assert await store.kept(orphan, of_nobody) == [True, True]
    await store.sweep_later()
    assert await store.kept(orphan, of_nobody) == [False, True]


async def test_batch_line_references_files_by_id_and_has_none_inline(store: Store) -> None:
    media = TaskMedia(store.files)

    def line(part: chat_pb2.MediaPart) -> task_pb2.TaskSpec:
        return task_pb2.TaskSpec(model="whisper", transcription=audio_pb2.TranscriptionPayload(audio=part))

    named = line(chat_pb2.MediaPart(file_id=(await store.save()).id))
    await media.require_files("ann", named, "lines[0].spec")
    assert named.transcription.audio.media_type == "image/png"
    inline = line(chat_pb2.MediaPart(data=b"RIFF", media_type="audio/wav"))
    words = await refusal_of(Reason.INVALID_ARGUMENT, media.require_files("ann", inline, "lines[3].spec"))
    assert words.startswith("lines[3].spec.payload.audio: ")
    await refusal_of(Reason.NOT_FOUND, media.require_files("bob", named, "lines[0].spec"))


async def test_releasing_some_attempts_deletes_only_their_files(store: Store) -> None:
    saved = [await store.save(task="task-1", attempt=number) for number in (0, 1, 2)]
    other = await store.save(task="task-2", attempt=1)
    await store.files.release("bob", "task-1")
    await store.files.release("ann", "task-1", (0, 1))
    assert await store.kept(*saved, other) == [False, False, True, True]
    await store.files.release("ann", "task-1")
    assert await store.kept(*saved, other) == [False, False, False, True]
