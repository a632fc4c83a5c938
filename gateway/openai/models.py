"""GET and HEAD /v1/models, /v1/models/{model}, and agents, routes and workflows by /v1/models/KIND/{name}.

Clients of Anthropic's API, recognized by its version header, get its format.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import json_response
from gateway.deps import Inference, InferenceDeps
from gateway.errors import Dialect
from gateway.intake.headers import tenant_of
from gateway.intake.query import whole_number
from gateway.request_facts import facts_of
from weft.api.registry.v1 import agent_pb2, route_pb2, workflow_pb2
from weft.dispatch.agents import agent_name_of, members_of, name_asked_for, target_of
from weft.dispatch.aliases import AskedName, exact_aliases
from weft.dispatch.fleet import FleetView, ModelView, base_in, capabilities_in, context_in
from weft.kernel.access.principal import VIEW_MODELS, Principal
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Skill
from weft.kernel.values.names import AGENT_PREFIX, ROUTE_PREFIX, WORKFLOW_PREFIX, ascii_name
from weft.kernel.values.unknown_names import unknown_target

MAX_LISTED = 1000
"""Maximum page size, for Anthropic's clients."""
DEFAULT_LISTED = 20


async def list_models(deps: Inference, request: Request) -> Response:
    """Lists models, pools, agents, routes, workflows and exact aliases, including hibernating and failed models."""
    facts = facts_of(request.scope)
    facts.surface = "models"
    listed = visible_list(model_list(deps.fleet.view, tenant_of(request.scope)), facts.principal)
    return json_response(_page(request, listed) if facts.dialect is Dialect.ANTHROPIC else listed)


async def get_model(deps: Inference, request: Request) -> Response:
    """Returns one model or pool."""
    return _answer(deps, request, ascii_name(request.path_params["model"]))


async def get_agent(deps: Inference, request: Request) -> Response:
    """Returns one agent, as a model."""
    return _answer(deps, request, AGENT_PREFIX + request.path_params["agent"])


async def get_workflow(deps: Inference, request: Request) -> Response:
    """Returns one workflow, as a model."""
    return _answer(deps, request, WORKFLOW_PREFIX + request.path_params["workflow"])


async def get_route(deps: Inference, request: Request) -> Response:
    """Returns one route, as a model."""
    return _answer(deps, request, ROUTE_PREFIX + request.path_params["route"])


def _answer(deps: InferenceDeps, request: Request, name: str) -> Response:
    facts = facts_of(request.scope)
    facts.surface = "models"
    asked = deps.asked(request.scope, name)
    facts.principal.require_name(VIEW_MODELS, name_asked_for(asked.model))
    entry = asked_entry(deps.fleet.view, asked)
    if entry is None:
        raise not_available(deps.fleet.view, name)
    entry = visible_entry(entry, facts.principal)
    return json_response(anthropic_entry(entry) if facts.dialect is Dialect.ANTHROPIC else entry)


def not_available(view: FleetView, name: str) -> WeftError:
    """Returns the MODEL_NOT_FOUND error of a name that reaches no model."""
    if name not in view.targets:
        return unknown_target(name, field="")
    return WeftError(Reason.MODEL_NOT_FOUND, f"{name} is not available now: no runner serves it")


def _page(request: Request, listed: dict[str, object]) -> dict[str, object]:
    """Returns the requested page of the list. Other query parameters are accepted and not used."""
    given = request.query_params
    limit, after, before = given.get("limit"), given.get("after_id"), given.get("before_id")
    if after and before:
        raise invalid_field("before_id", "must not be given together with 'after_id'")
    count = DEFAULT_LISTED if limit is None else whole_number(limit, "limit", MAX_LISTED, least=1, padded=False)
    return anthropic_list(listed, count, after_id=after or "", before_id=before or "")


OWNER = "weft"


