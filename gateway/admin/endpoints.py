"""The endpoints for operators: models, operations, keys, secrets, requests and usage."""

from gateway.admin import join_tokens, keys, operations, secrets
from gateway.admin import models as admin_models
from gateway.admin.engine_logs import LOG_PARAMETERS, get_engine_logs
from gateway.admin.join_tokens import NewJoinTokenBody
from gateway.admin.keys import NewKeyBody, RotateBody
from gateway.admin.models import get_discovered
from gateway.admin.operations import (
    LIMIT_PARAMETERS,
    REQUEST_LIST_PARAMETERS,
    REQUEST_PARAMETERS,
    cancel_request,
    get_figures,
    get_request,
    list_clients,
    list_limit_uses,
    list_requests,
)
from gateway.admin.processes import PROCESS_PARAMETERS, LogLevelBody, get_process_health, put_log_level
from gateway.admin.schemas import FlushBody, LoadBody, PullBody, SourceLoadBody, UnloadBody
from gateway.admin.secrets import NewSecretBody, SecretValueBody
from gateway.admin.usage import ALL_USAGE_PARAMETERS, USAGE_PARAMETERS, get_all_usage, get_usage
from gateway.health import VIEW_TELEMETRY
from gateway.openapi import answers, json_body
from gateway.routing import ApiRouter
from weft.api.gateway.v1 import admin_model_pb2, discovery_pb2, engine_log_pb2, new_join_token_pb2, process_pb2
from weft.api.operations.v1 import operation_pb2, operation_service_pb2
from weft.api.registry.v1 import join_token_service_pb2, key_service_pb2, lease_pb2, secret_service_pb2
from weft.api.router.v1 import figures_pb2, request_service_pb2, usage_service_pb2
from weft.api.router.v1.request_pb2 import RequestRecord
from weft.api.runner.v1 import runner_service_pb2
from weft.documents.json_schema import record_schema
from weft.kernel.principal import (
    EDIT_REQUESTS,
    EDIT_SETTINGS,
    OPERATE,
    VIEW_REQUESTS,
    VIEW_RUNNERS,
    Access,
    Resource,
    Role,
)

_EDIT_RUNNERS = Access(Resource.RUNNERS, Role.EDIT)
_VIEW_OPERATIONS = Access(Resource.OPERATIONS, Role.VIEW)
_EDIT_OPERATIONS = Access(Resource.OPERATIONS, Role.EDIT)

_OPERATION_SCHEMA = record_schema(operation_pb2.Operation)
_REQUEST_SCHEMA, _REQUEST_LIST = record_schema(RequestRecord), record_schema(request_service_pb2.ListRequestsResponse)
_FIGURES = record_schema(figures_pb2.Figures)
_CLIENT_LIST = record_schema(request_service_pb2.ListClientsResponse)

