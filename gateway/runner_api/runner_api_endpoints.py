"""The endpoints that only runners have. Others are the gateway's: see `gateway.runner_api_service`."""

from gateway.openapi import json_body
from gateway.routing import ApiRouter
from gateway.runner_api import capabilities
from gateway.runner_api import runner_operations as operations
from gateway.runner_api.runner_operations import FlushBody, LoadBody, UnloadBody
from weft.kernel.access.principal import OPERATE, VIEW_RUNNERS, Access, Resource, Role

_LOAD_TASK = "/v1/models/load/{task}"

RUNNER_OPERATIONS = ApiRouter("runner")
RUNNER_OPERATIONS.add_post("/v1/models/load", OPERATE, operations.load_model, json_body(LoadBody))
RUNNER_OPERATIONS.add_post("/v1/models/unload", OPERATE, operations.unload_model, json_body(UnloadBody))
RUNNER_OPERATIONS.add_post("/v1/cache/flush", OPERATE, operations.flush_cache, json_body(FlushBody))
RUNNER_OPERATIONS.add_get(_LOAD_TASK, Access(Resource.OPERATIONS, Role.VIEW), operations.get_task)
RUNNER_OPERATIONS.add_delete(_LOAD_TASK, Access(Resource.OPERATIONS, Role.EDIT), operations.cancel_task)
RUNNER_STATE = ApiRouter("runner")
RUNNER_STATE.add_get(
    "/v1/capabilities", VIEW_RUNNERS, capabilities.get_capabilities, name="capabilities", with_head=True
)
RUNNER_STATE.add_get("/health", None, capabilities.get_health, name="health", with_head=True)
