"""Images and recordings of tasks: what is kept of them, where, and what a lost attempt leaves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.refusals import refused
from task_harness import FINISHED, NOTICE_SECONDS, TENANT, TaskBench, task_bench

from router_svc.durable.files import FileServicer
from router_svc.durable.limits import BatchLimits, ResultLimits, TaskLimits
from router_svc.durable.tasks.task_media import TaskMedia
from router_svc.store.database import RouterDatabase
from weft.api.common.v1 import audio_pb2, chat_pb2, event_pb2, image_pb2
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.api.router.v1 import task_pb2
from weft.durable.batches import MEDIA_INPUTS, RESULT, TASK_INPUT, FileClient
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

DIED = WeftError(Reason.WORKER_LOST, "the runner is gone")
PNG = b"\x89PNG" + bytes(100)


class MediaBench:
    """One router's tasks with a file store."""

    def __init__(self, bench: TaskBench, files: FileServicer) -> None:
        self.bench = bench
        self.files = files

    async def named(self, purpose: str) -> list[file_pb.File]:
        return list((await FileClient(self.files).list_page(TENANT, purpose=purpose)).files)

    async def read(self, file_id: str) -> bytes:
        return b"".join([data async for data in self.files.read(TENANT, file_id)])

    async def upload(self, data: bytes, media_type: str = "audio/wav") -> str:
        async def content() -> AsyncIterator[bytes]:
            yield data

        new = file_pb.File(tenant=TENANT, name="talk.wav", purpose=MEDIA_INPUTS[0], media_type=media_type)
        return (await self.files.save(new, content())).id

    async def events(self, task_id: str) -> list[event_pb2.InferenceEvent]:
        """The stored answer."""
        news = await self.bench.watch(task_id).rest()
        return [event for each in news if isinstance(each, task_pb2.TaskPiece) for event in each.output.events]

    async def stored_audio(self, task_id: str) -> chat_pb2.MediaPart:
        return (await self.bench.service.tasks.details(TENANT, task_id)).spec.transcription.audio


@asynccontextmanager
async def media_bench(folder: Path, **limits: Any) -> AsyncIterator[MediaBench]:
    clock = FakeClock()
    database = RouterDatabase(f"sqlite:///{folder / 'router.db'}")
    await database.open()
    files = FileServicer(database, BatchLimits(), clock, results=ResultLimits(**limits))
    try:
        async with task_bench(clock=clock, media=TaskMedia(files), limits=TaskLimits(retry_delay_seconds=1.0)) as bench:
            yield MediaBench(bench, files)
    finally:
        await files.stop(NOTICE_SECONDS)
        await database.close()


def image_spec(*sources: chat_pb2.MediaPart) -> task_pb2.TaskSpec:
    return task_pb2.TaskSpec(model="sdxl", image=image_pb2.ImagePayload(prompt="a lighthouse", images=sources))


def transcription_spec(part: chat_pb2.MediaPart) -> task_pb2.TaskSpec:
    return task_pb2.TaskSpec(model="whisper", transcription=audio_pb2.TranscriptionPayload(audio=part))


def speech_spec() -> task_pb2.TaskSpec:
    return task_pb2.TaskSpec(model="piper", speech=audio_pb2.SpeechPayload(input="Hello", voice="amy"))


def picture(data: bytes = PNG, index: int = 0) -> event_pb2.InferenceEvent:
    image = chat_pb2.MediaPart(data=data, media_type="image/png")
    return event_pb2.InferenceEvent(image=image_pb2.GeneratedImage(image=image, index=index, seed=7))


def step(done: float, total: float = 20) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(
        work_progress=event_pb2.WorkProgress(unit=event_pb2.WORK_UNIT_STEPS, done=done, total=total)
    )


def sound(data: bytes, media_type: str = "") -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(speech=audio_pb2.SpeechPart(data=data, media_type=media_type))


