"""The endpoints of the OpenAI API: method, path, access, handler and documentation of each."""

from starlette.responses import StreamingResponse

from gateway.openai import images, models, speech, transcriptions
from gateway.openai.chat import chat_completions
from gateway.openai.completions import text_completions
from gateway.openai.embeddings import create_embeddings
from gateway.openai.image_schema import ImageEditRequest, ImageRequest
from gateway.openai.quotes import create_quotes
from gateway.openai.rerank import rerank_documents
from gateway.openai.tokenize import tokenize
from gateway.openai.transcriptions import TranscriptionRequest
from gateway.openapi import EVENT_STREAM, answers, binary_content, form_body
from gateway.routing import ApiRouter
from weft.api.router.v1.placement_service_pb2 import QuoteResponse
from weft.kernel.access.principal import USE_MODELS, VIEW_MODELS

_IMAGE_EDIT = form_body(ImageRequest, files=("image",), or_json=ImageEditRequest)
_RECORDING = binary_content(
    "The recording; with `stream_format: sse`, its events", "audio/*", "application/octet-stream", EVENT_STREAM
)

OPENAI = ApiRouter("openai")
OPENAI.add_post("/v1/chat/completions", USE_MODELS, chat_completions)
OPENAI.add_post("/v1/completions", USE_MODELS, text_completions)
OPENAI.add_post("/v1/embeddings", USE_MODELS, create_embeddings)
OPENAI.add_post("/v1/rerank", USE_MODELS, rerank_documents)
OPENAI.add_post("/rerank", USE_MODELS, rerank_documents)
OPENAI.add_post("/tokenize", USE_MODELS, tokenize)
OPENAI.add_post("/v1/tokenize", USE_MODELS, tokenize)
OPENAI.add_post("/v1/images/generations", USE_MODELS, images.generate_images)
OPENAI.add_post("/v1/images/edits", USE_MODELS, images.edit_images, _IMAGE_EDIT)
OPENAI.add_post("/v1/images/variations", USE_MODELS, images.vary_images, form_body(None, files=("image",)))
OPENAI.add_post(
    "/v1/audio/transcriptions",
    USE_MODELS,
    transcriptions.transcribe,
    form_body(TranscriptionRequest, files=("file",)),
)
OPENAI.add_post(
    "/v1/audio/translations", USE_MODELS, transcriptions.translate, form_body(TranscriptionRequest, files=("file",))
)
OPENAI.add_post(
    "/v1/audio/speech",
    USE_MODELS,
    speech.speak,
    _RECORDING,
    response_class=StreamingResponse,
)
OPENAI.add_get("/v1/audio/voices", VIEW_MODELS, speech.list_voices, by_name=True)
OPENAI.add_get("/v1/models", VIEW_MODELS, models.list_models, with_head=True, by_name=True)
OPENAI.add_get("/v1/models/agent/{agent}", VIEW_MODELS, models.get_agent, with_head=True, by_name=True)
OPENAI.add_get("/v1/models/route/{route}", VIEW_MODELS, models.get_route, with_head=True, by_name=True)
OPENAI.add_get("/v1/models/workflow/{workflow}", VIEW_MODELS, models.get_workflow, with_head=True, by_name=True)
OPENAI.add_get("/v1/models/{model:name}", VIEW_MODELS, models.get_model, with_head=True, by_name=True)

QUOTES = ApiRouter("quotes")
QUOTES.add_post("/v1/quotes", USE_MODELS, create_quotes, answers(QuoteResponse))
