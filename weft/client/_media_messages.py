"""Builds request messages for images, transcriptions and speech from plain Python values."""

from collections.abc import Mapping, Sequence

from weft.api.common.v1 import audio_pb2, chat_pb2, image_pb2
from weft.api.router.v1 import inference_service_pb2 as pb
from weft.client._messages import HandlingOptions, request_options
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.text.json_objects import to_json_object
from weft.kernel.values.media_types import UNKNOWN_TYPE, image_type_of


class ImageOptions(HandlingOptions, total=False):
    """Image options, by default as the model is configured. Ranges: common/v1/image.proto."""

    count: int
    size: str
    """In pixels, such as "1024x1024"."""
    quality: str
    output_format: str
    """"png", "jpeg" or "webp"."""
    negative_prompt: str
    steps: int
    guidance: float
    seed: int
    """Seed of the first image; each further one uses the next number."""
    strength: float
    """How much of the source image is changed, 0 to 1."""
    partial_images: int
    """Number of previews streamed per image."""
    images: Sequence[bytes]
    """Encoded source image files."""
    mask: bytes
    """Encoded file that marks where the first source image may be changed."""
    extra_parameters: Mapping[str, object]
    """Parameters unknown to weft, as JSON data."""


class TranscriptionOptions(HandlingOptions, total=False):
    """Transcription options; the backend has the defaults."""

    media_type: str
    """Type of the recording, such as "audio/mpeg"; by default the engine detects it."""
    language: str
    prompt: str
    temperature: float
    translate: bool
    with_segments: bool
    with_words: bool
    voice_detection: bool


class SpeechOptions(HandlingOptions, total=False):
    """Speech options; the backend has the defaults."""

    voice: str
    format: str
    """"mp3", "opus", "aac", "flac", "wav" or "pcm"."""
    speed: float
    instructions: str


_CONVERTED = frozenset({*HandlingOptions.__annotations__, "images", "mask", "extra_parameters", "media_type"})
"""Options that are not fields of a payload under the same name and with the same value."""


def image_request(model: str, prompt: str, options: ImageOptions) -> pb.StreamImagesRequest:
    """Returns the request for a stream of images. Raises INVALID_ARGUMENT naming an invalid option."""
    payload = image_pb2.ImagePayload(prompt=prompt)
    _fill(payload, options, ImageOptions)
    payload.images.extend(map(_image, options.get("images", ())))
    if "mask" in options:
        payload.mask.CopyFrom(_image(options["mask"]))
    if "extra_parameters" in options:
        payload.extra_parameters.CopyFrom(to_json_object(options["extra_parameters"], "extra_parameters"))
    return pb.StreamImagesRequest(model=model, payload=payload, options=request_options(options))


def _image(data: bytes) -> chat_pb2.MediaPart:
    return chat_pb2.MediaPart(data=data, media_type=image_type_of(data) or UNKNOWN_TYPE)


def transcription_request(model: str, audio: bytes, options: TranscriptionOptions) -> pb.StreamTranscriptionRequest:
    """Returns the request for a streamed transcription. Raises INVALID_ARGUMENT naming an invalid option."""
    media_type = options.get("media_type", UNKNOWN_TYPE)
    payload = audio_pb2.TranscriptionPayload(audio=chat_pb2.MediaPart(data=audio, media_type=media_type))
    _fill(payload, options, TranscriptionOptions)
    return pb.StreamTranscriptionRequest(model=model, payload=payload, options=request_options(options))


def speech_request(model: str, text: str, options: SpeechOptions) -> pb.SpeakRequest:
    """Returns the request for speech. Raises INVALID_ARGUMENT naming an invalid option."""
    payload = audio_pb2.SpeechPayload(input=text)
    _fill(payload, options, SpeechOptions)
    return pb.SpeakRequest(model=model, payload=payload, options=request_options(options))


def _fill(
    payload: image_pb2.ImagePayload | audio_pb2.TranscriptionPayload | audio_pb2.SpeechPayload,
    options: Mapping[str, object],
    known: type,
) -> None:
    for name in known.__annotations__:
        if name not in options or name in _CONVERTED:
            continue
        try:
            setattr(payload, name, options[name])
        except (TypeError, ValueError) as error:
            raise invalid_field(name, "has the wrong type, or is out of range") from error