async def test_image_is_stored_as_a_file_and_its_task_has_the_file_id(tmp_path: Path) -> None:
    async with media_bench(tmp_path) as media:
        task, call = await media.bench.begun(image_spec())
        call.say(picture(index=0), picture(PNG + b"2", index=1))
        call.finish()
        await media.bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        images = [event.image for event in await media.events(task.id) if event.HasField("image")]
        assert [(image.index, image.seed, image.image.data) for image in images] == [(0, 7, b""), (1, 7, b"")]
        assert [await media.read(image.image.file_id) for image in images] == [PNG, PNG + b"2"]
        (file, _) = await media.named(RESULT)
        assert (file.media_type, file.task, file.attempt, file.name) == ("image/png", task.id, 1, "result.png")
        assert sum(len(piece.output) for piece in media.bench.store.pieces(task.id)) < 500


async def test_speech_chunks_are_joined_into_one_recording(tmp_path: Path) -> None:
    async with media_bench(tmp_path) as media:
        task, call = await media.bench.begun(speech_spec())
        call.say(sound(b"RIFF", "audio/wav"))
        call.say(sound(b"1234"))
        call.finish()
        await media.bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        spoken, end = await media.events(task.id)
        assert (spoken.speech.media_type, end) == ("audio/wav", FINISHED)
        assert await media.read(spoken.speech.file_id) == b"RIFF1234"


async def test_lost_attempt_after_an_image_leaves_nothing_and_the_task_has_one_result(tmp_path: Path) -> None:
    async with media_bench(tmp_path) as media:
        task, call = await media.bench.begun(image_spec())
        call.say(step(10), picture(b"\x89PNG lost"))
        call.fail(DIED)
        await media.bench.until(task.id, task_pb2.TASK_STATE_PENDING)
        await media.bench.advance(1)
        again = await media.bench.calls.next()
        assert await media.named(RESULT) == []
        await again.grant()
        again.say(picture())
        again.finish()
        await media.bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        (file,) = await media.named(RESULT)
        assert (file.attempt, await media.read(file.id)) == (2, PNG)
        assert await media.bench.attempts(task.id) == ["WORKER_LOST", "UNSPECIFIED"]


async def test_previews_and_progress_are_not_stored(tmp_path: Path) -> None:
    async with media_bench(tmp_path) as media:
        task, call = await media.bench.begun(image_spec())
        preview = image_pb2.PartialImage(image=chat_pb2.MediaPart(data=PNG, media_type="image/png"))
        call.say(step(1), event_pb2.InferenceEvent(partial_image=preview))
        call.say(picture())
        call.finish()
        await media.bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        assert [event.WhichOneof("event") for event in await media.events(task.id)] == ["image", "finished"]


async def test_progress_is_shown_while_running_and_coalesced_for_watchers(tmp_path: Path) -> None:
    async with media_bench(tmp_path) as media:
        task, call = await media.bench.begun(image_spec())
        watch = media.bench.watch(task.id)
        first = await watch.next()
        assert isinstance(first, task_pb2.Task)
        assert not first.HasField("progress")
        for done in (1, 2, 3):
            call.say(step(done))
        await media.bench.settle()
        assert (await media.bench.get(task.id)).progress.done == 3
        await media.bench.advance(0.25)
        moved = await watch.next()
        assert isinstance(moved, task_pb2.Task)
        assert (moved.progress.unit, moved.progress.done, moved.progress.total) == (event_pb2.WORK_UNIT_STEPS, 3, 20)
        listed = await media.bench.service.tasks.details(TENANT, task.id)
        assert listed.task.progress.done == 3
        call.say(picture())
        call.finish()
        ended = await media.bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        assert not ended.HasField("progress")
        await watch.close()


