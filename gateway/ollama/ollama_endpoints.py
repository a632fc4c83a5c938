"""The endpoints of Ollama's API."""

from starlette.responses import PlainTextResponse

from gateway.ollama import chat as ollama
from gateway.ollama import embed as ollama_embed
from gateway.ollama import models as ollama_models
from gateway.ollama.pull import pull_model
from gateway.ollama.schema import OllamaPullRequest, OllamaShowRequest
from gateway.openapi import JSON_LINES, fails_as, json_body
from gateway.routing import ApiRouter
from weft.kernel.access.principal import EDIT_MODELS, OPERATE, USE_MODELS, VIEW_MODELS

_FAILURE = "OllamaError"
_FAILS = fails_as(_FAILURE)
_PULL = json_body(OllamaPullRequest, error=_FAILURE, stream=JSON_LINES)
_SHOW = json_body(OllamaShowRequest, error=_FAILURE)

OLLAMA = ApiRouter("ollama", error=_FAILURE, stream=JSON_LINES)
OLLAMA.add_post("/api/chat", USE_MODELS, ollama.chat)
OLLAMA.add_post("/api/generate", USE_MODELS, ollama.generate)
OLLAMA.add_post("/api/embed", USE_MODELS, ollama_embed.embed)
OLLAMA.add_post("/api/embeddings", USE_MODELS, ollama_embed.embed_one)
OLLAMA.add_get("/api/tags", VIEW_MODELS, ollama_models.list_tags, _FAILS, with_head=True, by_name=True)
OLLAMA.add_post("/api/show", VIEW_MODELS, ollama_models.show_model, _SHOW, by_name=True)
OLLAMA.add_get("/api/ps", VIEW_MODELS, ollama_models.list_running, _FAILS, with_head=True, by_name=True)
OLLAMA.add_get("/api/version", VIEW_MODELS, ollama_models.get_version, _FAILS, with_head=True)
OLLAMA.add_post("/api/pull", OPERATE, pull_model, _PULL)
OLLAMA.add_post("/api/create", EDIT_MODELS, ollama_models.refuse_create, _FAILS, name="refuse_create")
OLLAMA.add_post("/api/copy", EDIT_MODELS, ollama_models.refuse_copy, _FAILS, name="refuse_copy")
OLLAMA.add_post("/api/push", EDIT_MODELS, ollama_models.refuse_push, _FAILS, name="refuse_push")
OLLAMA.add_delete("/api/delete", EDIT_MODELS, ollama_models.refuse_delete, _FAILS, name="refuse_delete")
OLLAMA.add_post("/api/blobs/{digest}", EDIT_MODELS, ollama_models.refuse_blob, _FAILS, name="refuse_blob")
OLLAMA.add_get("/", None, ollama_models.get_root, with_head=True, response_class=PlainTextResponse)