_ADMIN = "/v1/admin"
_ADMIN_MODEL = f"{_ADMIN}/models/{{name:name}}"
_OPERATION = f"{_ADMIN}/operations/{{name}}"
ADMIN = ApiRouter("admin")
ADMIN.add_get(
    f"{_ADMIN}/models",
    _VIEW_OPERATIONS,
    admin_models.list_admin_models,
    answers(record_schema(admin_model_pb2.AdminModelList)),
)
ADMIN.add_get(
    f"{_ADMIN_MODEL}/logs",
    VIEW_RUNNERS,
    get_engine_logs,
    answers(record_schema(engine_log_pb2.EngineLog), path="name", query=LOG_PARAMETERS, events=True),
)
ADMIN.add_get(
    _ADMIN_MODEL,
    _VIEW_OPERATIONS,
    admin_models.get_admin_model,
    answers(record_schema(admin_model_pb2.AdminModel), path="name"),
)
ADMIN.add_get(
    f"{_ADMIN}/runners/{{name}}/instances",
    VIEW_RUNNERS,
    admin_models.get_instances,
    answers(record_schema(runner_service_pb2.DescribeResponse), path="name", query=admin_models.INSTANCE_PARAMETERS),
)
ADMIN.add_get(
    f"{_ADMIN}/gpu-memory",
    _VIEW_OPERATIONS,
    admin_models.get_gpu_memory,
    answers(record_schema(admin_model_pb2.GpuMemory), query=("host",)),
)
ADMIN.add_get(
    f"{_ADMIN}/discovered",
    _VIEW_OPERATIONS,
    get_discovered,
    answers(record_schema(discovery_pb2.Discovery)),
)
ADMIN.add_get(
    f"{_ADMIN}/process-health",
    VIEW_TELEMETRY,
    get_process_health,
    answers(record_schema(process_pb2.ProcessHealth), query=PROCESS_PARAMETERS),
)
ADMIN.add_put(
    f"{_ADMIN}/log-level",
    EDIT_SETTINGS,
    put_log_level,
    json_body(LogLevelBody) | answers(record_schema(process_pb2.ProcessLogLevel)),
)
ADMIN.add_post(
    f"{_ADMIN_MODEL}/load",
    OPERATE,
    admin_models.load_model,
    json_body(LoadBody) | answers(_OPERATION_SCHEMA, path="name", status=202),
    status=202,
    by_name=True,
)
ADMIN.add_post(
    f"{_ADMIN}/models",
    OPERATE,
    admin_models.load_source,
    json_body(SourceLoadBody) | answers(_OPERATION_SCHEMA, status=202),
    status=202,
)
ADMIN.add_post(
    f"{_ADMIN}/pulls",
    OPERATE,
    admin_models.pull_model,
    json_body(PullBody) | answers(_OPERATION_SCHEMA, status=202),
    status=202,
)
ADMIN.add_post(
    f"{_ADMIN_MODEL}/remove",
    OPERATE,
    admin_models.remove_model,
    json_body(UnloadBody) | answers(_OPERATION_SCHEMA, path="name", status=202),
    status=202,
)
ADMIN.add_post(
    f"{_ADMIN}/servers/{{name}}/detach",
    OPERATE,
    admin_models.detach_server,
    json_body(UnloadBody) | answers(_OPERATION_SCHEMA, path="name", status=202),
    status=202,
)
ADMIN.add_post(
    f"{_ADMIN_MODEL}/unload",
    OPERATE,
    admin_models.unload_model,
    json_body(UnloadBody) | answers(_OPERATION_SCHEMA, path="name", status=202),
    status=202,
    by_name=True,
)
ADMIN.add_post(
    f"{_ADMIN}/cache/flush",
    OPERATE,
    admin_models.flush_cache,
    json_body(FlushBody) | answers(_OPERATION_SCHEMA, status=202),
    status=202,
    by_name=True,
)
ADMIN.add_get(
    f"{_ADMIN}/operations",
    _VIEW_OPERATIONS,
    operations.list_operations,
    answers(record_schema(operation_service_pb2.ListOperationsResponse), query=operations.PAGE_PARAMETERS),
)
ADMIN.add_get(
    _OPERATION,
    _VIEW_OPERATIONS,
    operations.get_operation,
    answers(_OPERATION_SCHEMA, path="name", query=("watch",)),
)
ADMIN.add_delete(_OPERATION, _EDIT_OPERATIONS, operations.cancel_operation, answers(_OPERATION_SCHEMA, path="name"))
ADMIN.add_delete(
    f"{_ADMIN}/leases/{{id}}",
    _EDIT_RUNNERS,
    operations.release_lease,
    answers(record_schema(lease_pb2.Lease), path="id"),
)
ADMIN.add_get(
    f"{_ADMIN}/audit",
    _VIEW_OPERATIONS,
    operations.get_audit,
    answers(record_schema(operation_service_pb2.ListAuditEntriesResponse), query=operations.AUDIT_PARAMETERS),
)
JOIN_TOKENS = ApiRouter("admin")
JOIN_TOKENS.add_get(
    f"{_ADMIN}/join-tokens",
    VIEW_RUNNERS,
    join_tokens.list_join_tokens,
    answers(record_schema(join_token_service_pb2.ListJoinTokensResponse)),
)
JOIN_TOKENS.add_post(
    f"{_ADMIN}/join-tokens",
    Access(Resource.RUNNERS, Role.CREATE),
    join_tokens.create_join_token,
    json_body(NewJoinTokenBody) | answers(record_schema(new_join_token_pb2.NewJoinToken), status=201),
    status=201,
)
JOIN_TOKENS.add_delete(
    f"{_ADMIN}/join-tokens/{{id}}",
    _EDIT_RUNNERS,
    join_tokens.revoke_join_token,
    answers(None, path="id"),
    status=204,
)
_KEYS_SCHEMA = record_schema(key_service_pb2.ListKeysResponse)
_NEW_KEY_SCHEMA = record_schema(key_service_pb2.RotateKeyResponse)
KEYS = ApiRouter("keys")
KEYS.add_get(
    "/api/v1/keys",
    Access(Resource.KEYS, Role.VIEW),
    keys.list_keys,
    answers(_KEYS_SCHEMA),
)
KEYS.add_delete(
    "/api/v1/keys/{id}",
    Access(Resource.KEYS, Role.EDIT),
    keys.revoke_key,
    answers(None, path="id"),
    status=204,
)
KEYS.add_post(
    "/api/v1/keys",
    Access(Resource.KEYS, Role.CREATE),
    keys.create_key,
    json_body(NewKeyBody) | answers(_NEW_KEY_SCHEMA, status=201),
    status=201,
)
KEYS.add_post(
    "/api/v1/keys/{id}/rotate",
    Access(Resource.KEYS, Role.EDIT),
    keys.rotate_key,
    json_body(RotateBody) | answers(_NEW_KEY_SCHEMA, path="id"),
)
_SECRET_SCHEMA = record_schema(secret_service_pb2.Secret)
SECRETS = ApiRouter("secrets")
SECRETS.add_get(
    f"{_ADMIN}/secrets",
    Access(Resource.SECRETS, Role.VIEW),
    secrets.list_secrets,
    answers(record_schema(secret_service_pb2.ListSecretsResponse)),
)
SECRETS.add_post(
    f"{_ADMIN}/secrets",
    Access(Resource.SECRETS, Role.CREATE),
    secrets.create_secret,
    json_body(NewSecretBody) | answers(_SECRET_SCHEMA, status=201),
    status=201,
)
SECRETS.add_put(
    f"{_ADMIN}/secrets/{{name}}",
    Access(Resource.SECRETS, Role.EDIT),
    secrets.update_secret,
    json_body(SecretValueBody) | answers(_SECRET_SCHEMA, path="name"),
)
SECRETS.add_delete(
    f"{_ADMIN}/secrets/{{name}}",
    Access(Resource.SECRETS, Role.EDIT),
    secrets.delete_secret,
    answers(None, path="name", query=secrets.DELETE_PARAMETERS),
    status=204,
)
REQUESTS = ApiRouter("requests")
REQUESTS.add_get(
    "/v1/requests",
    VIEW_REQUESTS,
    list_requests,
    answers(_REQUEST_LIST, query=REQUEST_LIST_PARAMETERS),
)
# An id may contain slashes.
_ONE_REQUEST = answers(_REQUEST_SCHEMA, path="id", query=REQUEST_PARAMETERS)
REQUESTS.add_get("/v1/requests/{id:path}", VIEW_REQUESTS, get_request, _ONE_REQUEST)
REQUESTS.add_post("/v1/requests/{id:path}/cancel", EDIT_REQUESTS, cancel_request, _ONE_REQUEST)
REQUESTS.add_get(
    "/v1/clients",
    VIEW_TELEMETRY,
    list_clients,
    answers(_CLIENT_LIST),
)
REQUESTS.add_get(
    f"{_ADMIN}/limit-uses",
    VIEW_TELEMETRY,
    list_limit_uses,
    answers(record_schema(request_service_pb2.ListLimitUsesResponse), query=LIMIT_PARAMETERS),
)
REQUESTS.add_get(f"{_ADMIN}/figures", VIEW_TELEMETRY, get_figures, answers(_FIGURES))
_USAGE = record_schema(usage_service_pb2.ListUsageResponse)
USAGE = ApiRouter("usage")
USAGE.add_get("/v1/usage", VIEW_REQUESTS, get_usage, answers(_USAGE, query=USAGE_PARAMETERS))
USAGE.add_get(f"{_ADMIN}/usage", VIEW_TELEMETRY, get_all_usage, answers(_USAGE, query=ALL_USAGE_PARAMETERS))