async def test_inline_input_is_stored_in_files_until_the_task_ends(tmp_path: Path) -> None:
    async with media_bench(tmp_path) as media:
        part = chat_pb2.MediaPart(data=b"RIFF" * 1000, media_type="audio/wav")
        task = await media.bench.submit(transcription_spec(part))
        (given,) = await media.named(TASK_INPUT)
        assert (given.task, given.attempt, await media.read(given.id)) == (task.id, 0, part.data)
        stored = await media.stored_audio(task.id)
        assert (stored.data, stored.file_id, stored.media_type) == (b"", given.id, "audio/wav")
        await media.bench.service.tasks.cancel(TENANT, task.id)
        assert await media.named(TASK_INPUT) == []


async def test_deleting_a_task_deletes_its_results(tmp_path: Path) -> None:
    async with media_bench(tmp_path) as media:
        task, call = await media.bench.begun(image_spec())
        call.say(picture())
        call.finish()
        await media.bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        await media.bench.service.tasks.delete(TENANT, task.id)
        assert await media.named(RESULT) == []


async def test_same_submission_returns_the_same_task_and_stores_its_recording_once(tmp_path: Path) -> None:
    async with media_bench(tmp_path) as media:
        part = chat_pb2.MediaPart(data=b"RIFF", media_type="audio/wav")
        first = await media.bench.submit(transcription_spec(part), key="k")
        again = await media.bench.submit(transcription_spec(part), key="k")
        assert first.id == again.id
        other = chat_pb2.MediaPart(data=b"RIFX", media_type="audio/wav")
        with refused(Reason.IDEMPOTENCY_CONFLICT):
            await media.bench.submit(transcription_spec(other), key="k")
        assert len(await media.named(TASK_INPUT)) == 1


async def test_tenant_file_gets_its_media_type_and_a_foreign_file_is_not_found(tmp_path: Path) -> None:
    async with media_bench(tmp_path) as media:
        file_id = await media.upload(b"RIFF")
        task = await media.bench.submit(transcription_spec(chat_pb2.MediaPart(file_id=file_id)))
        stored = await media.stored_audio(task.id)
        assert (stored.file_id, stored.media_type) == (file_id, "audio/wav")
        with pytest.raises(WeftError) as refused:
            await media.bench.submit(transcription_spec(chat_pb2.MediaPart(file_id=file_id)), tenant="bob")
        assert (refused.value.reason, refused.value.metadata["field"]) == (Reason.NOT_FOUND, "spec.payload.audio")


async def test_input_over_the_limit_is_rejected_by_field(tmp_path: Path) -> None:
    async with media_bench(tmp_path, max_input_bytes=1024) as media:
        source = chat_pb2.MediaPart(data=bytes(600), media_type="image/png")
        with refused(Reason.REQUEST_TOO_LARGE, field="spec.payload.images[1]"):
            await media.bench.submit(image_spec(source, source))
        assert await media.named(TASK_INPUT) == []


async def test_full_store_rejects_the_task_before_the_work(tmp_path: Path) -> None:
    async with media_bench(tmp_path, max_per_tenant=1) as media:
        task, call = await media.bench.begun(image_spec())
        call.say(picture())
        call.finish()
        await media.bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        with refused(Reason.TOO_MANY_RESOURCES):
            await media.bench.submit(image_spec())


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_bytes": 1024}, Reason.REQUEST_TOO_LARGE), ({"max_tenant_bytes": 1024}, Reason.TOO_MANY_RESOURCES)],
)
async def test_result_that_does_not_fit_fails_the_task_immediately(
    tmp_path: Path, limits: dict[str, int], reason: Reason
) -> None:
    async with media_bench(tmp_path, **limits) as media:
        task, call = await media.bench.begun(image_spec())
        call.say(picture(bytes(1025)))
        ended = await media.bench.until(task.id, task_pb2.TASK_STATE_FAILED)
        assert (Reason(ended.error.reason), ended.attempt) == (reason, 1)
        assert await media.named(RESULT) == []


async def test_image_tasks_are_rejected_without_a_file_store() -> None:
    async with task_bench() as bench:
        with refused(Reason.UNSUPPORTED_OPERATION):
            await bench.submit(image_spec())
