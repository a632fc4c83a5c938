"""Images, transcriptions and speech over OpenAI's routes."""

import re
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from types import MappingProxyType

import msgspec

from runner_svc.backend.port import CallInfo, SpeechPart
from runner_svc.openai_upstream.answers import shown
from runner_svc.openai_upstream.client import (
    IMAGE_EDITS,
    IMAGES,
    SPEECH,
    TRANSCRIPTIONS,
    TRANSLATIONS,
    FormBody,
    OpenAiHttp,
)
from runner_svc.openai_upstream.dialects import figure, read_json
from runner_svc.openai_upstream.errors import stated_answer
from runner_svc.openai_upstream.media_stream import (
    ImageEvents,
    Segment,
    SpeechEvents,
    TranscriptEvents,
    Word,
    image_part,
    receipt_of,
    seconds_of,
    segment_of,
    text_of,
    word_of,
)
from runner_svc.openai_upstream.openai_request import Json, json_object, model_field, warning_frame
from runner_svc.policy.parameters import admit, of_images, plain_name
from weft.api.common.v1 import audio_pb2, chat_pb2, event_pb2, image_pb2, usage_pb2
from weft.dispatch.frames import Frame, has_content
from weft.kernel.errors.error_tree import WeftError, quoting_engine
from weft.kernel.errors.reasons import Reason

MAX_IMAGE_BODY_BYTES = 48 * 1024 * 1024
"""Maximum size of base64 images: below the mesh's message limit of 64 MiB."""
MAX_TRANSCRIPT_BODY_BYTES = 16 * 1024 * 1024
MAX_UPSTREAM_PARTIAL_IMAGES = 3
"""Maximum number of previews in OpenAI's API."""
GRANULARITIES = "timestamp_granularities[]"
_IMAGE_FIELDS = MappingProxyType(
    {
        "negative_prompt": "negative_prompt",
        "steps": "num_inference_steps",
        "guidance": "guidance_scale",
        "seed": "seed",
        "strength": "strength",
    }
)
"""Fields beyond OpenAI's, with the names that diffusion servers use."""
_PNG = b"\x89PNG\r\n\x1a\n"
_ANSWER = "the engine's answer is"
_SOUND = re.compile(r"audio/[\w.+-]{1,64}|application/octet-stream", re.ASCII)
_SUFFIXES = MappingProxyType({"jpeg": "jpg", "mpeg": "mp3", "x-wav": "wav", "wave": "wav", "x-m4a": "m4a"})


class _Image(msgspec.Struct):
    b64_json: str | None = None
    revised_prompt: object = None


class _ImageReply(msgspec.Struct):
    data: list[_Image]
    usage: object = None


class _TranscriptionReply(msgspec.Struct):
    text: str
    language: object = None
    duration: object = None
    segments: list[Segment] | None = None
    words: list[Word] | None = None


async def generate_images(http: OpenAiHttp, payload: image_pb2.ImagePayload, call: CallInfo) -> AsyncGenerator[Frame]:
    """See Backend.generate_images. If the server reports no usage, it is the requested steps and the PNGs' pixels."""
    path, body, warnings = _image_call(http, payload)
    if warnings:
        yield warnings
    pixels: list[int] = []
    answers = http.post_for_events(path, body, call, MAX_IMAGE_BODY_BYTES)
    async with aclosing(_frames(answers, ImageEvents(), _whole_images, call)) as frames:
        async for frame in frames:
            pixels += (png_pixels(event.image.image.data) for event in frame if event.HasField("image"))
            if frame[-1].HasField("finished"):
                usage = frame[-1].finished.receipt.usage
                # The server's own figures take precedence.
                usage.image_steps = usage.image_steps or payload.steps * len(pixels)
                usage.image_pixels = usage.image_pixels or sum(pixels)
            yield frame


async def _frames(
    answers: AsyncGenerator[tuple[bool, bytes]],
    events: ImageEvents | TranscriptEvents,
    read_whole: Callable[[bytes], list[Frame]],
    call: CallInfo,
) -> AsyncGenerator[Frame]:
    """Yields the frames of an answer that is a stream of events or one document."""
    async with aclosing(answers):
        async for is_event, data in answers:
            if not is_event:
                for frame in read_whole(data):
                    yield frame
                return
            if frame := events.read(data):
                if has_content(frame):
                    call.on_token()
                yield frame
    events.require_end()
    yield finished_frame(events.usage, events.work_seconds)