def model_list(view: FleetView, tenant: str = "") -> dict[str, Any]:
    """Returns the body of GET /v1/models: pools, models without a pool, agents, routes, workflows and exact aliases.

    Members of a pool are left out, since their names reach the whole pool.
    """
    pools = {model.pool for model in view.models.values()}
    models = [_entry(view, name, members) for name, members in _by_name(view).items() if name in pools]
    agents = [_agent_entry(view, agent) for _, agent in sorted(view.agents.items())]
    routes = [_route_entry(view, route) for _, route in sorted(view.routes.items())]
    workflows = [_workflow_entry(view, workflow) for _, workflow in sorted(view.workflows.items())]
    aliases = [asked_entry(view, each) for each in exact_aliases(view, tenant)]
    others = (*agents, *routes, *workflows, *aliases)
    return {"object": "list", "data": [*models, *(entry for entry in others if entry is not None)]}


def visible_list(listed: dict[str, Any], principal: Principal) -> dict[str, Any]:
    """Returns the list without entries that the caller may not see."""
    if principal.may(VIEW_MODELS):
        return listed
    shown = (each for each in listed["data"] if principal.may_name(VIEW_MODELS, name_asked_for(_meant(each))))
    return {**listed, "data": [visible_entry(each, principal) for each in shown]}


def _meant(entry: dict[str, Any]) -> str:
    """Returns the name by which access to an entry is checked: for an alias, that of its target."""
    return str(entry["meta"].get("alias_of") or entry["id"])


def visible_entry(entry: dict[str, Any], principal: Principal) -> dict[str, Any]:
    """Returns an entry without the members that the caller may not see."""
    members = [name for name in entry["meta"]["members"] if principal.may_name(VIEW_MODELS, name)]
    return {**entry, "meta": {**entry["meta"], "members": members}}


def asked_entry(view: FleetView, asked: AskedName) -> dict[str, Any] | None:
    """Returns the entry of a resolved name, with an alias under its own name; None: it reaches no model."""
    entry = model_entry(view, asked.model)
    if entry is None or not asked.alias:
        return entry
    return {**entry, "id": asked.alias, "meta": {**entry["meta"], "alias_of": asked.model}}


def model_entry(view: FleetView, name: str) -> dict[str, Any] | None:
    """Returns the body of GET /v1/models/{name}; None: the name reaches no model."""
    agent_name = agent_name_of(name)
    if agent_name is not None:
        agent = view.agents.get(agent_name)
        return None if agent is None else _agent_entry(view, agent)
    if name.startswith(ROUTE_PREFIX):
        route = view.routes.get(name.removeprefix(ROUTE_PREFIX))
        return None if route is None else _route_entry(view, route)
    if name.startswith(WORKFLOW_PREFIX):
        workflow = view.workflows.get(name.removeprefix(WORKFLOW_PREFIX))
        return None if workflow is None else _workflow_entry(view, workflow)
    members = _by_name(view).get(name)
    return None if members is None else _entry(view, name, members)


