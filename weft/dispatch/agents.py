"""Resolution of agents and workflows: a request for `agent/<name>` becomes a request to its model. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.api.common.v1 import agent_behaviour_pb2, chat_pb2, receipt_pb2, workflow_pb2
from weft.api.registry.v1 import agent_pb2
from weft.api.registry.v1 import workflow_pb2 as registered_pb2
from weft.dispatch.fleet import FleetSource, FleetView, ModelView, capabilities_in
from weft.dispatch.payload_description import (
    Payload,
    names_languages,
    needed_skills,
    needed_thinking,
    untaken_words_of,
)
from weft.dispatch.presets import apply_preset
from weft.dispatch.request_receipt import RequestContext
from weft.dispatch.workflow_graph import input_values
from weft.kernel.access.principal import USE_MODELS, Principal
from weft.kernel.access.rpc_auth import caller
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import ThinkingMode
from weft.kernel.requests.request_values import Operation, Skill
from weft.kernel.values.names import (
    AGENT_PREFIX,
    AUTO_MODEL,
    KIND_PREFIXES,
    ROUTE_PREFIX,
    WORKFLOW_PREFIX,
    is_resource_id,
    require_name,
    require_name_of_model,
)
from weft.kernel.values.unknown_names import FOR_TASKS, unknown_field_target, unknown_target


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """A request for an agent or a workflow, translated to a request for its model."""

    context: RequestContext
    payload: Any
    behaviour: agent_behaviour_pb2.AgentBehaviour | None = None
    """What the runner adds around the chat; None: nothing. Read-only."""
    workflow: workflow_pb2.Workflow | None = None
    """The graph that the runner fills; None: the target is no workflow. Read-only."""
    changed: Sequence[receipt_pb2.ChangedParameter] = ()
    """Parameters of the request that its alias or agent replaced or removed."""
    provider_headers: Mapping[str, str] = field(default_factory=dict)
    """As in AliasManifest."""


def agent_name_of(model: str) -> str | None:
    """Returns the name of the requested agent; None: `model` names no agent."""
    return model.removeprefix(AGENT_PREFIX) if model.startswith(AGENT_PREFIX) else None


def require_model_name(text: str, field: str) -> str:
    """Returns the model of a request. Raises INVALID_ARGUMENT naming `field`.

    It is the name of a model, or one of `KIND_PREFIXES` followed by a name.
    """
    prefix = next((each for each in KIND_PREFIXES if text.startswith(each)), "") if "/" in text else ""
    if prefix:
        return f"{prefix}{require_name(text.removeprefix(prefix), field)}"
    return require_name_of_model(text, field)


def named(view: FleetView, model: str) -> str:
    """Resolves a resource id in a request to the resource's name; returns any other text unchanged.

    The id of an agent or a route needs no prefix. Only a text in the form of an id is looked up.
    """
    text = name_asked_for(model) if "/" in model else model
    if not is_resource_id(text):
        return model
    if text.startswith("model-"):
        return next((each.name for each in view.models.values() if each.id == text), model)
    is_agent = text.startswith("agent-")
    found = view.agents if is_agent else view.routes
    prefix = AGENT_PREFIX if is_agent else ROUTE_PREFIX
    return next((f"{prefix}{name}" for name, each in found.items() if each.id == text), model)


def name_asked_for(model: str) -> str:
    """Returns the name in a request's model without its prefix: all kinds share one namespace."""
    return model.removeprefix(AGENT_PREFIX).removeprefix(ROUTE_PREFIX).removeprefix(WORKFLOW_PREFIX)


def require_target(text: str, field: str) -> str:
    """Returns `text` if a router accepts it: a name, or ROUTE_PREFIX and a name. Raises INVALID_ARGUMENT."""
    if text.startswith(ROUTE_PREFIX):
        require_name(text.removeprefix(ROUTE_PREFIX), field)
        return text
    return require_name_of_model(text, field)


