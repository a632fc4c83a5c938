"""Images and recordings of tasks: inputs and results are stored in files, not in task rows.

Inline inputs become files of the task, which are read again when a slot is granted. Results become files of their
attempt before the event that refers to them is written. A lost attempt leaves unreferenced files, which are deleted
with the attempt or by a sweep.
"""

import asyncio
from collections.abc import Container, Sequence
from dataclasses import replace

from router_svc.durable.files import FileServicer
from router_svc.durable.tasks.task_records import NewTask, TaskLease
from weft.api.common.v1 import audio_pb2, chat_pb2, event_pb2
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.api.router.v1 import task_pb2
from weft.durable.batches import MAX_PIECE_BYTES, RESULT, TASK_INPUT
from weft.durable.media import fill_inputs, media_parts, pieces_of
from weft.durable.tasks import TaskPayload, payload_of
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock

log = get_logger("weft.tasks")

FIRST_WRITE_PAUSE_SECONDS = 0.1
"""Pause before retrying a failed write; doubles ..."""
MAX_WRITE_PAUSE_SECONDS = 2.0
"""... up to this."""
WRITE_PATIENCE_SECONDS = 300.0
"""After this long without a database a result is dropped and the task is retried."""
MAX_SAVED_AT_ONCE = 16
"""Maximum results that a router writes concurrently."""
INPUTS: Container[int] = (0,)
"""The attempt number of inputs."""
_NOT_KEPT = frozenset({"queued", "loading", "progress", "work_progress", "partial_image", None})
"""Events that are not stored: waiting and progress are transient, and unknown kinds could not be read later."""
_SUFFIXES = {
    "audio/flac": "flac",
    "audio/mpeg": "mp3",
    "audio/ogg": "ogg",
    "audio/wav": "wav",
    "image/jpeg": "jpg",
    "image/png": "png",
    "image/webp": "webp",
}


class ResultsFullError(WeftError):
    """A result did not fit into the result store; another attempt would waste the same work."""


class TaskMedia:
    """The images and recordings of a router's tasks."""

    def __init__(self, files: FileServicer | None) -> None:
        """None: there is no file store, and tasks with images or recordings are refused."""
        self._files = files
        self._saving = asyncio.Semaphore(MAX_SAVED_AT_ONCE)
        self._given: set[str] = set()
        """Tasks running here that have input files."""

    async def accepted(self, new: NewTask, spec: task_pb2.TaskSpec, field: str) -> NewTask:
        """Returns a new task with its inputs in files, which are checked and get their media type.

        Raises NOT_FOUND and REQUEST_TOO_LARGE naming the field, TOO_MANY_RESOURCES if the result store is full.
        """
        payload = payload_of(spec)
        if not is_of_media(payload):
            return new
        files = self._required()
        light = task_pb2.TaskSpec.FromString(new.spec)
        parts = media_parts(payload_of(light))
        await self._require_inputs(new.task.tenant, parts, field)
        # Report a full store before the work rather than after it.
        await files.require_room(new.task.tenant, RESULT, 0)
        for _, part in parts:
            if part.data:
                file = file_pb.File(
                    tenant=new.task.tenant,
                    name=_name(TASK_INPUT, part.media_type),
                    purpose=TASK_INPUT,
                    media_type=part.media_type,
                    task=new.task.id,
                )
                part.file_id = (await files.save(file, pieces_of(part.data, MAX_PIECE_BYTES))).id
                part.ClearField("data")
        return replace(new, spec=light.SerializeToString(deterministic=True))

    async def require_files(self, tenant: str, spec: task_pb2.TaskSpec, field: str) -> None:
        """Checks the inputs of a batch line, which must be files; each gets its media type.

        Raises as `accepted`, and INVALID_ARGUMENT for an inline image or recording.
        """
        payload = payload_of(spec)
        if not is_of_media(payload):
            return
        self._required()
        for name, part in media_parts(payload):
            if part.data:
                raise FieldError(f"{field}.payload.{name}", "must be a file: lines of batches have no inline media")
        await self._require_inputs(tenant, media_parts(payload), field)

    async def fill(self, tenant: str, task_id: str, payload: TaskPayload) -> None:
        """Loads file contents into the payload of a starting task. Raises NOT_FOUND, REQUEST_TOO_LARGE."""
        if any(part.file_id for _, part in media_parts(payload)):
            files = self._required()
            self._given.add(task_id)
            await fill_inputs(files, tenant, payload, max_bytes=files.results.max_input_bytes)

    async def save_result(self, tenant: str, claim: TaskLease, data: bytes, media_type: str) -> str:
        """Returns the file id of a stored result.

        Raises REQUEST_TOO_LARGE and TOO_MANY_RESOURCES by the bounds of `router.results`.
        """
        files = self._required()
        limit = files.results.max_bytes
        if len(data) > limit:
            raise WeftError(
                Reason.REQUEST_TOO_LARGE, f"the result has more than {limit} bytes (router.results.max_bytes)"
            )
        new = file_pb.File(
            tenant=tenant,
            name=_name(RESULT, media_type),
            purpose=RESULT,
            media_type=media_type,
            task=claim.task_id,
            attempt=claim.attempt,
        )
        async with self._saving:
            try:
                return (await files.save(new, pieces_of(data, MAX_PIECE_BYTES))).id
            except WeftError as error:
                if error.reason is Reason.TOO_MANY_RESOURCES:
                    raise ResultsFullError(error.reason, error.message) from None
                raise

    @property
    def max_result_bytes(self) -> int:
        """Maximum size of an image or recording."""
        return self._required().results.max_bytes

    async def release(self, tenant: str, task_id: str, attempts: Container[int]) -> None:
        """Deletes files of these attempts of a task; a sweep deletes what remains after a failure."""
        if self._files is None:
            return
        try:
            await self._files.release(tenant, task_id, attempts)
        except WeftError as error:
            log.warning("files of a task are left to the sweep", task=task_id, reason=error.reason.name)

    async def release_inputs(self, tenant: str, task_id: str, *, has_ended: bool) -> None:
        """Called after an attempt; deletes the inputs if the task has ended."""
        if task_id in self._given:
            self._given.discard(task_id)
            if has_ended:
                await self.release(tenant, task_id, INPUTS)

    async def release_all(self, tenant: str, task_id: str) -> None:
        """Deletes all files of a deleted task."""
        await self.release(tenant, task_id, range(2**31))

    async def _require_inputs(self, tenant: str, parts: Sequence[tuple[str, chat_pb2.MediaPart]], field: str) -> None:
        files = self._required()
        limit, total = files.results.max_input_bytes, 0
        for name, part in parts:
            total += len(part.data)
            if part.file_id:
                place = f"{field}.payload.{name}"
                try:
                    file = await files.get(tenant, part.file_id)
                except WeftError as error:
                    raise FieldError(place, error.message, error.reason) from None
                part.media_type = part.media_type or file.media_type
                total += file.byte_count
            if total > limit:
                raise FieldError(
                    f"{field}.payload.{name}",
                    f"makes more than {limit} bytes of images and recordings",
                    Reason.REQUEST_TOO_LARGE,
                )

    def _required(self) -> FileServicer:
        if self._files is None:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "this router does not store images and recordings of tasks")
        return self._files