def anthropic_list(listed: dict[str, Any], limit: int, *, after_id: str = "", before_id: str = "") -> dict[str, object]:
    """Returns a page of `model_list` in Anthropic's format: the first `limit` entries, or those after or before one.

    Raises INVALID_ARGUMENT for a cursor that is not in the list, which changes with the fleet.
    """
    entries = listed["data"]
    if after_id:
        entries = entries[_index_of(entries, after_id, "after_id") + 1 :]
    elif before_id:
        entries = entries[: _index_of(entries, before_id, "before_id")]
    page = entries[-limit:] if before_id else entries[:limit]
    return {
        "data": [anthropic_entry(entry) for entry in page],
        "has_more": len(page) < len(entries),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def anthropic_entry(entry: dict[str, Any]) -> dict[str, object]:
    """Returns an entry of `model_list` in Anthropic's format."""
    return {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        "created_at": datetime.fromtimestamp(entry["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": entry["meta"]["context_tokens"] or None,
        "meta": entry["meta"],
    }


def _index_of(entries: list[dict[str, Any]], name: str, field: str) -> int:
    for index, entry in enumerate(entries):
        if entry["id"] == name:
            return index
    raise invalid_field(field, "names no entry of the current list")


def _by_name(view: FleetView) -> dict[str, list[ModelView]]:
    """Returns the reachable models by every name that reaches them, sorted.

    A model's name reaches its whole pool, and a pool takes precedence over a model of the same name.
    """
    names: dict[str, list[ModelView]] = {}
    reachable = [model for model in view.models.values() if model.reachable]
    for model in reachable:
        names.setdefault(model.pool, []).append(model)
    for model in reachable:
        names.setdefault(model.name, names[model.pool])
    return dict(sorted(names.items()))


def _entry(
    view: FleetView, name: str, members: list[ModelView], created: int | None = None, **about: object
) -> dict[str, Any]:
    """Returns an entry of the list. `created`: None: that of the oldest member; `about` precedes its meta."""
    return {
        "id": name,
        "object": "model",
        "created": min(model.created_at_seconds for model in members) if created is None else created,
        "owned_by": OWNER,
        "meta": {**about, **_meta(view, members)},
    }


def _agent_entry(view: FleetView, agent: agent_pb2.Agent) -> dict[str, Any] | None:
    """Returns an agent as a model; None: no model can serve it now."""
    members = [model for model in members_of(view, agent) if model.reachable]
    if agent.HasField("inactive_time") or not members:
        return None
    manifest = agent.manifest
    about = {"agent": True, "model": target_of(manifest)[0], "description": manifest.description}
    entry = _entry(view, AGENT_PREFIX + manifest.name, members, agent.create_time.seconds, **about)
    entry["meta"]["operations"] = ["chat"]
    return entry


def _route_entry(view: FleetView, route: route_pb2.Route) -> dict[str, Any] | None:
    """Returns a route as a model; None: none of its candidates is reachable."""
    members = _rungs(view, route)
    if not members:
        return None
    manifest = route.manifest
    about = {"route": True, "candidates": list(manifest.candidates), "description": manifest.description}
    return _entry(view, ROUTE_PREFIX + manifest.name, members, route.create_time.seconds, **about)


def _workflow_entry(view: FleetView, workflow: workflow_pb2.RegisteredWorkflow) -> dict[str, Any] | None:
    """Returns a workflow as a model; None: no model can run it now."""
    manifest = workflow.manifest
    members = [model for model in view.pool_members(manifest.model) if model.reachable]
    if not members:
        return None
    inputs = [each.name for each in manifest.workflow.inputs]
    about = {"workflow": True, "model": manifest.model, "inputs": inputs, "description": manifest.description}
    entry = _entry(view, WORKFLOW_PREFIX + manifest.name, members, workflow.create_time.seconds, **about)
    entry["meta"]["operations"] = ["image"]
    return entry


def _rungs(view: FleetView, route: route_pb2.Route) -> list[ModelView]:
    """Returns the reachable models of a route: for each candidate the members of the pool, otherwise the model.

    A remote fallback is left out unless the mesh's settings allow it.
    """
    found: dict[str, ModelView] = {}
    for position, name in enumerate(route.manifest.candidates):
        pool = [model for model in view.models.values() if model.pool == name]
        alone = [view.models[name]] if name in view.models else []
        for model in pool or alone:
            if model.reachable and (position == 0 or view.settings.allow_cloud_fallback or not model.remote):
                found[model.name] = model
    return list(found.values())


def _meta(view: FleetView, members: list[ModelView]) -> dict[str, object]:
    return {
        "status": _status(members),
        "context_tokens": context_in(view, *members),
        "operations": _operations(members),
        "members": sorted(model.name for model in members),
        "remote": any(model.remote for model in members),
        **_base(view, members),
        **_skills(view, members),
    }


def _status(members: Iterable[ModelView]) -> str:
    """Returns the best status of reachable models."""
    found = {"active" if model.active else "hibernating" if model.hibernating else "failed" for model in members}
    return next(status for status in ("active", "hibernating", "failed") if status in found)


def _base(view: FleetView, members: Iterable[ModelView]) -> dict[str, object]:
    """Returns the base models of these adapters; empty: none is an adapter."""
    bases = {base for model in members if (base := base_in(view, model))}
    return {"base_models": sorted(bases)} if bases else {}


def _skills(view: FleetView, members: Iterable[ModelView]) -> dict[str, object]:
    """Returns the skills of members; empty: those of a member are unknown."""
    known = [capabilities_in(view, model).skills for model in members]
    if not all(known):
        return {}
    found = frozenset[Skill]().union(*known)
    return {"skills": [skill.name.lower() for skill in sorted(found)]}


def _operations(members: Iterable[ModelView]) -> list[str]:
    operations = set().union(*(model.operations for model in members))
    return [operation.name.lower() for operation in sorted(operations)]
