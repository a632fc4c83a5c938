"""The common part of backends whose engine is a library that makes images, transcribes or speaks, in a host program.

Media of a request are handed to the program as files in a private folder, which are removed when the request ends: the
program alone decodes them.
"""

import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from typing_extensions import override

from runner_svc.backend.port import BackendFacts, CallInfo, SpeechPart, not_offered
from runner_svc.engine_host.media_request import (
    MediaReader,
    image_request,
    media_receipt,
    speech_request,
    transcription_request,
)
from runner_svc.engine_host.messages import Answer, Done, MakeImages, Ready, Segment, Sound, Speak, Transcribe
from runner_svc.openai_upstream.request import warning_frame
from runner_svc.policy.parameters import ParameterWarning
from runner_svc.runtimes.host_backend import HostBackend
from runner_svc.runtimes.settings import StartedModelSettings
from runner_svc.supervise.socket_folder import SocketFolder
from weft.api.common.v1 import audio_pb2, chat_pb2, event_pb2, image_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.operations import generation_of
from weft.dispatch.parameter_checks import MAX_IMAGE_SEED
from weft.kernel.abilities import UNKNOWN, Abilities
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

FOLDER_PREFIX = "weft-media-"
Settings = TypeVar("Settings", bound=StartedModelSettings)
MediaRequest = MakeImages | Transcribe | Speak


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechCall:
    """What the engine is asked to speak, without its id, and what the caller should know of it."""

    request: Speak
    warnings: Sequence[ParameterWarning] = ()


class MediaBackend(HostBackend[Settings], Generic[Settings]):
    """A Backend over one host process that works on images or recordings."""

    def abilities(self) -> Abilities:
        """Returns what the loaded model takes beside its own operations."""
        return UNKNOWN

    @override
    async def facts_of(self, ready: Ready) -> BackendFacts:
        """See HostBackend.facts_of."""
        return BackendFacts(
            operations=self.operations(), context_tokens=0, slots=ready.slots, abilities=self.abilities()
        )

    @override
    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        raise not_offered(generation_of(payload).operation)

    @override
    async def generate_images(self, payload: image_pb2.ImagePayload, call: CallInfo) -> AsyncGenerator[Frame]:
        self._require(Operation.IMAGE)
        request, warnings = image_request(payload, self.parameters, secrets.randbelow(MAX_IMAGE_SEED))
        if warnings:
            yield warnings
        media = [*payload.images, *([payload.mask] if payload.HasField("mask") else [])]
        with _files_of(media) as paths:
            request.image_paths = list(map(str, paths[: len(payload.images)]))
            request.mask_path = str(paths[-1]) if payload.HasField("mask") else ""
            async with aclosing(self._frames(request, call, event_pb2.WORK_UNIT_STEPS)) as frames:
                async for frame in frames:
                    yield frame

    @override
    async def transcribe(self, payload: audio_pb2.TranscriptionPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        self._require(Operation.TRANSCRIPTION)
        with _files_of([payload.audio]) as (path,):
            request = transcription_request(payload, str(path))
            async with aclosing(self._frames(request, call, event_pb2.WORK_UNIT_AUDIO_SECONDS)) as frames:
                async for frame in frames:
                    yield frame

    @override
    async def speak(self, payload: audio_pb2.SpeechPayload, call: CallInfo) -> AsyncGenerator[SpeechPart]:
        self._require(Operation.SPEECH)
        wanted = self.speech_call(payload)
        async with aclosing(self._working(wanted.request, call)) as arrivals:
            async for answers in arrivals:
                for answer in answers:
                    if isinstance(answer, Sound):
                        yield SpeechPart(answer.data, answer.media_type)
                    elif isinstance(answer, Done):
                        receipt = media_receipt(answer)
                        receipt.warnings.extend(event.warning for event in warning_frame(wanted.warnings))
                        yield SpeechPart(b"", "", receipt)

    def speech_call(self, payload: audio_pb2.SpeechPayload) -> SpeechCall:
        """Returns what the engine is asked for. Raises as `speak`."""
        return SpeechCall(request=speech_request(payload))

    def _require(self, operation: Operation) -> None:
        if operation not in self.operations():
            raise not_offered(operation)

    async def _frames(
        self, request: MediaRequest, call: CallInfo, unit: event_pb2.WorkUnit.ValueType
    ) -> AsyncGenerator[Frame]:
        reader = MediaReader(unit)
        async with aclosing(self._working(request, call)) as arrivals:
            async for answers in arrivals:
                if frame := reader.read(answers):
                    yield frame

    async def _working(self, request: MediaRequest, call: CallInfo) -> AsyncGenerator[list[Answer]]:
        """Yields the answers to a request, in the groups in which they arrive, and notes the progress that they are."""
        channel, call = self._running(), self._process.noting(call)
        async with self._free:
            request.id = channel.next_id()
            async with aclosing(self._answers(channel, request)) as arrivals:
                async for answers in arrivals:
                    if any(isinstance(answer, Segment | Sound | Done) for answer in answers):
                        call.on_token()
                    else:
                        call.on_prefill()
                    yield answers


@contextmanager
def _files_of(media: Sequence[chat_pb2.MediaPart]) -> Iterator[list[Path]]:
    """Writes media into files of a private folder, which is removed at the end of the block.

    Raises BACKEND_ERROR where they cannot be written.
    """
    if not media:
        yield []
        return
    try:
        folder = SocketFolder(FOLDER_PREFIX)
    except OSError as error:
        raise _no_file(error) from error
    try:
        paths = [folder.path / f"media-{number}" for number in range(len(media))]
        try:
            for path, part in zip(paths, media, strict=True):
                path.write_bytes(part.data)
        except OSError as error:
            raise _no_file(error) from error
        yield paths
    finally:
        folder.remove()


def _no_file(error: OSError) -> WeftError:
    reason = error.strerror or str(error)
    return WeftError(Reason.BACKEND_ERROR, f"the media of the request could not be written to a file: {reason}")
