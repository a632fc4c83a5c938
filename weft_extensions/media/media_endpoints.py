"""The endpoints of images, transcriptions and speech: OpenAI's API."""

from starlette.responses import StreamingResponse

from gateway.http_api import HttpApi
from gateway.openapi import EVENT_STREAM, binary_content, form_body
from gateway.routing import ApiRouter
from weft.kernel.access.principal import USE_MODELS, VIEW_MODELS
from weft_extensions.media import images, speech, transcriptions
from weft_extensions.media.image_schema import ImageEditRequest, ImageRequest
from weft_extensions.media.transcriptions import TranscriptionRequest

_IMAGE_EDIT = form_body(ImageRequest, files=("image",), or_json=ImageEditRequest)
_RECORDING = binary_content(
    "The recording; with `stream_format: sse`, its events", "audio/*", "application/octet-stream", EVENT_STREAM
)

MEDIA = ApiRouter("openai")
MEDIA.add_post("/v1/images/generations", USE_MODELS, images.generate_images)
MEDIA.add_post("/v1/images/edits", USE_MODELS, images.edit_images, _IMAGE_EDIT)
MEDIA.add_post("/v1/images/variations", USE_MODELS, images.vary_images, form_body(None, files=("image",)))
MEDIA.add_post(
    "/v1/audio/transcriptions",
    USE_MODELS,
    transcriptions.transcribe,
    form_body(TranscriptionRequest, files=("file",)),
)
MEDIA.add_post(
    "/v1/audio/translations", USE_MODELS, transcriptions.translate, form_body(TranscriptionRequest, files=("file",))
)
MEDIA.add_post(
    "/v1/audio/speech",
    USE_MODELS,
    speech.speak,
    _RECORDING,
    response_class=StreamingResponse,
)
MEDIA.add_get("/v1/audio/voices", VIEW_MODELS, speech.list_voices, by_name=True)

API = HttpApi(router=MEDIA)
