"""The endpoints of Ollama's API."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import PlainTextResponse

from gateway.deps import GatewayDeps
from gateway.http_api import HttpApi
from gateway.openapi import JSON_LINES, fails_as, json_body
from gateway.ports import GatewayPorts
from gateway.routing import ApiRouter
from weft.kernel.access.principal import EDIT_MODELS, OPERATE, USE_MODELS, VIEW_MODELS
from weft_extensions.ollama import chat as ollama
from weft_extensions.ollama import embed as ollama_embed
from weft_extensions.ollama import models as ollama_models
from weft_extensions.ollama.pull import pull_model
from weft_extensions.ollama.schema import OllamaPullRequest, OllamaShowRequest

_FAILURE = "OllamaError"
_FAILS = fails_as(_FAILURE)
_PULL = json_body(OllamaPullRequest, error=_FAILURE, stream=JSON_LINES)
_SHOW = json_body(OllamaShowRequest, error=_FAILURE)


def _collaborators(_deps: GatewayDeps, ports: GatewayPorts) -> Mapping[Any, object]:
    return {"operations": None if ports.admin is None else ports.admin.operations}


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
API = HttpApi(router=OLLAMA, collaborators=_collaborators)
