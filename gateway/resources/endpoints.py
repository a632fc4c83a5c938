"""Rows of the table of endpoints for resources and settings; see `gateway.endpoints`."""

from functools import partial

from gateway.deps import GatewayDeps
from gateway.endpoint_rows import delete_row, get_row, post_row, put_row
from gateway.health import VIEW_TELEMETRY
from gateway.openapi import answers, json_body, json_or_yaml_body
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
from gateway.resources.routers import list_routers
from gateway.routing import Endpoint, EndpointGroup
from weft.api.gateway.v1 import mesh_router_pb2
from weft.api.registry.v1.registry_service_pb2 import ListEventsResponse
from weft.documents.json_schema import record_schema
from weft.documents.resource_kinds import ResourceKind
from weft.documents.rights import resource_of
from weft.documents.schemas import resource_schema
from weft.kernel.principal import Access, Resource, Role

_VIEW_MODELS = Access(Resource.MODELS, Role.VIEW)
_EDIT_MODELS = Access(Resource.MODELS, Role.EDIT)

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


def _path_of(kind: ResourceKind) -> str:
    """Returns the path of one resource; the name of a model or a pool may have slashes."""
    name = "{name:name}" if kind in (ResourceKind.MODEL, ResourceKind.POOL) else "{name}"
    return f"{_API}/{kind.plural}/{name}"


def _reads(kind: ResourceKind) -> tuple[Endpoint[GatewayDeps], ...]:
    access, plural = _of_kind(kind, Role.VIEW), kind.plural
    return (
        get_row(
            f"{_API}/{plural}",
            access,
            partial(resources.list_resources, kind),
            answers(page_schema(kind), query=resources.list_parameters(kind)),
            summary=f"Get {plural}",
            operation_id=f"get_{plural}",
            by_name=kind not in _UNNAMED,
        ),
        get_row(
            _path_of(kind),
            access,
            partial(resources.get_resource, kind),
            answers(resource_schema(kind), path="name"),
            summary=f"Get {plural} by name",
            operation_id=f"get_{plural}_by_name",
            by_name=kind not in _UNNAMED,
        ),
    )


def _deletion(kind: ResourceKind) -> Endpoint[GatewayDeps]:
    return delete_row(
        _path_of(kind),
        _of_kind(kind, Role.EDIT),
        partial(resources.delete_resource, kind),
        answers(None, path="name", query=resources.DELETE_PARAMETERS),
        status=204,
        summary=f"Delete {kind.value}",
        operation_id=f"delete_{kind.value}",
        by_name=kind not in _UNNAMED,
    )


def _replacement(kind: ResourceKind) -> Endpoint[GatewayDeps]:
    return put_row(
        _path_of(kind),
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
        get_row(
            f"{_API}/models/{{name:name}}/members",
            _VIEW_MODELS,
            resources.get_members,
            answers(POOL_MEMBERS, path="name"),
            summary="Get models by name members",
            operation_id="get_models_by_name_members",
            by_name=True,
        ),
        *(endpoint for kind in ResourceKind for endpoint in _reads(kind)),
        *map(_deletion, _DELETABLE),
        post_row(
            f"{_API}/apply",
            _EDIT_MODELS,
            apply_resources,
            json_or_yaml_body(ApplyRequest) | answers(APPLY_ANSWER, query=APPLY_PARAMETERS),
            name="apply",
            by_name=True,
        ),
        *map(_replacement, _PUTTABLE),
        post_row(
            f"{_API}/profiles/{{name}}/save",
            _EDIT_MODELS,
            profiles.save_profile,
            json_body(SaveProfileBody) | answers(APPLY_ANSWER, path="name", query=profiles.PARAMETERS, also=201),
        ),
        post_row(
            f"{_API}/profiles/{{name}}/switch",
            _EDIT_MODELS,
            profiles.switch_profile,
            answers(SWITCH_ANSWER, path="name", query=profiles.PARAMETERS),
        ),
        get_row(
            f"{_API}/events",
            VIEW_TELEMETRY,
            resources.get_events,
            answers(record_schema(ListEventsResponse), query=resources.EVENT_PARAMETERS),
        ),
        get_row(
            f"{_API}/routers",
            Access(Resource.RUNNERS, Role.VIEW),
            list_routers,
            answers(record_schema(mesh_router_pb2.MeshRouterList)),
        ),
    ),
)
SETTINGS: EndpointGroup[GatewayDeps] = EndpointGroup(
    tag="settings",
    endpoints=(
        get_row(f"{_API}/config", Access(Resource.SETTINGS, Role.VIEW), resources.get_config, answers(MeshConfig)),
        put_row(
            f"{_API}/config",
            Access(Resource.SETTINGS, Role.EDIT),
            resources.put_config,
            json_body(MeshConfig) | answers(MeshConfig),
        ),
    ),
)
