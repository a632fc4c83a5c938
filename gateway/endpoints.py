"""The table of HTTP endpoints: method, path, access, handler and OpenAPI of each.

Routing, access rules, the OpenAPI document and the table in docs/http-api.md follow from it. A new endpoint is a row
here, its handler and its schema.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.responses import PlainTextResponse, StreamingResponse

from gateway.admin import join_tokens, keys, operations, secrets
from gateway.admin import models as admin_models
from gateway.admin.discovered import get_discovered
from gateway.admin.engine_logs import LOG_PARAMETERS, get_engine_logs
from gateway.admin.join_tokens import JoinTokenDeps, NewJoinTokenBody
from gateway.admin.keys import KeysDeps, NewKeyBody, RotateBody
from gateway.admin.operations import (
    REQUEST_LIST_PARAMETERS,
    AdminDeps,
    cancel_request,
    get_figures,
    get_request,
    list_clients,
    list_requests,
)
from gateway.admin.processes import PROCESS_PARAMETERS, LogLevelBody, get_process_health, put_log_level
from gateway.admin.schemas import FlushBody, LoadBody, PullBody, SourceLoadBody, UnloadBody
from gateway.admin.secrets import NewSecretBody, SecretsDeps, SecretValueBody
from gateway.admin.usage import ALL_USAGE_PARAMETERS, USAGE_PARAMETERS, UsageDeps, get_all_usage, get_usage
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
from gateway.endpoint_rows import Handler
from gateway.endpoint_rows import delete_row as _delete
from gateway.endpoint_rows import get_row as _get
from gateway.endpoint_rows import post_row as _post
from gateway.endpoint_rows import put_row as _put
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
    JSON_LINES,
    Schema,
    answers,
    answers_events,
    binary_content,
    fails_as,
    form_body,
    json_body,
    json_or_yaml_body,
)
from gateway.resources import handlers as resources
from gateway.resources import profiles
from gateway.resources.documents import (
    APPLY_ANSWER,
    POOL_MEMBERS,
    SWITCH_ANSWER,
    ApplyRequest,
    MeshConfig,
    page_schema,
)
from gateway.resources.handlers import APPLY_PARAMETERS, apply_resources, put_resource
from gateway.resources.profiles import SaveProfileBody
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
from gateway.routing import Endpoint, EndpointApp, EndpointGroup, get_openapi
from gateway.runner_api.endpoints import RUNNER_METRICS, RUNNER_OPERATIONS, RUNNER_STATE
from gateway.tasks import handlers as tasks
from gateway.tasks.handlers import NewTaskBody, TaskDeps, TaskList, TaskObject
from gateway.watch import handlers as watching
from gateway.watch.handlers import WatchDeps
from gateway.workbench.serving import WorkbenchDeps, get_caller, get_page, redirect_to_page
from weft.api.gateway.v1 import admin_model_pb2, discovery_pb2, engine_log_pb2, new_join_token_pb2, process_pb2
from weft.api.operations.v1 import operation_pb2, operation_service_pb2
from weft.api.registry.v1 import join_token_service_pb2, key_service_pb2, lease_pb2, secret_service_pb2
from weft.api.registry.v1.registry_service_pb2 import ListEventsResponse
from weft.api.router.v1 import figures_pb2, request_service_pb2, usage_service_pb2
from weft.api.router.v1.request_pb2 import RequestRecord
from weft.dispatch.remote_router import RequestSource
from weft.documents.json_schema import record_schema
from weft.documents.resource_kinds import ResourceKind
from weft.documents.rights import resource_of
from weft.documents.schemas import resource_schema
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
_RECORDING = binary_content("The recording", "audio/*", "application/octet-stream")

OPENAI: EndpointGroup[InferenceDeps] = EndpointGroup(
    tag="openai",
    endpoints=(
        _post("/v1/chat/completions", _USE, chat_completions, json_body(ChatRequest)),
        _post("/v1/completions", _USE, text_completions, json_body(CompletionRequest)),
        _post("/v1/embeddings", _USE, create_embeddings, json_body(EmbeddingRequest)),
        _post("/v1/rerank", _USE, rerank_documents, json_body(RerankRequest)),
        _post("/rerank", _USE, rerank_documents, json_body(RerankRequest)),
        _post("/tokenize", _USE, tokenize, json_body(TokenizeRequest)),
        _post("/v1/tokenize", _USE, tokenize, json_body(TokenizeRequest)),
        _post("/v1/images/generations", _USE, images.generate_images, json_body(ImageRequest)),
        _post("/v1/images/edits", _USE, images.edit_images, _IMAGE_EDIT),
        _post("/v1/images/variations", _USE, images.vary_images, form_body(None, files=("image",))),
        _post(
            "/v1/audio/transcriptions",
            _USE,
            transcriptions.transcribe,
            form_body(TranscriptionRequest, files=("file",)),
        ),
        _post(
            "/v1/audio/translations", _USE, transcriptions.translate, form_body(TranscriptionRequest, files=("file",))
        ),
        _post(
            "/v1/audio/speech",
            _USE,
            speech.speak,
            json_body(SpeechRequest) | _RECORDING,
            response_class=StreamingResponse,
        ),
        _get("/v1/audio/voices", _VIEW_MODELS, speech.list_voices, by_name=True),
        _get("/v1/models", _VIEW_MODELS, models.list_models, with_head=True, by_name=True),
        _get("/v1/models/{model}", _VIEW_MODELS, models.get_model, with_head=True, by_name=True),
        _get("/v1/models/agent/{agent}", _VIEW_MODELS, models.get_agent, with_head=True, by_name=True),
        _get("/v1/models/route/{route}", _VIEW_MODELS, models.get_route, with_head=True, by_name=True),
        _get("/v1/models/workflow/{workflow}", _VIEW_MODELS, models.get_workflow, with_head=True, by_name=True),
    ),
)
ANTHROPIC: EndpointGroup[InferenceDeps] = EndpointGroup(
    tag="anthropic",
    endpoints=(
        _post("/v1/messages", _USE, create_message, json_body(MessagesRequest, error="AnthropicError")),
        _post("/v1/messages/count_tokens", _USE, count_tokens, json_body(CountTokensRequest, error="AnthropicError")),
    ),
)
_OLLAMA_FAILURE = "OllamaError"
_OLLAMA_FAILS = fails_as(_OLLAMA_FAILURE)


def _ollama_post(
    path: str, access: Access, handler: Handler[OllamaDeps], body: type[BaseModel], **fields: Any
) -> Endpoint[OllamaDeps]:
    return _post(path, access, handler, json_body(body, error=_OLLAMA_FAILURE, stream=JSON_LINES), **fields)


OLLAMA: EndpointGroup[OllamaDeps] = EndpointGroup(
    tag="ollama",
    endpoints=(
        _ollama_post("/api/chat", _USE, ollama.chat, OllamaChatRequest),
        _ollama_post("/api/generate", _USE, ollama.generate, OllamaGenerateRequest),
        _ollama_post("/api/embed", _USE, ollama_embed.embed, OllamaEmbedRequest),
        _ollama_post("/api/embeddings", _USE, ollama_embed.embed_one, OllamaEmbeddingsRequest),
        _get("/api/tags", _VIEW_MODELS, ollama_models.list_tags, _OLLAMA_FAILS, with_head=True, by_name=True),
        _ollama_post("/api/show", _VIEW_MODELS, ollama_models.show_model, OllamaShowRequest, by_name=True),
        _get("/api/ps", _VIEW_MODELS, ollama_models.list_running, _OLLAMA_FAILS, with_head=True, by_name=True),
        _get("/api/version", _VIEW_MODELS, ollama_models.get_version, _OLLAMA_FAILS, with_head=True),
        _ollama_post("/api/pull", _OPERATE, pull_model, OllamaPullRequest),
        _post("/api/create", _EDIT_MODELS, ollama_store.refuse_create, _OLLAMA_FAILS, name="refuse_create"),
        _post("/api/copy", _EDIT_MODELS, ollama_store.refuse_copy, _OLLAMA_FAILS, name="refuse_copy"),
        _post("/api/push", _EDIT_MODELS, ollama_store.refuse_push, _OLLAMA_FAILS, name="refuse_push"),
        _delete("/api/delete", _EDIT_MODELS, ollama_store.refuse_delete, _OLLAMA_FAILS, name="refuse_delete"),
        _post("/api/blobs/{digest}", _EDIT_MODELS, ollama_store.refuse_blob, _OLLAMA_FAILS, name="refuse_blob"),
        _get("/", None, ollama_models.get_root, with_head=True, response_class=PlainTextResponse),
    ),
)
_RESPONSE = "/v1/responses/{response_id}"
RESPONSES: EndpointGroup[Responses] = EndpointGroup(
    tag="openai",
    endpoints=(
        _post("/v1/responses", _USE, create_response, json_body(ResponsesRequest)),
        _get(
            _RESPONSE,
            _VIEW,
            get_response,
            answers(ResponseObject, path="response_id", query=STREAM_PARAMETERS, events=True),
        ),
        _delete(_RESPONSE, _EDIT, delete_response, answers(DeletedResponse, path="response_id")),
        _post(f"{_RESPONSE}/cancel", _EDIT, cancel_response, answers(ResponseObject, path="response_id")),
        _get(
            f"{_RESPONSE}/input_items",
            _VIEW,
            list_input_items,
            answers(ResponseItemList, path="response_id", query=LIST_PARAMETERS),
        ),
    ),
)

_API = "/api/v1"
_PUTTABLE = (
    ResourceKind.MODEL,
    ResourceKind.AGENT,
    ResourceKind.ROUTE,
    ResourceKind.ALIAS,
    ResourceKind.PROFILE,
    ResourceKind.WORKFLOW,
    ResourceKind.TENANT,
)
_DELETABLE = (*_PUTTABLE, ResourceKind.RUNNER)
_UNNAMED = frozenset({ResourceKind.RUNNER, ResourceKind.PROFILE, ResourceKind.TENANT})
"""Kinds for which a key needs the scope for everything."""


def _of_kind(kind: ResourceKind, role: Role) -> Access:
    return Access(resource_of(kind), role)


def _reads(kind: ResourceKind) -> tuple[Endpoint[GatewayDeps], ...]:
    access, plural = _of_kind(kind, Role.VIEW), kind.plural
    return (
        _get(
            f"{_API}/{plural}",
            access,
            partial(resources.list_resources, kind),
            answers(page_schema(kind), query=resources.list_parameters(kind)),
            summary=f"Get {plural}",
            operation_id=f"get_{plural}",
            by_name=kind not in _UNNAMED,
        ),
        _get(
            f"{_API}/{plural}/{{name}}",
            access,
            partial(resources.get_resource, kind),
            answers(resource_schema(kind), path="name"),
            summary=f"Get {plural} by name",
            operation_id=f"get_{plural}_by_name",
            by_name=kind not in _UNNAMED,
        ),
    )


def _deletion(kind: ResourceKind) -> Endpoint[GatewayDeps]:
    return _delete(
        f"{_API}/{kind.plural}/{{name}}",
        _of_kind(kind, Role.EDIT),
        partial(resources.delete_resource, kind),
        answers(None, path="name", query=resources.DELETE_PARAMETERS),
        status=204,
        summary=f"Delete {kind.value}",
        operation_id=f"delete_{kind.value}",
        by_name=kind not in _UNNAMED,
    )


def _replacement(kind: ResourceKind) -> Endpoint[GatewayDeps]:
    return _put(
        f"{_API}/{kind.plural}/{{name}}",
        _of_kind(kind, Role.EDIT),
        partial(put_resource, kind),
        json_or_yaml_body(resource_schema(kind)) | answers(APPLY_ANSWER, path="name", query=APPLY_PARAMETERS, also=201),
        summary=f"Put {kind.value}",
        operation_id=f"put_{kind.value}",
        by_name=kind not in _UNNAMED,
    )


RESOURCES: EndpointGroup[GatewayDeps] = EndpointGroup(
    tag="resources",
    endpoints=(
        *(endpoint for kind in ResourceKind for endpoint in _reads(kind)),
        _get(
            f"{_API}/models/{{name}}/members",
            _VIEW_MODELS,
            resources.get_members,
            answers(POOL_MEMBERS, path="name"),
            summary="Get models by name members",
            operation_id="get_models_by_name_members",
            by_name=True,
        ),
        *map(_deletion, _DELETABLE),
        _post(
            f"{_API}/apply",
            _EDIT_MODELS,
            apply_resources,
            json_or_yaml_body(ApplyRequest) | answers(APPLY_ANSWER, query=APPLY_PARAMETERS),
            name="apply",
            by_name=True,
        ),
        *map(_replacement, _PUTTABLE),
        _post(
            f"{_API}/profiles/{{name}}/save",
            _EDIT_MODELS,
            profiles.save_profile,
            json_body(SaveProfileBody) | answers(APPLY_ANSWER, path="name", query=profiles.PARAMETERS, also=201),
        ),
        _post(
            f"{_API}/profiles/{{name}}/switch",
            _EDIT_MODELS,
            profiles.switch_profile,
            answers(SWITCH_ANSWER, path="name", query=profiles.PARAMETERS),
        ),
        _get(
            f"{_API}/events",
            VIEW_TELEMETRY,
            resources.get_events,
            answers(record_schema(ListEventsResponse), query=resources.EVENT_PARAMETERS),
        ),
    ),
)
WATCH: EndpointGroup[WatchDeps] = EndpointGroup(
    tag="resources",
    endpoints=(
        # What a key needs follows from the kinds of the request.
        _get(
            f"{_API}/watch",
            None,
            watching.watch,
            answers_events(query=watching.PARAMETERS),
            needs_key=True,
        ),
    ),
)
SETTINGS: EndpointGroup[GatewayDeps] = EndpointGroup(
    tag="settings",
    endpoints=(
        _get(f"{_API}/config", Access(Resource.SETTINGS, Role.VIEW), resources.get_config, answers(MeshConfig)),
        _put(
            f"{_API}/config",
            Access(Resource.SETTINGS, Role.EDIT),
            resources.put_config,
            json_body(MeshConfig) | answers(MeshConfig),
        ),
    ),
)
HEALTH: EndpointGroup[GatewayDeps] = EndpointGroup(
    tag="operations",
    endpoints=(
        _get("/health", None, get_health, name="health", with_head=True),
        _get("/livez", None, get_livez, with_head=True),
        _get("/readyz", None, get_readyz, with_head=True),
        _get("/ca.pem", None, get_authority, name="authority", with_head=True),
        _get(
            "/metrics",
            VIEW_TELEMETRY,
            get_metrics,
            name="metrics",
            with_head=True,
            response_class=PlainTextResponse,
        ),
    ),
)

_ADMIN = "/v1/admin"
_ADMIN_MODEL = f"{_ADMIN}/models/{{name}}"
_OPERATION = f"{_ADMIN}/operations/{{name}}"
ADMIN: EndpointGroup[AdminDeps] = EndpointGroup(
    tag="admin",
    endpoints=(
        _get(
            f"{_ADMIN}/models",
            _VIEW_OPERATIONS,
            admin_models.list_admin_models,
            answers(record_schema(admin_model_pb2.AdminModelList)),
        ),
        _get(
            _ADMIN_MODEL,
            _VIEW_OPERATIONS,
            admin_models.get_admin_model,
            answers(record_schema(admin_model_pb2.AdminModel), path="name"),
        ),
        _get(
            f"{_ADMIN}/gpu-memory",
            _VIEW_OPERATIONS,
            admin_models.get_gpu_memory,
            answers(record_schema(admin_model_pb2.GpuMemory), query=("host",)),
        ),
        _get(
            f"{_ADMIN_MODEL}/logs",
            _VIEW_RUNNERS,
            get_engine_logs,
            answers(record_schema(engine_log_pb2.EngineLog), path="name", query=LOG_PARAMETERS, events=True),
        ),
        _get(
            f"{_ADMIN}/discovered",
            _VIEW_OPERATIONS,
            get_discovered,
            answers(record_schema(discovery_pb2.Discovery)),
        ),
        _get(
            f"{_ADMIN}/process-health",
            VIEW_TELEMETRY,
            get_process_health,
            answers(record_schema(process_pb2.ProcessHealth), query=PROCESS_PARAMETERS),
        ),
        _put(
            f"{_ADMIN}/log-level",
            Access(Resource.SETTINGS, Role.EDIT),
            put_log_level,
            json_body(LogLevelBody) | answers(record_schema(process_pb2.ProcessLogLevel)),
        ),
        _post(
            f"{_ADMIN_MODEL}/load",
            _OPERATE,
            admin_models.load_model,
            json_body(LoadBody) | answers(_OPERATION_SCHEMA, path="name", status=202),
            status=202,
            by_name=True,
        ),
        _post(
            f"{_ADMIN}/models",
            _OPERATE,
            admin_models.load_source,
            json_body(SourceLoadBody) | answers(_OPERATION_SCHEMA, status=202),
            status=202,
        ),
        _post(
            f"{_ADMIN}/pulls",
            _OPERATE,
            admin_models.pull_model,
            json_body(PullBody) | answers(_OPERATION_SCHEMA, status=202),
            status=202,
        ),
        _post(
            f"{_ADMIN_MODEL}/remove",
            _OPERATE,
            admin_models.remove_model,
            json_body(UnloadBody) | answers(_OPERATION_SCHEMA, path="name", status=202),
            status=202,
        ),
        _post(
            f"{_ADMIN}/servers/{{name}}/detach",
            _OPERATE,
            admin_models.detach_server,
            json_body(UnloadBody) | answers(_OPERATION_SCHEMA, path="name", status=202),
            status=202,
        ),
        _post(
            f"{_ADMIN_MODEL}/unload",
            _OPERATE,
            admin_models.unload_model,
            json_body(UnloadBody) | answers(_OPERATION_SCHEMA, path="name", status=202),
            status=202,
            by_name=True,
        ),
        _post(
            f"{_ADMIN}/cache/flush",
            _OPERATE,
            admin_models.flush_cache,
            json_body(FlushBody) | answers(_OPERATION_SCHEMA, status=202),
            status=202,
            by_name=True,
        ),
        _get(
            f"{_ADMIN}/operations",
            _VIEW_OPERATIONS,
            operations.list_operations,
            answers(record_schema(operation_service_pb2.ListOperationsResponse), query=operations.PAGE_PARAMETERS),
        ),
        _get(
            _OPERATION,
            _VIEW_OPERATIONS,
            operations.get_operation,
            answers(_OPERATION_SCHEMA, path="name", query=("watch",)),
        ),
        _delete(_OPERATION, _EDIT_OPERATIONS, operations.cancel_operation, answers(_OPERATION_SCHEMA, path="name")),
        _delete(
            f"{_ADMIN}/leases/{{id}}",
            _EDIT_RUNNERS,
            operations.release_lease,
            answers(record_schema(lease_pb2.Lease), path="id"),
        ),
        _get(
            f"{_ADMIN}/audit",
            _VIEW_OPERATIONS,
            operations.get_audit,
            answers(record_schema(operation_service_pb2.ListAuditEntriesResponse), query=operations.AUDIT_PARAMETERS),
        ),
    ),
)
JOIN_TOKENS: EndpointGroup[JoinTokenDeps] = EndpointGroup(
    tag="admin",
    endpoints=(
        _get(
            f"{_ADMIN}/join-tokens",
            _VIEW_RUNNERS,
            join_tokens.list_join_tokens,
            answers(record_schema(join_token_service_pb2.ListJoinTokensResponse)),
        ),
        _post(
            f"{_ADMIN}/join-tokens",
            Access(Resource.RUNNERS, Role.CREATE),
            join_tokens.create_join_token,
            json_body(NewJoinTokenBody) | answers(record_schema(new_join_token_pb2.NewJoinToken), status=201),
            status=201,
        ),
        _delete(
            f"{_ADMIN}/join-tokens/{{id}}",
            _EDIT_RUNNERS,
            join_tokens.revoke_join_token,
            answers(None, path="id"),
            status=204,
        ),
    ),
)
_KEYS_SCHEMA = record_schema(key_service_pb2.ListKeysResponse)
_NEW_KEY_SCHEMA = record_schema(key_service_pb2.RotateKeyResponse)
KEYS: EndpointGroup[KeysDeps] = EndpointGroup(
    tag="keys",
    endpoints=(
        _get(
            f"{_API}/keys",
            Access(Resource.KEYS, Role.VIEW),
            keys.list_keys,
            answers(_KEYS_SCHEMA),
        ),
        _delete(
            f"{_API}/keys/{{id}}",
            Access(Resource.KEYS, Role.EDIT),
            keys.revoke_key,
            answers(None, path="id"),
            status=204,
        ),
        _post(
            f"{_API}/keys",
            Access(Resource.KEYS, Role.CREATE),
            keys.create_key,
            json_body(NewKeyBody) | answers(_NEW_KEY_SCHEMA, status=201),
            status=201,
        ),
        _post(
            f"{_API}/keys/{{id}}/rotate",
            Access(Resource.KEYS, Role.EDIT),
            keys.rotate_key,
            json_body(RotateBody) | answers(_NEW_KEY_SCHEMA, path="id"),
        ),
    ),
)
_SECRET_SCHEMA = record_schema(secret_service_pb2.Secret)
SECRETS: EndpointGroup[SecretsDeps] = EndpointGroup(
    tag="secrets",
    endpoints=(
        _get(
            f"{_ADMIN}/secrets",
            Access(Resource.SECRETS, Role.VIEW),
            secrets.list_secrets,
            answers(record_schema(secret_service_pb2.ListSecretsResponse)),
        ),
        _post(
            f"{_ADMIN}/secrets",
            Access(Resource.SECRETS, Role.CREATE),
            secrets.create_secret,
            json_body(NewSecretBody) | answers(_SECRET_SCHEMA, status=201),
            status=201,
        ),
        _put(
            f"{_ADMIN}/secrets/{{name}}",
            Access(Resource.SECRETS, Role.EDIT),
            secrets.update_secret,
            json_body(SecretValueBody) | answers(_SECRET_SCHEMA, path="name"),
        ),
        _delete(
            f"{_ADMIN}/secrets/{{name}}",
            Access(Resource.SECRETS, Role.EDIT),
            secrets.delete_secret,
            answers(None, path="name", query=secrets.DELETE_PARAMETERS),
            status=204,
        ),
    ),
)
REQUESTS: EndpointGroup[RequestSource] = EndpointGroup(
    tag="requests",
    endpoints=(
        _get(
            "/v1/requests",
            _VIEW,
            list_requests,
            answers(_REQUEST_LIST, query=REQUEST_LIST_PARAMETERS),
        ),
        # An id may contain slashes.
        _get("/v1/requests/{id:path}", _VIEW, get_request, answers(_REQUEST_SCHEMA, path="id")),
        _post("/v1/requests/{id:path}/cancel", _EDIT, cancel_request, answers(_REQUEST_SCHEMA, path="id")),
        _get(
            "/v1/clients",
            VIEW_TELEMETRY,
            list_clients,
            answers(_CLIENT_LIST),
        ),
        _get(f"{_ADMIN}/figures", VIEW_TELEMETRY, get_figures, answers(_FIGURES)),
    ),
)
_USAGE = record_schema(usage_service_pb2.ListUsageResponse)
USAGE: EndpointGroup[UsageDeps] = EndpointGroup(
    tag="usage",
    endpoints=(
        _get("/v1/usage", _VIEW, get_usage, answers(_USAGE, query=USAGE_PARAMETERS)),
        _get(f"{_ADMIN}/usage", VIEW_TELEMETRY, get_all_usage, answers(_USAGE, query=ALL_USAGE_PARAMETERS)),
    ),
)

_TASKS = f"{_API}/inference-tasks"
_TASK = f"{_TASKS}/{{id}}"
TASKS: EndpointGroup[TaskDeps] = EndpointGroup(
    tag="tasks",
    endpoints=(
        _post(
            _TASKS,
            _USE,
            tasks.submit_task,
            json_body(NewTaskBody) | answers(TaskObject, status=202, also=200),
            status=202,
        ),
        _get(_TASKS, _VIEW, tasks.list_tasks, answers(TaskList, query=tasks.LIST_PARAMETERS)),
        _get(_TASK, _VIEW, tasks.get_task, answers(TaskObject, path="id")),
        _get(f"{_TASK}/events", _VIEW, tasks.watch_task, answers_events(path="id", query=("after",))),
        _post(f"{_TASK}/cancel", _EDIT, tasks.cancel_task, answers(TaskObject, path="id")),
        _delete(
            _TASK, _EDIT, tasks.delete_task, answers(TaskObject, path="id", query=("forget",), or_nothing="Forgotten")
        ),
    ),
)
_FILE = "/v1/files/{file_id}"
FILES: EndpointGroup[FileDeps] = EndpointGroup(
    tag="openai",
    endpoints=(
        _post(
            "/v1/files",
            _USE,
            create_file,
            form_body(None, files=("file",), choices={"purpose": (BATCH_INPUT, *MEDIA_INPUTS)}) | answers(FileObject),
        ),
        _get("/v1/files", _VIEW, list_files, answers(FileList, query=FILE_LIST_PARAMETERS)),
        _get(_FILE, _VIEW, get_file, answers(FileObject, path="file_id")),
        _get(
            f"{_FILE}/content",
            _VIEW,
            get_content,
            binary_content("The content of the file", "application/octet-stream", path="file_id"),
        ),
        _delete(_FILE, _EDIT, delete_file, answers(DeletedFile, path="file_id")),
    ),
)
RESULTS: EndpointGroup[ResultDeps] = EndpointGroup(
    tag="openai",
    endpoints=(
        # The signature in the address takes the place of a key.
        _get(
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
        _post("/v1/batches", _USE, batches.create_batch, json_body(BatchRequest) | answers(BatchObject)),
        _get("/v1/batches", _VIEW, batches.list_batches, answers(BatchList, query=batches.BATCH_LIST_PARAMETERS)),
        _get(_BATCH, _VIEW, batches.get_batch, answers(BatchObject, path="batch_id")),
        _post(f"{_BATCH}/cancel", _EDIT, batches.cancel_batch, answers(BatchObject, path="batch_id")),
    ),
)
DOCUMENT: EndpointGroup[EndpointApp] = EndpointGroup(
    tag="document",
    # The document names no model.
    endpoints=(_get("/openapi.json", _VIEW_MODELS, get_openapi, with_head=True, in_schema=False, by_name=True),),
)

WORKBENCH: EndpointGroup[WorkbenchDeps] = EndpointGroup(
    tag="workbench",
    endpoints=(
        _get("/ui", None, redirect_to_page, with_head=True, in_schema=False),
        _get("/ui/{path:path}", None, get_page, with_head=True, in_schema=False),
        _get("/api/v1/caller", None, get_caller),
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
RUNNER_GROUPS: tuple[EndpointGroup[Any], ...] = (OPENAI, RUNNER_OPERATIONS, RUNNER_STATE, RUNNER_METRICS, DOCUMENT)
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
            servers.setdefault((endpoint.path.replace(":path}", "}"), method, access), []).append(server)
    rows = [f"| `{method} {path}` | {access} | {', '.join(of)} |" for (path, method, access), of in servers.items()]
    return "\n".join(("| endpoint | a key needs | served by |", "|---|---|---|", *rows)) + "\n"
