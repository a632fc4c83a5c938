"""Rows of the table of endpoints for operators: models, operations, keys, secrets, requests and usage.

See `gateway.endpoints`.
"""

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
from gateway.endpoint_rows import delete_row, get_row, post_row, put_row
from gateway.health import VIEW_TELEMETRY
from gateway.openapi import answers, json_body
from gateway.routing import EndpointGroup
from weft.api.gateway.v1 import admin_model_pb2, discovery_pb2, engine_log_pb2, new_join_token_pb2, process_pb2
from weft.api.operations.v1 import operation_pb2, operation_service_pb2
from weft.api.registry.v1 import join_token_service_pb2, key_service_pb2, lease_pb2, secret_service_pb2
from weft.api.router.v1 import figures_pb2, request_service_pb2, usage_service_pb2
from weft.api.router.v1.request_pb2 import RequestRecord
from weft.dispatch.remote_router import RequestSource
from weft.documents.json_schema import record_schema
from weft.kernel.principal import Access, Resource, Role

_VIEW = Access(Resource.INFERENCE, Role.VIEW)
_EDIT = Access(Resource.INFERENCE, Role.EDIT)
_VIEW_RUNNERS = Access(Resource.RUNNERS, Role.VIEW)
_EDIT_RUNNERS = Access(Resource.RUNNERS, Role.EDIT)
_VIEW_OPERATIONS = Access(Resource.OPERATIONS, Role.VIEW)
_OPERATE = Access(Resource.OPERATIONS, Role.CREATE)
_EDIT_OPERATIONS = Access(Resource.OPERATIONS, Role.EDIT)

_OPERATION_SCHEMA = record_schema(operation_pb2.Operation)
_REQUEST_SCHEMA, _REQUEST_LIST = record_schema(RequestRecord), record_schema(request_service_pb2.ListRequestsResponse)
_FIGURES = record_schema(figures_pb2.Figures)
_CLIENT_LIST = record_schema(request_service_pb2.ListClientsResponse)