def _image_call(http: OpenAiHttp, payload: image_pb2.ImagePayload) -> tuple[str, Json | FormBody, Frame]:
    """Returns the path and body of an image request, and warnings for the caller."""
    is_own = http.endpoint.is_library_server
    count = payload.count if payload.HasField("count") else 1
    fields: Json = {"prompt": payload.prompt, "n": count, **model_field(http.endpoint.model)}
    for name in ("size", "quality", "output_format"):
        if value := getattr(payload, name):
            fields[name] = value
    fields.update({theirs: getattr(payload, ours) for ours, theirs in _IMAGE_FIELDS.items() if _is_set(payload, ours)})
    if not http.endpoint.is_provider:
        # Some servers return a URL to a file by default. OpenAI rejects the parameter.
        fields["response_format"] = "b64_json"
    profile = http.endpoint.parameters if is_own else of_images(http.endpoint.parameters)
    admitted = admit(json_object(payload.extra_parameters), profile)
    fields.update({name: value for name, value in admitted.send.items() if plain_name(name) not in fields})
    if payload.partial_images or is_own:
        most = payload.partial_images if is_own else MAX_UPSTREAM_PARTIAL_IMAGES
        fields |= {"stream": True, "partial_images": min(payload.partial_images, most)}
    if not payload.images and not (is_own and payload.HasField("mask")):
        return IMAGES, fields, warning_frame(admitted.warnings)
    files = [("image[]" if len(payload.images) > 1 else "image", image) for image in payload.images]
    if payload.HasField("mask"):
        files.append(("mask", payload.mask))
    return IMAGE_EDITS, form(fields, files), warning_frame(admitted.warnings)


def _whole_images(raw: bytes) -> list[Frame]:
    reply = read_json(raw, _ImageReply, _ANSWER)
    counted = usage_pb2.Usage(
        prompt_tokens=figure(reply.usage, "input_tokens"), completion_tokens=figure(reply.usage, "output_tokens")
    )
    images = [[event_pb2.InferenceEvent(image=_image(image, index))] for index, image in enumerate(reply.data)]
    return [*images, finished_frame(counted)]


def png_pixels(data: bytes) -> int:
    """Returns the number of pixels from a PNG's header; 0: not a PNG."""
    if not data.startswith(_PNG) or data[12:16] != b"IHDR":
        return 0
    return int.from_bytes(data[16:20], "big") * int.from_bytes(data[20:24], "big")


async def transcribe(
    http: OpenAiHttp, payload: audio_pb2.TranscriptionPayload, call: CallInfo
) -> AsyncGenerator[Frame]:
    """See Backend.transcribe."""
    path, body = _transcription_call(http, payload, call)
    answers = http.post_for_events(path, body, call, MAX_TRANSCRIPT_BODY_BYTES)
    async with aclosing(_frames(answers, TranscriptEvents(), _whole_transcription, call)) as frames:
        async for frame in frames:
            yield frame


def _transcription_call(
    http: OpenAiHttp, payload: audio_pb2.TranscriptionPayload, call: CallInfo
) -> tuple[str, FormBody]:
    answer = "verbose_json" if payload.with_segments or payload.with_words else "json"
    fields: Json = {"response_format": answer, **model_field(http.endpoint.model)}
    for name in ("language", "prompt"):
        if value := getattr(payload, name):
            fields[name] = value
    if payload.HasField("temperature"):
        fields["temperature"] = payload.temperature
    if payload.with_words:
        fields[GRANULARITIES] = ["word", "segment"]
    is_own = http.endpoint.is_library_server
    if is_own and payload.HasField("voice_detection"):
        fields["voice_detection"] = payload.voice_detection
    if is_own or (not call.whole and answer == "json"):
        # OpenAI does not stream timestamps.
        fields["stream"] = True
    path = TRANSLATIONS if payload.translate else TRANSCRIPTIONS
    return path, form(fields, [("file", payload.audio)])


def _whole_transcription(raw: bytes) -> list[Frame]:
    reply = read_json(raw, _TranscriptionReply, _ANSWER)
    seconds = seconds_of(reply.duration)
    segments = [segment_of(part, ()) for part in reply.segments or ()]
    _add_words(segments, [word_of(word) for word in reply.words or ()])
    parts = _parts(reply.text, segments, text_of(reply.language), seconds)
    usage = usage_pb2.Usage(audio_milliseconds=round(seconds * 1000))
    return [[event_pb2.InferenceEvent(transcript=part) for part in parts], finished_frame(usage)]


def _add_words(segments: list[audio_pb2.TranscriptionSegment], words: Sequence[audio_pb2.TranscriptionWord]) -> None:
    """Adds words that are listed separately to the segments in which they start."""
    if words and not segments:
        segments.append(
            audio_pb2.TranscriptionSegment(
                start_seconds=words[0].start_seconds,
                end_seconds=words[-1].end_seconds,
                text=" ".join(word.text for word in words),
            )
        )
    index = 0
    for word in words:
        while index + 1 < len(segments) and word.start_seconds >= segments[index + 1].start_seconds:
            index += 1
        segments[index].words.append(word)


