"""The endpoints for operators: models, operations, keys, secrets, requests and usage."""

from gateway.admin import admin_operations as operations
from gateway.admin import engine_logs, join_tokens, keys, models, processes, secrets, usage
from gateway.admin.join_tokens import NewJoinTokenBody
from gateway.admin.keys import NewKeyBody, RotateBody
from gateway.admin.schemas import FlushBody, LoadBody, PullBody, SourceLoadBody, UnloadBody
from gateway.admin.secrets import NewSecretBody, SecretValueBody
from gateway.openapi import answers, json_body
from gateway.routing import ApiRouter
from weft.api.gateway.v1.admin_model_pb2 import AdminModel, AdminModelList, GpuMemory
from weft.api.gateway.v1.discovery_pb2 import Discovery
from weft.api.gateway.v1.engine_log_pb2 import EngineLog
from weft.api.gateway.v1.model_catalog_pb2 import ModelCatalog
from weft.api.gateway.v1.new_join_token_pb2 import NewJoinToken
from weft.api.gateway.v1.process_pb2 import ProcessHealth
from weft.api.operations.v1.operation_pb2 import Operation
from weft.api.operations.v1.operation_service_pb2 import ListAuditEntriesResponse, ListOperationsResponse
from weft.api.registry.v1.capture_service_pb2 import Capture
from weft.api.registry.v1.join_token_service_pb2 import ListJoinTokensResponse
from weft.api.registry.v1.key_service_pb2 import ListKeysResponse, RotateKeyResponse
from weft.api.registry.v1.lease_pb2 import Lease
from weft.api.registry.v1.secret_service_pb2 import ListSecretsResponse, Secret
from weft.api.router.v1.figures_pb2 import Figures
from weft.api.router.v1.request_pb2 import RequestRecord
from weft.api.router.v1.request_service_pb2 import ListClientsResponse, ListLimitUsesResponse, ListRequestsResponse
from weft.api.router.v1.usage_service_pb2 import ListUsageResponse
from weft.api.runner.v1.runner_service_pb2 import DescribeResponse
from weft.kernel.access.principal import (
    EDIT_REQUESTS,
    OPERATE,
    VIEW_REQUESTS,
    VIEW_RUNNERS,
    VIEW_TELEMETRY,
    Access,
    Resource,
    Role,
)

_CREATE_RUNNERS, _EDIT_RUNNERS = Access(Resource.RUNNERS, Role.CREATE), Access(Resource.RUNNERS, Role.EDIT)
_VIEW_OPERATIONS, _EDIT_OPERATIONS = (Access(Resource.OPERATIONS, role) for role in (Role.VIEW, Role.EDIT))
_VIEW_KEYS, _CREATE_KEYS, _EDIT_KEYS = (Access(Resource.KEYS, role) for role in (Role.VIEW, Role.CREATE, Role.EDIT))
_VIEW_SECRETS, _CREATE_SECRETS, _EDIT_SECRETS = (
    Access(Resource.SECRETS, role) for role in (Role.VIEW, Role.CREATE, Role.EDIT)
)
_BEGUN = answers(Operation, status=202)
_DELETED = answers(None)

_ADMIN = "/v1/admin"
_MODEL = f"{_ADMIN}/models/{{name:name}}"
_INSTANCES = f"{_ADMIN}/runners/{{name}}/instances"
_HEALTH = f"{_ADMIN}/process-health"
_OPERATIONS, _OPERATION = f"{_ADMIN}/operations", f"{_ADMIN}/operations/{{name}}"
_LOGS = answers(EngineLog, query=engine_logs.LOG_PARAMETERS, events=True)
_DESCRIBED = answers(DescribeResponse, query=models.INSTANCE_PARAMETERS)
_CATALOG = answers(ModelCatalog, query=models.CATALOG_PARAMETERS)
_OPERATION_PAGE = answers(ListOperationsResponse, query=operations.PAGE_PARAMETERS)
_AUDIT_PAGE = answers(ListAuditEntriesResponse, query=operations.AUDIT_PARAMETERS)
ADMIN = ApiRouter("admin")
ADMIN.add_get(f"{_ADMIN}/models", _VIEW_OPERATIONS, models.list_admin_models, answers(AdminModelList))
ADMIN.add_get(f"{_MODEL}/logs", VIEW_RUNNERS, engine_logs.get_engine_logs, _LOGS)
ADMIN.add_get(_MODEL, _VIEW_OPERATIONS, models.get_admin_model, answers(AdminModel))
ADMIN.add_get(_INSTANCES, VIEW_RUNNERS, models.get_instances, _DESCRIBED)
ADMIN.add_get(f"{_ADMIN}/gpu-memory", _VIEW_OPERATIONS, models.get_gpu_memory, answers(GpuMemory, query=("host",)))
ADMIN.add_get(f"{_ADMIN}/discovered", _VIEW_OPERATIONS, models.get_discovered, answers(Discovery))
ADMIN.add_get(f"{_ADMIN}/catalog", OPERATE, models.get_catalog, _CATALOG)
ADMIN.add_get(
    _HEALTH, VIEW_TELEMETRY, processes.get_process_health, answers(ProcessHealth, query=processes.PROCESS_PARAMETERS)
)
ADMIN.add_post(f"{_MODEL}/load", OPERATE, models.load_model, json_body(LoadBody) | _BEGUN, by_name=True)
ADMIN.add_post(f"{_ADMIN}/models", OPERATE, models.load_source, json_body(SourceLoadBody) | _BEGUN)
ADMIN.add_post(f"{_ADMIN}/pulls", OPERATE, models.pull_model, json_body(PullBody) | _BEGUN)
ADMIN.add_post(f"{_MODEL}/remove", OPERATE, models.remove_model, json_body(UnloadBody) | _BEGUN)
ADMIN.add_post(f"{_ADMIN}/servers/{{name}}/detach", OPERATE, models.detach_server, json_body(UnloadBody) | _BEGUN)
ADMIN.add_post(f"{_MODEL}/unload", OPERATE, models.unload_model, json_body(UnloadBody) | _BEGUN, by_name=True)
ADMIN.add_post(f"{_ADMIN}/cache/flush", OPERATE, models.flush_cache, json_body(FlushBody) | _BEGUN, by_name=True)
ADMIN.add_get(_OPERATIONS, _VIEW_OPERATIONS, operations.list_operations, _OPERATION_PAGE)
ADMIN.add_get(_OPERATION, _VIEW_OPERATIONS, operations.get_operation, answers(Operation, query=("watch",)))
ADMIN.add_delete(_OPERATION, _EDIT_OPERATIONS, operations.cancel_operation, answers(Operation))
ADMIN.add_delete(f"{_ADMIN}/leases/{{id}}", _EDIT_RUNNERS, operations.release_lease, answers(Lease))
ADMIN.add_get(f"{_ADMIN}/audit", _VIEW_OPERATIONS, operations.get_audit, _AUDIT_PAGE)

