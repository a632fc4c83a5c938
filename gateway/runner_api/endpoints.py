"""The table of a runner's own endpoints: method, path, access, handler and OpenAPI of each.

Those that a runner has in common with the gateway are in `gateway.endpoints`.
"""

from gateway.endpoint_rows import delete_row, get_row, post_row
from gateway.health import VIEW_TELEMETRY
from gateway.metrics import GatewayMetrics
from gateway.openapi import json_body
from gateway.routing import EndpointGroup
from gateway.runner_api import operations, state
from gateway.runner_api.operations import FlushBody, LoadBody, UnloadBody
from gateway.runner_api.state import RunnerApiDeps
from weft.kernel.principal import OPERATE, Access, Resource, Role

_VIEW_RUNNERS = Access(Resource.RUNNERS, Role.VIEW)
_LOAD_TASK = "/v1/models/load/{task}"

RUNNER_OPERATIONS: EndpointGroup[RunnerApiDeps] = EndpointGroup(
    tag="runner",
    endpoints=(
        post_row("/v1/models/load", OPERATE, operations.load_model, json_body(LoadBody)),
        post_row("/v1/models/unload", OPERATE, operations.unload_model, json_body(UnloadBody)),
        post_row("/v1/cache/flush", OPERATE, operations.flush_cache, json_body(FlushBody)),
        get_row(_LOAD_TASK, Access(Resource.OPERATIONS, Role.VIEW), operations.get_task),
        delete_row(_LOAD_TASK, Access(Resource.OPERATIONS, Role.EDIT), operations.cancel_task),
    ),
)
RUNNER_STATE: EndpointGroup[RunnerApiDeps] = EndpointGroup(
    tag="runner",
    endpoints=(
        get_row("/v1/capabilities", _VIEW_RUNNERS, state.get_capabilities, name="capabilities", with_head=True),
        get_row("/health", None, state.get_health, name="health", with_head=True),
        get_row("/livez", None, state.get_livez, with_head=True),
        get_row("/readyz", None, state.get_readyz, with_head=True),
    ),
)
RUNNER_METRICS: EndpointGroup[GatewayMetrics] = EndpointGroup(
    tag="runner",
    endpoints=(get_row("/metrics", VIEW_TELEMETRY, state.get_metrics, name="metrics_text", with_head=True),),
)