def resolve(view: FleetView, context: RequestContext, payload: Any) -> ResolvedRequest | None:
    """Returns the request to the model of an agent or a workflow; None: `context` names neither.

    Changes neither the payload nor the agent. Raises UNSUPPORTED_OPERATION for an agent and anything but chat, or a
    workflow and anything but images; MODEL_NOT_FOUND for an unknown one or one without its model; NO_RUNNER_AVAILABLE
    if the agent's runner is gone; SERVICE_UNAVAILABLE before the first snapshot of the mesh; INVALID_ARGUMENT for a
    payload that does not fit the inputs of a workflow.
    """
    name = context.model.partition("/")[2]
    if context.model.startswith(AGENT_PREFIX):
        if context.operation is not Operation.CHAT:
            raise _unsupported("an agent answers chat only; ask its model by name", {"agent": name})
        agent = _require_agent(view, name)
        served = replace(context, model=_require_target(view, agent), agent=name)
        prepared, changed = with_agent(payload, agent.manifest)
        return ResolvedRequest(
            context=served,
            payload=prepared,
            changed=changed,
            behaviour=agent.manifest.behaviour if agent.manifest.HasField("behaviour") else None,
        )
    if not context.model.startswith(WORKFLOW_PREFIX):
        return None
    if context.operation is not Operation.IMAGE:
        raise _unsupported("a workflow answers requests for images only", {"workflow": name})
    found = view.workflows.get(name)
    if found is None and view.revision == 0:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "no workflow is known yet; try again in a moment")
    if found is None:
        raise unknown_target(context.model)
    workflow = found.manifest.workflow
    input_values(workflow, payload, name=name)
    target = _require_model(view, found)
    return ResolvedRequest(context=replace(context, model=target), payload=payload, workflow=workflow)


def _unsupported(message: str, metadata: dict[str, str]) -> WeftError:
    return WeftError(Reason.UNSUPPORTED_OPERATION, message, metadata=metadata | {"field": "model"})


def target_of(agent: agent_pb2.AgentManifest) -> tuple[str, bool]:
    """Returns the name of the model or pool that serves an agent, and whether it is a pool."""
    is_pool = agent.WhichOneof("target") == "pool"
    return (agent.pool if is_pool else agent.model), is_pool


def members_of(view: FleetView, agent: agent_pb2.Agent) -> list[ModelView]:
    """Returns the models that serve an agent; empty: its target does not exist."""
    target = _placing_name(view, agent.manifest)
    return [] if target is None else view.pool_members(target)


def with_agent(
    payload: chat_pb2.ChatPayload, agent: agent_pb2.AgentManifest
) -> tuple[chat_pb2.ChatPayload, Sequence[receipt_pb2.ChangedParameter]]:
    """Returns a copy of `payload` with the agent's system prompt first and its parameters; see `apply_preset`."""
    prepared = chat_pb2.ChatPayload()
    prepared.CopyFrom(payload)
    if agent.system_prompt:
        del prepared.messages[:]
        prepared.messages.add(role=chat_pb2.ROLE_SYSTEM).content.add(text=agent.system_prompt)
        prepared.messages.extend(payload.messages)
    return prepared, apply_preset(prepared, agent, f"{AGENT_PREFIX}{agent.name}")


def _require_agent(view: FleetView, name: str) -> agent_pb2.Agent:
    agent = view.agents.get(name)
    if agent is None and view.revision == 0:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "no agent is known yet; try again in a moment")
    if agent is None:
        raise unknown_target(f"{AGENT_PREFIX}{name}")
    if agent.HasField("inactive_time"):
        raise WeftError(
            Reason.NO_RUNNER_AVAILABLE,
            f"agent {name} was published by a runner that is gone; it answers again when its runner is back",
            metadata={"agent": name},
        )
    return agent


def _require_target(view: FleetView, agent: agent_pb2.Agent) -> str:
    target = _placing_name(view, agent.manifest)
    if target is None:
        name, is_pool = target_of(agent.manifest)
        noun = "pool" if is_pool else "model"
        raise WeftError(
            Reason.MODEL_NOT_FOUND,
            f"agent {agent.manifest.name} answers with {noun} {name}, which is not known to the mesh",
            metadata={"agent": agent.manifest.name, "model": name, "field": "model"},
        )
    return target