_TOKENS = f"{_ADMIN}/join-tokens"
_NEW_TOKEN = json_body(NewJoinTokenBody) | answers(NewJoinToken, status=201)
JOIN_TOKENS = ApiRouter("admin")
JOIN_TOKENS.add_get(_TOKENS, VIEW_RUNNERS, join_tokens.list_join_tokens, answers(ListJoinTokensResponse))
JOIN_TOKENS.add_post(_TOKENS, _CREATE_RUNNERS, join_tokens.create_join_token, _NEW_TOKEN)
JOIN_TOKENS.add_delete(f"{_TOKENS}/{{id}}", _EDIT_RUNNERS, join_tokens.revoke_join_token, _DELETED)

_KEYS, _KEY = "/api/v1/keys", "/api/v1/keys/{id}"
_NEW_KEY = json_body(NewKeyBody) | answers(RotateKeyResponse, status=201)
KEYS = ApiRouter("keys")
KEYS.add_get(_KEYS, _VIEW_KEYS, keys.list_keys, answers(ListKeysResponse))
KEYS.add_delete(_KEY, _EDIT_KEYS, keys.revoke_key, _DELETED)
KEYS.add_post(_KEYS, _CREATE_KEYS, keys.create_key, _NEW_KEY)
KEYS.add_post(f"{_KEY}/rotate", _EDIT_KEYS, keys.rotate_key, json_body(RotateBody) | answers(RotateKeyResponse))

_SECRETS, _SECRET = f"{_ADMIN}/secrets", f"{_ADMIN}/secrets/{{name}}"
_NEW_SECRET = json_body(NewSecretBody) | answers(Secret, status=201)
SECRETS = ApiRouter("secrets")
SECRETS.add_get(_SECRETS, _VIEW_SECRETS, secrets.list_secrets, answers(ListSecretsResponse))
SECRETS.add_post(_SECRETS, _CREATE_SECRETS, secrets.create_secret, _NEW_SECRET)
SECRETS.add_put(_SECRET, _EDIT_SECRETS, secrets.update_secret, json_body(SecretValueBody) | answers(Secret))
SECRETS.add_delete(_SECRET, _EDIT_SECRETS, secrets.delete_secret, answers(None, query=secrets.DELETE_PARAMETERS))

_REQUESTS = "/v1/requests"
_REQUEST = f"{_REQUESTS}/{{id:path}}"  # an id may contain slashes
_REQUEST_LIST = answers(ListRequestsResponse, query=operations.REQUEST_LIST_PARAMETERS)
_ONE_REQUEST = answers(RequestRecord, query=operations.REQUEST_PARAMETERS)
_LIMIT_USES = answers(ListLimitUsesResponse, query=operations.LIMIT_PARAMETERS)
CAPTURES = ApiRouter("requests")
CAPTURES.add_get(
    f"{_ADMIN}/captures/{{id:path}}",
    _EDIT_SECRETS,
    operations.get_capture,
    answers(Capture, query=operations.REQUEST_PARAMETERS),
)
REQUESTS = ApiRouter("requests")
REQUESTS.add_get(_REQUESTS, VIEW_REQUESTS, operations.list_requests, _REQUEST_LIST)
REQUESTS.add_get(_REQUEST, VIEW_REQUESTS, operations.get_request, _ONE_REQUEST)
REQUESTS.add_post(f"{_REQUEST}/cancel", EDIT_REQUESTS, operations.cancel_request, _ONE_REQUEST)
REQUESTS.add_get("/v1/clients", VIEW_TELEMETRY, operations.list_clients, answers(ListClientsResponse))
REQUESTS.add_get(f"{_ADMIN}/limit-uses", VIEW_TELEMETRY, operations.list_limit_uses, _LIMIT_USES)
_FIGURES = answers(Figures, query=operations.FIGURES_PARAMETERS)
REQUESTS.add_get(f"{_ADMIN}/figures", VIEW_TELEMETRY, operations.get_figures, _FIGURES)

_USAGE = answers(ListUsageResponse, query=usage.USAGE_PARAMETERS)
_ALL_USAGE = answers(ListUsageResponse, query=usage.ALL_USAGE_PARAMETERS)
USAGE = ApiRouter("usage")
USAGE.add_get("/v1/usage", VIEW_REQUESTS, usage.get_usage, _USAGE)
USAGE.add_get(f"{_ADMIN}/usage", VIEW_TELEMETRY, usage.get_all_usage, _ALL_USAGE)