class MediaRecorder:
    """Stores images and speech from an attempt's output as files."""

    def __init__(self, media: TaskMedia, tenant: str, clock: Clock) -> None:
        self._media = media
        self._tenant = tenant
        self._clock = clock
        self._speech = bytearray()
        self._speech_type = ""
        self.has_files = False

    async def kept(self, claim: TaskLease, output: task_pb2.TaskOutput) -> task_pb2.TaskOutput:
        """Returns the part of an output to store. Raises as `TaskMedia.save_result`."""
        kept: list[event_pb2.InferenceEvent] = []
        for event in output.events:
            kind = event.WhichOneof("event")
            if kind in _NOT_KEPT:
                continue
            if kind == "speech":
                self._hear(event.speech)
                continue
            if kind == "finished" and self._speech_type:
                kept.append(event_pb2.InferenceEvent(speech=await self._spoken(claim)))
            kept.append(await self._with_file(claim, event) if kind == "image" else event)
        return task_pb2.TaskOutput(events=kept, embeddings=output.embeddings)

    async def _with_file(self, claim: TaskLease, event: event_pb2.InferenceEvent) -> event_pb2.InferenceEvent:
        image = event.image.image
        if not image.data:
            return event
        self.has_files = True
        file_id = await self._saved(claim, image.data, image.media_type)
        light = event_pb2.InferenceEvent()
        light.CopyFrom(event)
        light.image.image.ClearField("data")
        light.image.image.file_id = file_id
        return light

    def _hear(self, part: audio_pb2.SpeechPart) -> None:
        self._speech_type = self._speech_type or part.media_type or "application/octet-stream"
        self._speech += part.data
        limit = self._media.max_result_bytes
        if len(self._speech) > limit:
            raise WeftError(
                Reason.REQUEST_TOO_LARGE, f"the recording has more than {limit} bytes (router.results.max_bytes)"
            )

    async def _spoken(self, claim: TaskLease) -> audio_pb2.SpeechPart:
        self.has_files = True
        file_id = await self._saved(claim, bytes(self._speech), self._speech_type)
        self._speech.clear()
        return audio_pb2.SpeechPart(media_type=self._speech_type, file_id=file_id)

    async def _saved(self, claim: TaskLease, data: bytes, media_type: str) -> str:
        """Returns the id of a new file; retries while the database is unavailable and the claim may be valid."""
        give_up_at, pause = self._clock.monotonic() + WRITE_PATIENCE_SECONDS, FIRST_WRITE_PAUSE_SECONDS
        while True:
            try:
                return await self._media.save_result(self._tenant, claim, data, media_type)
            except WeftError as error:
                if error.reason is not Reason.SERVICE_UNAVAILABLE or self._clock.monotonic() >= give_up_at:
                    raise
            await self._clock.sleep(pause)
            pause = min(2 * pause, MAX_WRITE_PAUSE_SECONDS)


def is_of_media(payload: TaskPayload | None) -> bool:
    """Whether a payload has or produces images or recordings."""
    return payload is not None and payload.DESCRIPTOR.name in _OF_MEDIA


_OF_MEDIA = frozenset({"ImagePayload", "TranscriptionPayload", "SpeechPayload"})


def _name(purpose: str, media_type: str) -> str:
    return f"{purpose}.{_SUFFIXES.get(media_type, 'bin')}"