def _placing_name(view: FleetView, agent: agent_pb2.AgentManifest) -> str | None:
    """Returns the target that only this agent's models serve; None: there is none."""
    name, is_pool = target_of(agent)
    if is_pool:
        return name if _is_pool(view, name) else None
    model = view.models.get(name)
    if model is None:
        return None
    # If an unrelated pool has the model's name, only the model's own pool name selects the model.
    return model.pool if _is_pool(view, model.name) else model.name


def _is_pool(view: FleetView, name: str) -> bool:
    return any(model.pool == name for model in view.models.values())


def usable_names(names: Iterable[str], principal: Principal) -> Iterator[str]:
    """Yields the request targets that a caller may use."""
    return (each for each in names if principal.may_name(USE_MODELS, name_asked_for(each)))


class KnownNames:
    """The current names of the mesh."""

    def __init__(self, fleet: FleetSource) -> None:
        self._fleet = fleet

    @property
    def view(self) -> FleetView:
        """The current view of the mesh."""
        return self._fleet.view

    def has(self, name: str) -> bool:
        """Whether the mesh has a name. True for every name before the first snapshot."""
        view = self._fleet.view
        return not view.revision or name in view.targets

    def require(self, name: str, field: str) -> None:
        """Raises MODEL_NOT_FOUND for an unknown name, but accepts every name before the first snapshot."""
        if not self.has(name):
            raise unknown_field_target(name, usable_names(self._fleet.view.targets, caller()), field, FOR_TASKS)

    def require_taken(self, name: str, payload: Payload | None, field: str) -> None:
        """Raises MODALITY_UNSUPPORTED if all models behind a name are known to reject a payload."""
        if payload is None:
            return
        is_plain = not needed_skills(payload) and needed_thinking(payload) is ThinkingMode.DEFAULT
        if is_plain and not names_languages(payload):
            return
        view = self._fleet.view
        words = [untaken_words_of(payload, capabilities_in(view, model)) for model in models_behind(view, name)]
        if words and all(words):
            raise FieldError(field, f"{name} {words[0]}", Reason.MODALITY_UNSUPPORTED)


def models_behind(view: FleetView, name: str) -> list[ModelView]:
    """Returns the models that may serve a target: an agent, route, workflow, pool or model."""
    agent_name = agent_name_of(name)
    if agent_name is not None:
        agent = view.agents.get(agent_name)
        return [] if agent is None else members_of(view, agent)
    if name.startswith(ROUTE_PREFIX):
        route = view.routes.get(name.removeprefix(ROUTE_PREFIX))
        candidates = () if route is None else route.manifest.candidates
        return [model for candidate in candidates for model in view.pool_members(candidate)]
    if name.startswith(WORKFLOW_PREFIX):
        workflow = view.workflows.get(name.removeprefix(WORKFLOW_PREFIX))
        return [] if workflow is None else view.pool_members(workflow.manifest.model)
    return view.pool_members(name)


def skills_lacking_behind(view: FleetView, name: str) -> frozenset[Skill]:
    """Returns the skills that all models behind a target are known to lack; empty for an unknown target."""
    models = view.models.values() if name == AUTO_MODEL else models_behind(view, name)
    lacking = [capabilities_in(view, model).lacking for model in models]
    return frozenset.intersection(*lacking) if lacking else frozenset()


def _require_model(view: FleetView, workflow: registered_pb2.RegisteredWorkflow) -> str:
    manifest = workflow.manifest
    if not view.pool_members(manifest.model):
        raise WeftError(
            Reason.MODEL_NOT_FOUND,
            f"workflow {manifest.name} is run by {manifest.model}, which is not known to the mesh",
            metadata={"workflow": manifest.name, "model": manifest.model, "field": "model"},
        )
    return manifest.model