_ADMIN = "/v1/admin"
_ADMIN_MODEL = f"{_ADMIN}/models/{{name:name}}"
_OPERATION = f"{_ADMIN}/operations/{{name}}"
ADMIN: EndpointGroup[AdminDeps] = EndpointGroup(
    tag="admin",
    endpoints=(
        get_row(
            f"{_ADMIN}/models",
            _VIEW_OPERATIONS,
            admin_models.list_admin_models,
            answers(record_schema(admin_model_pb2.AdminModelList)),
        ),
        get_row(
            f"{_ADMIN_MODEL}/logs",
            _VIEW_RUNNERS,
            get_engine_logs,
            answers(record_schema(engine_log_pb2.EngineLog), path="name", query=LOG_PARAMETERS, events=True),
        ),
        get_row(
            _ADMIN_MODEL,
            _VIEW_OPERATIONS,
            admin_models.get_admin_model,
            answers(record_schema(admin_model_pb2.AdminModel), path="name"),
        ),
        get_row(
            f"{_ADMIN}/gpu-memory",
            _VIEW_OPERATIONS,
            admin_models.get_gpu_memory,
            answers(record_schema(admin_model_pb2.GpuMemory), query=("host",)),
        ),
        get_row(
            f"{_ADMIN}/discovered",
            _VIEW_OPERATIONS,
            get_discovered,
            answers(record_schema(discovery_pb2.Discovery)),
        ),
        get_row(
            f"{_ADMIN}/process-health",
            VIEW_TELEMETRY,
            get_process_health,
            answers(record_schema(process_pb2.ProcessHealth), query=PROCESS_PARAMETERS),
        ),
        put_row(
            f"{_ADMIN}/log-level",
            Access(Resource.SETTINGS, Role.EDIT),
            put_log_level,
            json_body(LogLevelBody) | answers(record_schema(process_pb2.ProcessLogLevel)),
        ),
        post_row(
            f"{_ADMIN_MODEL}/load",
            _OPERATE,
            admin_models.load_model,
            json_body(LoadBody) | answers(_OPERATION_SCHEMA, path="name", status=202),
            status=202,
            by_name=True,
        ),
        post_row(
            f"{_ADMIN}/models",
            _OPERATE,
            admin_models.load_source,
            json_body(SourceLoadBody) | answers(_OPERATION_SCHEMA, status=202),
            status=202,
        ),
        post_row(
            f"{_ADMIN}/pulls",
            _OPERATE,
            admin_models.pull_model,
            json_body(PullBody) | answers(_OPERATION_SCHEMA, status=202),
            status=202,
        ),
        post_row(
            f"{_ADMIN_MODEL}/remove",
            _OPERATE,
            admin_models.remove_model,
            json_body(UnloadBody) | answers(_OPERATION_SCHEMA, path="name", status=202),
            status=202,
        ),
        post_row(
            f"{_ADMIN}/servers/{{name}}/detach",
            _OPERATE,
            admin_models.detach_server,
            json_body(UnloadBody) | answers(_OPERATION_SCHEMA, path="name", status=202),
            status=202,
        ),
        post_row(
            f"{_ADMIN_MODEL}/unload",
            _OPERATE,
            admin_models.unload_model,
            json_body(UnloadBody) | answers(_OPERATION_SCHEMA, path="name", status=202),
            status=202,
            by_name=True,
        ),
        post_row(
            f"{_ADMIN}/cache/flush",
            _OPERATE,
            admin_models.flush_cache,
            json_body(FlushBody) | answers(_OPERATION_SCHEMA, status=202),
            status=202,
            by_name=True,
        ),
        get_row(
            f"{_ADMIN}/operations",
            _VIEW_OPERATIONS,
            operations.list_operations,
            answers(record_schema(operation_service_pb2.ListOperationsResponse), query=operations.PAGE_PARAMETERS),
        ),
        get_row(
            _OPERATION,
            _VIEW_OPERATIONS,
            operations.get_operation,
            answers(_OPERATION_SCHEMA, path="name", query=("watch",)),
        ),
        delete_row(_OPERATION, _EDIT_OPERATIONS, operations.cancel_operation, answers(_OPERATION_SCHEMA, path="name")),
        delete_row(
            f"{_ADMIN}/leases/{{id}}",
            _EDIT_RUNNERS,
            operations.release_lease,
            answers(record_schema(lease_pb2.Lease), path="id"),
        ),
        get_row(
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
        get_row(
            f"{_ADMIN}/join-tokens",
            _VIEW_RUNNERS,
            join_tokens.list_join_tokens,
            answers(record_schema(join_token_service_pb2.ListJoinTokensResponse)),
        ),
        post_row(
            f"{_ADMIN}/join-tokens",
            Access(Resource.RUNNERS, Role.CREATE),
            join_tokens.create_join_token,
            json_body(NewJoinTokenBody) | answers(record_schema(new_join_token_pb2.NewJoinToken), status=201),
            status=201,
        ),
        delete_row(
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
        get_row(
            "/api/v1/keys",
            Access(Resource.KEYS, Role.VIEW),
            keys.list_keys,
            answers(_KEYS_SCHEMA),
        ),
        delete_row(
            "/api/v1/keys/{id}",
            Access(Resource.KEYS, Role.EDIT),
            keys.revoke_key,
            answers(None, path="id"),
            status=204,
        ),
        post_row(
            "/api/v1/keys",
            Access(Resource.KEYS, Role.CREATE),
            keys.create_key,
            json_body(NewKeyBody) | answers(_NEW_KEY_SCHEMA, status=201),
            status=201,
        ),
        post_row(
            "/api/v1/keys/{id}/rotate",
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
        get_row(
            f"{_ADMIN}/secrets",
            Access(Resource.SECRETS, Role.VIEW),
            secrets.list_secrets,
            answers(record_schema(secret_service_pb2.ListSecretsResponse)),
        ),
        post_row(
            f"{_ADMIN}/secrets",
            Access(Resource.SECRETS, Role.CREATE),
            secrets.create_secret,
            json_body(NewSecretBody) | answers(_SECRET_SCHEMA, status=201),
            status=201,
        ),
        put_row(
            f"{_ADMIN}/secrets/{{name}}",
            Access(Resource.SECRETS, Role.EDIT),
            secrets.update_secret,
            json_body(SecretValueBody) | answers(_SECRET_SCHEMA, path="name"),
        ),
        delete_row(
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
        get_row(
            "/v1/requests",
            _VIEW,
            list_requests,
            answers(_REQUEST_LIST, query=REQUEST_LIST_PARAMETERS),
        ),
        # An id may contain slashes.
        get_row("/v1/requests/{id:path}", _VIEW, get_request, answers(_REQUEST_SCHEMA, path="id")),
        post_row("/v1/requests/{id:path}/cancel", _EDIT, cancel_request, answers(_REQUEST_SCHEMA, path="id")),
        get_row(
            "/v1/clients",
            VIEW_TELEMETRY,
            list_clients,
            answers(_CLIENT_LIST),
        ),
        get_row(f"{_ADMIN}/figures", VIEW_TELEMETRY, get_figures, answers(_FIGURES)),
    ),
)
_USAGE = record_schema(usage_service_pb2.ListUsageResponse)
USAGE: EndpointGroup[UsageDeps] = EndpointGroup(
    tag="usage",
    endpoints=(
        get_row("/v1/usage", _VIEW, get_usage, answers(_USAGE, query=USAGE_PARAMETERS)),
        get_row(f"{_ADMIN}/usage", VIEW_TELEMETRY, get_all_usage, answers(_USAGE, query=ALL_USAGE_PARAMETERS)),
    ),
)
