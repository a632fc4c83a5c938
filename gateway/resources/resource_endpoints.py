"""The endpoints of resources and settings."""

from functools import cache, partial

from gateway.openapi import answers, json_body, json_or_yaml_body
from gateway.resources import resource_handlers as resources
from gateway.resources.documents import POOL_MEMBERS, ApplyRequest, MeshConfig, apply_answer, page_schema
from gateway.resources.resource_handlers import APPLY_PARAMETERS, apply_resources, put_resource
from gateway.resources.routers import list_routers
from gateway.routing import ApiRouter
from weft.api.gateway.v1.mesh_router_pb2 import MeshRouterList
from weft.api.registry.v1.registry_service_pb2 import ListEventsResponse
from weft.documents.kinds import DECLARED_KINDS, KINDS
from weft.documents.resource_kinds import ResourceKind
from weft.documents.schemas import resource_schema
from weft.kernel.access.principal import (
    EDIT_MODELS,
    EDIT_SETTINGS,
    VIEW_MODELS,
    VIEW_RUNNERS,
    VIEW_TELEMETRY,
    Access,
    Resource,
    Role,
)

_API = "/api/v1"
_DELETABLE = (*DECLARED_KINDS, ResourceKind.RUNNER)


def _of_kind(kind: ResourceKind, role: Role) -> Access:
    return Access(KINDS[kind].resource, role)


def _path_of(kind: ResourceKind) -> str:
    """Returns the path of one resource; the name of a model or a pool may have slashes."""
    name = "{name:name}" if kind in (ResourceKind.MODEL, ResourceKind.POOL) else "{name}"
    return f"{_API}/{kind.plural}/{name}"


_EVENTS = answers(ListEventsResponse, query=resources.EVENT_PARAMETERS)


@cache
def resource_router(kinds: tuple[ResourceKind, ...]) -> ApiRouter:
    """Returns the endpoints of resources of these kinds."""
    answer = apply_answer(kinds)
    router = ApiRouter("resources")
    router.add_get(
        f"{_API}/models/{{name:name}}/members",
        VIEW_MODELS,
        resources.get_members,
        answers(POOL_MEMBERS),
        summary="Get models by name members",
        operation_id="get_models_by_name_members",
        by_name=True,
    )
    for each in kinds:
        router.add_get(
            f"{_API}/{each.plural}",
            _of_kind(each, Role.VIEW),
            partial(resources.list_resources, each),
            answers(page_schema(each), query=resources.list_parameters(each)),
            summary=f"Get {each.plural}",
            operation_id=f"get_{each.plural}",
            by_name=KINDS[each].by_name,
        )
        router.add_get(
            _path_of(each),
            _of_kind(each, Role.VIEW),
            partial(resources.get_resource, each),
            answers(resource_schema(each)),
            summary=f"Get {each.plural} by name",
            operation_id=f"get_{each.plural}_by_name",
            by_name=KINDS[each].by_name,
        )
    for each in (each for each in _DELETABLE if each in kinds):
        router.add_delete(
            _path_of(each),
            _of_kind(each, Role.EDIT),
            partial(resources.delete_resource, each),
            answers(None, query=resources.DELETE_PARAMETERS),
            summary=f"Delete {each.value}",
            operation_id=f"delete_{each.value}",
            by_name=KINDS[each].by_name,
        )
    router.add_post(
        f"{_API}/apply",
        EDIT_MODELS,
        apply_resources,
        json_or_yaml_body(ApplyRequest) | answers(answer, query=APPLY_PARAMETERS),
        name="apply",
        by_name=True,
    )
    for each in (each for each in DECLARED_KINDS if each in kinds):
        router.add_put(
            _path_of(each),
            _of_kind(each, Role.EDIT),
            partial(put_resource, each),
            json_or_yaml_body(resource_schema(each)) | answers(answer, query=APPLY_PARAMETERS, also=201),
            summary=f"Put {each.value}",
            operation_id=f"put_{each.value}",
            by_name=KINDS[each].by_name,
        )
    router.add_get(f"{_API}/events", VIEW_TELEMETRY, resources.get_events, _EVENTS)
    router.add_get(f"{_API}/routers", VIEW_RUNNERS, list_routers, answers(MeshRouterList))
    return router


RESOURCES = resource_router(tuple(ResourceKind))
"""Those of all kinds."""
SETTINGS = ApiRouter("settings")
SETTINGS.add_get(f"{_API}/config", Access(Resource.SETTINGS, Role.VIEW), resources.get_config, answers(MeshConfig))
SETTINGS.add_put(f"{_API}/config", EDIT_SETTINGS, resources.put_config, json_body(MeshConfig) | answers(MeshConfig))
