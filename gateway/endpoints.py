"""The table of HTTP endpoints: method, path, access, handler and OpenAPI of each.

Routing, access rules, the OpenAPI document and the table in docs/http-api.md follow from it. A new endpoint is a row
here, its handler and its schema. The rows for operators are in `gateway.admin.endpoints`, those for resources in
`gateway.resources.endpoints`.
"""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from starlette.responses import PlainTextResponse, StreamingResponse

from gateway.admin.endpoints import ADMIN, JOIN_TOKENS, KEYS, REQUESTS, SECRETS, USAGE
from gateway.anthropic.messages import count_tokens, create_message
from gateway.anthropic.schema import CountTokensRequest, MessagesRequest
from gateway.auth.authentication import AccessRules
from gateway.batches import handlers as batches
from gateway.batches.documents import BatchList, BatchObject, BatchRequest, DeletedFile, FileList, FileObject
from gateway.batches.handlers import (
    FILE_LIST_PARAMETERS,
    BatchDeps,
    FileDeps,
    create_file,
    delete_file,
    get_content,
    get_file,
    list_files,
)
from gateway.batches.results import PARAMETERS as RESULT_PARAMETERS
from gateway.batches.results import ResultDeps, get_result
from gateway.deps import GatewayDeps, InferenceDeps
from gateway.endpoint_rows import Handler, delete_row, get_row, post_row
from gateway.health import VIEW_TELEMETRY, get_authority, get_health, get_livez, get_metrics, get_readyz
from gateway.ollama import chat as ollama
from gateway.ollama import embed as ollama_embed
from gateway.ollama import models as ollama_models
from gateway.ollama import store as ollama_store
from gateway.ollama.deps import OllamaDeps
from gateway.ollama.pull import pull_model
from gateway.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from gateway.openai import images, models, speech, transcriptions
from gateway.openai.chat import chat_completions
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.completions import CompletionRequest, text_completions
from gateway.openai.embeddings import EmbeddingRequest, create_embeddings
from gateway.openai.image_schema import ImageEditRequest, ImageRequest
from gateway.openai.rerank import RerankRequest, rerank_documents
from gateway.openai.speech import SpeechRequest
from gateway.openai.tokenize import TokenizeRequest, tokenize
from gateway.openai.transcriptions import TranscriptionRequest
from gateway.openapi import (
    EVENT_STREAM,
    JSON_LINES,
    Schema,
    answers,
    answers_events,
    binary_content,
    fails_as,
    form_body,
    json_body,
)
from gateway.resources.endpoints import RESOURCES, SETTINGS
from gateway.responses.handlers import (
    LIST_PARAMETERS,
    STREAM_PARAMETERS,
    cancel_response,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from gateway.responses.retrieval import Responses
from gateway.responses.schema import DeletedResponse, ResponseItemList, ResponseObject, ResponsesRequest
from gateway.routing import OPENAPI, Endpoint, EndpointApp, EndpointGroup, get_docs, get_openapi, shown_path
from gateway.runner_api.endpoints import RUNNER_METRICS, RUNNER_OPERATIONS, RUNNER_STATE
from gateway.tasks import handlers as tasks
from gateway.tasks.handlers import NewTaskBody, TaskDeps, TaskList, TaskObject
from gateway.watch import handlers as watching
from gateway.watch.handlers import WatchDeps
from gateway.workbench.serving import WorkbenchDeps, get_caller, get_page, redirect_to_page
from weft.api.operations.v1 import operation_pb2
from weft.api.router.v1 import figures_pb2, request_service_pb2
from weft.api.router.v1.request_pb2 import RequestRecord
from weft.documents.json_schema import record_schema
from weft.durable.batches import BATCH_INPUT, MEDIA_INPUTS
from weft.kernel.principal import Access, Resource, Role

_USE = Access(Resource.INFERENCE, Role.CREATE)
_VIEW = Access(Resource.INFERENCE, Role.VIEW)
_EDIT = Access(Resource.INFERENCE, Role.EDIT)
_VIEW_MODELS = Access(Resource.MODELS, Role.VIEW)
_EDIT_MODELS = Access(Resource.MODELS, Role.EDIT)
_VIEW_RUNNERS = Access(Resource.RUNNERS, Role.VIEW)
_EDIT_RUNNERS = Access(Resource.RUNNERS, Role.EDIT)
_VIEW_OPERATIONS = Access(Resource.OPERATIONS, Role.VIEW)
_OPERATE = Access(Resource.OPERATIONS, Role.CREATE)
_EDIT_OPERATIONS = Access(Resource.OPERATIONS, Role.EDIT)


_OPERATION_SCHEMA = record_schema(operation_pb2.Operation)
_REQUEST_SCHEMA, _REQUEST_LIST = record_schema(RequestRecord), record_schema(request_service_pb2.ListRequestsResponse)
_FIGURES = record_schema(figures_pb2.Figures)
_CLIENT_LIST = record_schema(request_service_pb2.ListClientsResponse)

_IMAGE_EDIT = form_body(ImageRequest, files=("image",), or_json=ImageEditRequest)
_RECORDING = binary_content(
    "The recording; with `stream_format: sse`, its events", "audio/*", "application/octet-stream", EVENT_STREAM
)

OPENAI: EndpointGroup[InferenceDeps] = EndpointGroup(
    tag="openai",
    endpoints=(
        post_row("/v1/chat/completions", _USE, chat_completions, json_body(ChatRequest)),
        post_row("/v1/completions", _USE, text_completions, json_body(CompletionRequest)),
        post_row("/v1/embeddings", _USE, create_embeddings, json_body(EmbeddingRequest)),
        post_row("/v1/rerank", _USE, rerank_documents, json_body(RerankRequest)),
        post_row("/rerank", _USE, rerank_documents, json_body(RerankRequest)),
        post_row("/tokenize", _USE, tokenize, json_body(TokenizeRequest)),
        post_row("/v1/tokenize", _USE, tokenize, json_body(TokenizeRequest)),
        post_row("/v1/images/generations", _USE, images.generate_images, json_body(ImageRequest)),
        post_row("/v1/images/edits", _USE, images.edit_images, _IMAGE_EDIT),
        post_row("/v1/images/variations", _USE, images.vary_images, form_body(None, files=("image",))),
        post_row(
            "/v1/audio/transcriptions",
            _USE,
            transcriptions.transcribe,
            form_body(TranscriptionRequest, files=("file",)),
        ),
        post_row(
            "/v1/audio/translations", _USE, transcriptions.translate, form_body(TranscriptionRequest, files=("file",))
        ),
        post_row(
            "/v1/audio/speech",
            _USE,
            speech.speak,
            json_body(SpeechRequest) | _RECORDING,
            response_class=StreamingResponse,
        ),
        get_row("/v1/audio/voices", _VIEW_MODELS, speech.list_voices, by_name=True),
        get_row("/v1/models", _VIEW_MODELS, models.list_models, with_head=True, by_name=True),
        get_row("/v1/models/agent/{agent}", _VIEW_MODELS, models.get_agent, with_head=True, by_name=True),
        get_row("/v1/models/route/{route}", _VIEW_MODELS, models.get_route, with_head=True, by_name=True),
        get_row("/v1/models/workflow/{workflow}", _VIEW_MODELS, models.get_workflow, with_head=True, by_name=True),
        get_row("/v1/models/{model:name}", _VIEW_MODELS, models.get_model, with_head=True, by_name=True),
    ),
)
ANTHROPIC: EndpointGroup[InferenceDeps] = EndpointGroup(
    tag="anthropic",
    endpoints=(
        post_row("/v1/messages", _USE, create_message, json_body(MessagesRequest, error="AnthropicError")),
        post_row(
            "/v1/messages/count_tokens", _USE, count_tokens, json_body(CountTokensRequest, error="AnthropicError")
        ),
    ),
)
_OLLAMA_FAILURE = "OllamaError"
_OLLAMA_FAILS = fails_as(_OLLAMA_FAILURE)


def _ollama_post(
    path: str, access: Access, handler: Handler[OllamaDeps], body: type[BaseModel], **fields: Any
) -> Endpoint[OllamaDeps]:
    return post_row(path, access, handler, json_body(body, error=_OLLAMA_FAILURE, stream=JSON_LINES), **fields)


OLLAMA: EndpointGroup[OllamaDeps] = EndpointGroup(
    tag="ollama",
    endpoints=(
        _ollama_post("/api/chat", _USE, ollama.chat, OllamaChatRequest),
        _ollama_post("/api/generate", _USE, ollama.generate, OllamaGenerateRequest),
        _ollama_post("/api/embed", _USE, ollama_embed.embed, OllamaEmbedRequest),
        _ollama_post("/api/embeddings", _USE, ollama_embed.embed_one, OllamaEmbeddingsRequest),
        get_row("/api/tags", _VIEW_MODELS, ollama_models.list_tags, _OLLAMA_FAILS, with_head=True, by_name=True),
        _ollama_post("/api/show", _VIEW_MODELS, ollama_models.show_model, OllamaShowRequest, by_name=True),
        get_row("/api/ps", _VIEW_MODELS, ollama_models.list_running, _OLLAMA_FAILS, with_head=True, by_name=True),
        get_row("/api/version", _VIEW_MODELS, ollama_models.get_version, _OLLAMA_FAILS, with_head=True),
        _ollama_post("/api/pull", _OPERATE, pull_model, OllamaPullRequest),
        post_row("/api/create", _EDIT_MODELS, ollama_store.refuse_create, _OLLAMA_FAILS, name="refuse_create"),
        post_row("/api/copy", _EDIT_MODELS, ollama_store.refuse_copy, _OLLAMA_FAILS, name="refuse_copy"),
        post_row("/api/push", _EDIT_MODELS, ollama_store.refuse_push, _OLLAMA_FAILS, name="refuse_push"),
        delete_row("/api/delete", _EDIT_MODELS, ollama_store.refuse_delete, _OLLAMA_FAILS, name="refuse_delete"),
        post_row("/api/blobs/{digest}", _EDIT_MODELS, ollama_store.refuse_blob, _OLLAMA_FAILS, name="refuse_blob"),
        get_row("/", None, ollama_models.get_root, with_head=True, response_class=PlainTextResponse),
    ),
)
_RESPONSE = "/v1/responses/{response_id}"
RESPONSES: EndpointGroup[Responses] = EndpointGroup(
    tag="openai",
    endpoints=(
        post_row("/v1/responses", _USE, create_response, json_body(ResponsesRequest)),
        get_row(
            _RESPONSE,
            _VIEW,
            get_response,
            answers(ResponseObject, path="response_id", query=STREAM_PARAMETERS, events=True),
        ),
        delete_row(_RESPONSE, _EDIT, delete_response, answers(DeletedResponse, path="response_id")),
        post_row(f"{_RESPONSE}/cancel", _EDIT, cancel_response, answers(ResponseObject, path="response_id")),
        get_row(
            f"{_RESPONSE}/input_items",
            _VIEW,
            list_input_items,
            answers(ResponseItemList, path="response_id", query=LIST_PARAMETERS),
        ),
    ),
)

_API = "/api/v1"
WATCH: EndpointGroup[WatchDeps] = EndpointGroup(
    tag="resources",
    endpoints=(
        # What a key needs follows from the kinds of the request.
        get_row(
            f"{_API}/watch",
            None,
            watching.watch,
            answers_events(query=watching.PARAMETERS),
            needs_key=True,
        ),
    ),
)
HEALTH: EndpointGroup[GatewayDeps] = EndpointGroup(
    tag="operations",
    endpoints=(
        get_row("/health", None, get_health, name="health", with_head=True),
        get_row("/livez", None, get_livez, with_head=True),
        # As probes of other services name it.
        get_row("/healthz", None, get_livez, name="healthz", with_head=True),
        get_row("/readyz", None, get_readyz, with_head=True),
        get_row("/ca.pem", None, get_authority, name="authority", with_head=True),
        get_row(
            "/metrics",
            VIEW_TELEMETRY,
            get_metrics,
            name="metrics",
            with_head=True,
            response_class=PlainTextResponse,
        ),
    ),
)

_TASKS = f"{_API}/inference-tasks"
_TASK = f"{_TASKS}/{{id}}"
TASKS: EndpointGroup[TaskDeps] = EndpointGroup(
    tag="tasks",
    endpoints=(
        post_row(
            _TASKS,
            _USE,
            tasks.submit_task,
            json_body(NewTaskBody) | answers(TaskObject, status=202, also=200),
            status=202,
        ),
        get_row(_TASKS, _VIEW, tasks.list_tasks, answers(TaskList, query=tasks.LIST_PARAMETERS)),
        get_row(_TASK, _VIEW, tasks.get_task, answers(TaskObject, path="id")),
        get_row(f"{_TASK}/events", _VIEW, tasks.watch_task, answers_events(path="id", query=("after",))),
        post_row(f"{_TASK}/cancel", _EDIT, tasks.cancel_task, answers(TaskObject, path="id")),
        delete_row(
            _TASK, _EDIT, tasks.delete_task, answers(TaskObject, path="id", query=("forget",), or_nothing="Forgotten")
        ),
    ),
)
_FILE = "/v1/files/{file_id}"
FILES: EndpointGroup[FileDeps] = EndpointGroup(
    tag="openai",
    endpoints=(
        post_row(
            "/v1/files",
            _USE,
            create_file,
            form_body(None, files=("file",), choices={"purpose": (BATCH_INPUT, *MEDIA_INPUTS)}) | answers(FileObject),
        ),
        get_row("/v1/files", _VIEW, list_files, answers(FileList, query=FILE_LIST_PARAMETERS)),
        get_row(_FILE, _VIEW, get_file, answers(FileObject, path="file_id")),
        get_row(
            f"{_FILE}/content",
            _VIEW,
            get_content,
            binary_content("The content of the file", "application/octet-stream", path="file_id"),
        ),
        delete_row(_FILE, _EDIT, delete_file, answers(DeletedFile, path="file_id")),
    ),
)
RESULTS: EndpointGroup[ResultDeps] = EndpointGroup(
    tag="openai",
    endpoints=(
        # The signature in the address takes the place of a key.
        get_row(
            "/v1/results/{id}",
            None,
            get_result,
            binary_content("The image or the recording", "image/*", "audio/*", path="id", query=RESULT_PARAMETERS),
            with_head=True,
        ),
    ),
)
_BATCH = "/v1/batches/{batch_id}"
BATCHES: EndpointGroup[BatchDeps] = EndpointGroup(
    tag="openai",
    endpoints=(
        post_row("/v1/batches", _USE, batches.create_batch, json_body(BatchRequest) | answers(BatchObject)),
        get_row("/v1/batches", _VIEW, batches.list_batches, answers(BatchList, query=batches.BATCH_LIST_PARAMETERS)),
        get_row(_BATCH, _VIEW, batches.get_batch, answers(BatchObject, path="batch_id")),
        post_row(f"{_BATCH}/cancel", _EDIT, batches.cancel_batch, answers(BatchObject, path="batch_id")),
    ),
)
DOCUMENT: EndpointGroup[EndpointApp] = EndpointGroup(
    tag="document",
    # The document names no model.
    endpoints=(
        get_row(OPENAPI, _VIEW_MODELS, get_openapi, with_head=True, in_schema=False, by_name=True),
        get_row("/docs", None, get_docs, with_head=True, in_schema=False),
    ),
)

WORKBENCH: EndpointGroup[WorkbenchDeps] = EndpointGroup(
    tag="workbench",
    endpoints=(
        get_row("/ui", None, redirect_to_page, with_head=True, in_schema=False),
        get_row("/ui/{path:path}", None, get_page, with_head=True, in_schema=False),
        get_row("/api/v1/caller", None, get_caller),
    ),
)

GATEWAY_GROUPS: tuple[EndpointGroup[Any], ...] = (
    OPENAI,
    ANTHROPIC,
    OLLAMA,
    RESPONSES,
    RESOURCES,
    WATCH,
    SETTINGS,
    HEALTH,
    ADMIN,
    JOIN_TOKENS,
    KEYS,
    SECRETS,
    REQUESTS,
    USAGE,
    TASKS,
    FILES,
    RESULTS,
    BATCHES,
    WORKBENCH,
    DOCUMENT,
)
"""Every endpoint of a gateway; a gateway without the collaborators of a group leaves it out."""
RUNNER_GROUPS: tuple[EndpointGroup[Any], ...] = (RUNNER_OPERATIONS, OPENAI, RUNNER_STATE, RUNNER_METRICS, DOCUMENT)
"""Every endpoint of one runner's API."""


def endpoints_of(groups: Iterable[EndpointGroup[Any]]) -> list[Endpoint[Any]]:
    """Returns the rows of some groups."""
    return [endpoint for group in groups for endpoint in group.endpoints]


def published_schemas(groups: Iterable[EndpointGroup[Any]]) -> tuple[Schema, ...]:
    """Returns the schemas of the OpenAPI document: those of every row, served or not."""
    return tuple(dict.fromkeys(model for endpoint in endpoints_of(groups) for model in endpoint.doc.models))


ACCESS_RULES = AccessRules(
    (
        (method, endpoint.path, endpoint.access)
        for endpoint in endpoints_of((*GATEWAY_GROUPS, *RUNNER_GROUPS))
        for method in endpoint.methods
        if not endpoint.needs_key
    ),
    keyed_paths=(endpoint.path for endpoint in endpoints_of((*GATEWAY_GROUPS, *RUNNER_GROUPS)) if endpoint.needs_key),
)


def docs_table() -> str:
    """Returns the table of endpoints in docs/http-api.md."""
    task_apis = ((GATEWAY_GROUPS, "gateway"), (RUNNER_GROUPS, "runner"))
    servers: dict[tuple[str, str, str], list[str]] = {}
    for groups, server in task_apis:
        for endpoint in endpoints_of(groups):
            method = "GET, HEAD" if endpoint.with_head else endpoint.method
            access = f"`{endpoint.access or 'none'}`"
            if endpoint.needs_key:
                access = "those of its kinds"
            servers.setdefault((shown_path(endpoint.path), method, access), []).append(server)
    rows = [f"| `{method} {path}` | {access} | {', '.join(of)} |" for (path, method, access), of in servers.items()]
    return "\n".join(("| endpoint | a key needs | served by |", "|---|---|---|", *rows)) + "\n"
