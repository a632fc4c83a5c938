"""Translation of payloads of images and recordings into requests to an engine, and of its answers into events. Pure."""

import re

from runner_svc.engine_host.messages import (
    Answer,
    Done,
    MakeImages,
    Picture,
    Recording,
    Segment,
    Speak,
    Transcribe,
    Worked,
)
from runner_svc.openai_upstream.request import json_object, warning_frame
from runner_svc.policy.parameters import ParameterProfile, admit
from weft.api.common.v1 import audio_pb2, chat_pb2, event_pb2, image_pb2, receipt_pb2, usage_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors import invalid_field

MAX_SIDE_PIXELS = 16_384
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
_OWN_SIZES = frozenset({"", "auto"})


def image_request(
    payload: image_pb2.ImagePayload, profile: ParameterProfile, random_seed: int
) -> tuple[MakeImages, Frame]:
    """Returns the request for images, without its id and files, and the warnings for the caller.

    `random_seed` is taken where the payload has none. Raises INVALID_ARGUMENT naming the field.
    """
    width, height = image_size(payload.size)
    admitted = admit(json_object(payload.extra_parameters), profile)
    request = MakeImages(
        id=0,
        prompt=payload.prompt,
        negative_prompt=payload.negative_prompt,
        width=width,
        height=height,
        count=payload.count if payload.HasField("count") else 1,
        steps=payload.steps if payload.HasField("steps") else None,
        guidance=payload.guidance if payload.HasField("guidance") else None,
        seed=payload.seed if payload.HasField("seed") else random_seed,
        strength=payload.strength if payload.HasField("strength") else None,
        partial_images=payload.partial_images,
        output_format=payload.output_format or "png",
        options=dict(admitted.send),
    )
    return request, warning_frame(admitted.warnings)


def image_size(size: str) -> tuple[int | None, int | None]:
    """Returns width and height of a size such as "1024x768"; None: the model's own. Raises INVALID_ARGUMENT."""
    if size in _OWN_SIZES:
        return None, None
    found = _SIZE.fullmatch(size)
    if found is None or max(int(found[1]), int(found[2])) > MAX_SIDE_PIXELS:
        raise invalid_field("size", f"must be WIDTHxHEIGHT in pixels, such as 512x512, each at most {MAX_SIDE_PIXELS}")
    return int(found[1]), int(found[2])


def transcription_request(payload: audio_pb2.TranscriptionPayload, path: str) -> Transcribe:
    """Returns the request for a transcription of the recording in a file, without its id."""
    return Transcribe(
        id=0,
        path=path,
        language=payload.language,
        prompt=payload.prompt,
        temperature=payload.temperature if payload.HasField("temperature") else None,
        translate=payload.translate,
        with_words=payload.with_words,
        voice_detection=payload.voice_detection if payload.HasField("voice_detection") else None,
    )


DEFAULT_SPEECH_FORMAT = "mp3"


def speech_request(payload: audio_pb2.SpeechPayload) -> Speak:
    """Returns the request for speech, without its id."""
    return Speak(
        id=0,
        text=payload.input,
        voice=payload.voice,
        format=payload.format or DEFAULT_SPEECH_FORMAT,
        speed=payload.speed if payload.HasField("speed") else 1.0,
        options={"instructions": payload.instructions} if payload.instructions else {},
    )


class MediaReader:
    """Translates the answers to one request into events."""

    def __init__(self, unit: event_pb2.WorkUnit.ValueType) -> None:
        """`unit`: what the engine counts its progress in."""
        self._unit = unit
        self._recording: Recording | None = None

    def read(self, answers: list[Answer]) -> Frame:
        """Returns the events of answers that arrived together; of several reports of progress the last one."""
        events: Frame = []
        progress: Worked | None = None
        for answer in answers:
            match answer:
                case Worked():
                    progress = answer
                case Picture():
                    events.append(_image_event(answer))
                case Recording():
                    self._recording = answer
                case Segment():
                    events.append(event_pb2.InferenceEvent(transcript=self._part(answer)))
                case Done():
                    events += self._end(answer)
                case _:
                    pass
        return events if progress is None else [self._progress(progress), *events]

    def _progress(self, worked: Worked) -> event_pb2.InferenceEvent:
        progress = event_pb2.WorkProgress(unit=self._unit, done=worked.done, total=worked.total, stage=worked.stage)
        return event_pb2.InferenceEvent(work_progress=progress)

    def _part(self, segment: Segment) -> audio_pb2.TranscriptPart:
        part = audio_pb2.TranscriptPart(text=segment.text, segment=_segment(segment))
        recording, self._recording = self._recording, None
        if recording is not None:
            part.language, part.duration_seconds = recording.language, recording.duration_seconds
        return part

    def _end(self, done: Done) -> Frame:
        events: Frame = []
        if self._recording is not None:  # a recording without a word
            last = audio_pb2.TranscriptPart(
                language=self._recording.language, duration_seconds=self._recording.duration_seconds
            )
            events.append(event_pb2.InferenceEvent(transcript=last))
        receipt = media_receipt(done)
        events.append(event_pb2.InferenceEvent(usage=receipt.usage))
        return [*events, event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt))]


def media_receipt(done: Done) -> receipt_pb2.Receipt:
    """Returns the engine's part of the receipt."""
    receipt = receipt_pb2.Receipt(
        usage=usage_pb2.Usage(
            completion_tokens=done.completion_tokens,
            image_steps=done.image_steps,
            image_pixels=done.image_pixels,
            audio_milliseconds=round(done.audio_seconds * 1000),
        )
    )
    if done.seconds > 0:
        receipt.gpu_time.FromMicroseconds(int(done.seconds * 1e6))
    return receipt


def _image_event(picture: Picture) -> event_pb2.InferenceEvent:
    image = chat_pb2.MediaPart(data=picture.data, media_type=picture.media_type)
    if picture.partial_index is not None:
        partial = image_pb2.PartialImage(index=picture.index, partial_index=picture.partial_index, image=image)
        return event_pb2.InferenceEvent(partial_image=partial)
    complete = image_pb2.GeneratedImage(index=picture.index, image=image, seed=picture.seed)
    return event_pb2.InferenceEvent(image=complete)


def _segment(segment: Segment) -> audio_pb2.TranscriptionSegment:
    return audio_pb2.TranscriptionSegment(
        start_seconds=segment.start,
        end_seconds=segment.end,
        text=segment.text,
        words=[
            audio_pb2.TranscriptionWord(
                start_seconds=word.start, end_seconds=word.end, text=word.text, probability=word.probability
            )
            for word in segment.words
        ],
        mean_logprob=segment.mean_logprob,
        no_speech_probability=segment.no_speech_probability,
        compression_ratio=segment.compression_ratio,
        temperature=segment.temperature,
    )