def _parts(
    text: str, segments: Sequence[audio_pb2.TranscriptionSegment], language: str, seconds: float
) -> list[audio_pb2.TranscriptPart]:
    """Returns the parts of a transcription; the first has the whole text as joined by the engine."""
    first = audio_pb2.TranscriptPart(text=text, language=language, duration_seconds=seconds)
    if segments:
        first.segment.CopyFrom(segments[0])
    return [first, *(audio_pb2.TranscriptPart(segment=segment) for segment in segments[1:])]


def finished_frame(usage: usage_pb2.Usage, work_seconds: float = 0.0) -> Frame:
    """Returns the last frame of an image, transcription or speech answer; 0 s: unknown work time."""
    receipt = receipt_of(usage, work_seconds)
    return [event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt))]


async def speak(
    http: OpenAiHttp, payload: audio_pb2.SpeechPayload, call: CallInfo, speaker: str = ""
) -> AsyncGenerator[SpeechPart]:
    """See Backend.speak. `speaker`: a speaker of the voice, for weft's own servers."""
    body: Json = {"input": payload.input, **model_field(http.endpoint.model)}
    if payload.voice:
        body["voice"] = payload.voice
    if payload.format:
        body["response_format"] = payload.format
    if payload.HasField("speed"):
        body["speed"] = payload.speed
    if payload.instructions:
        body["instructions"] = payload.instructions
    if http.endpoint.is_library_server:
        body |= {"stream_format": "sse", "speaker": speaker}
        async with aclosing(_spoken_events(http, body, call)) as parts:
            async for part in parts:
                yield part
        return
    is_empty = True
    async with aclosing(http.post_for_bytes(SPEECH, body, call)) as chunks:
        async for media_type, chunk in chunks:
            if not _SOUND.fullmatch(media_type):
                fault = f"the engine speaks {shown(media_type)}, which is not audio"
                other = WeftError(Reason.BACKEND_PROTOCOL_ERROR, fault)
                raise stated_answer(chunk) or quoting_engine(other, "the engine sent no audio")
            is_empty = False
            yield SpeechPart(chunk, media_type)
    if is_empty:
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine sent an empty recording")


async def _spoken_events(http: OpenAiHttp, body: Json, call: CallInfo) -> AsyncGenerator[SpeechPart]:
    """Yields the recording from an answer's events, then the receipt."""
    events = SpeechEvents()
    async with aclosing(http.post_for_events(SPEECH, body, call, MAX_IMAGE_BODY_BYTES)) as answers:
        async for _, data in answers:
            if piece := events.read(data):
                call.on_token()
                yield SpeechPart(piece, events.media_type)
    events.require_end()
    yield SpeechPart(b"", "", events.receipt)


def form(fields: Json, files: Sequence[tuple[str, chat_pb2.MediaPart]]) -> FormBody:
    """Encodes fields and files as a form (RFC 7578), in memory because a request may be sent twice."""
    boundary = secrets.token_hex(16)
    pieces: list[bytes] = []
    for name, value in _fields(fields):
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        disposition = f'form-data; name="{_quoted(name)}"'
        pieces += [f"--{boundary}\r\nContent-Disposition: {disposition}\r\n\r\n".encode(), text.encode(), b"\r\n"]
    for name, part in files:
        subtype = part.media_type.partition("/")[2].partition(";")[0] or "bin"
        disposition = f'form-data; name="{name}"; filename="file.{_quoted(_SUFFIXES.get(subtype, subtype))}"'
        # Line breaks would allow header injection.
        media_type = "".join(filter(str.isprintable, part.media_type)) or "application/octet-stream"
        head = f"--{boundary}\r\nContent-Disposition: {disposition}\r\nContent-Type: {media_type}\r\n\r\n"
        pieces += [head.encode(), part.data, b"\r\n"]
    pieces.append(f"--{boundary}--\r\n".encode())
    return FormBody(b"".join(pieces), f"multipart/form-data; boundary={boundary}")


def _fields(fields: Json) -> Iterator[tuple[str, object]]:
    """Yields the fields of a form; a field named `...[]` is repeated for each of its values."""
    for name, value in fields.items():
        if name.endswith("[]") and isinstance(value, list):
            yield from ((name, each) for each in value)
        else:
            yield name, value


def _quoted(text: str) -> str:
    return "".join(sign for sign in text if sign.isalnum() or sign in "-_.[]")


def _is_set(payload: image_pb2.ImagePayload, name: str) -> bool:
    return bool(payload.negative_prompt) if name == "negative_prompt" else payload.HasField(name)  # type: ignore[arg-type]  # names of the table above


def _image(image: _Image, index: int) -> image_pb2.GeneratedImage:
    if image.b64_json is None:
        message = "the engine sent no image, perhaps a URL; it must answer with b64_json"
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, message)
    part = image_part(image.b64_json)
    return image_pb2.GeneratedImage(image=part, revised_prompt=text_of(image.revised_prompt), index=index)
