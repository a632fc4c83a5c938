"""Manifests, declarations and the results of Apply between the wire and the domain, with every limit."""

import json
import re
from collections.abc import Sequence
from ipaddress import AddressValueError, IPv4Address
from urllib.parse import urlsplit

from google.protobuf import duration_pb2, json_format

from registry_svc.config import RegistryConfig
from registry_svc.mesh.domain import (
    NO_BEHAVIOUR,
    AgentBehaviour,
    AgentManifest,
    Applied,
    Batch,
    Declaration,
    Kind,
    Manifest,
    ModelDeclaration,
    PoolDeclaration,
    Repetition,
    RouteManifest,
    RunnerDeclaration,
)
from registry_svc.wire_values import (
    duration_message,
    require_at_most,
    require_count,
    require_multiline,
    require_range,
    require_unique,
)
from weft.api.common.v1 import agent_behaviour_pb2, sampling_pb2
from weft.api.registry.v1 import agent_pb2, declaration_service_pb2, model_pb2, resource_kind_pb2, route_pb2, wake_pb2
from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.field_rules import check_message
from weft.kernel.names import require_name
from weft.kernel.request import Operation, Skill
from weft.kernel.units import keep_alive_seconds
from weft.wake.messages import plan_message, plan_of
from weft.wake.recipes import MAX_WAIT_SECONDS, WakePlan

_POLICIES: dict[Repetition, agent_behaviour_pb2.RepetitionPolicy.ValueType] = {
    Repetition.OFF: agent_behaviour_pb2.REPETITION_POLICY_OFF,
    Repetition.WARN: agent_behaviour_pb2.REPETITION_POLICY_WARN,
    Repetition.KILL: agent_behaviour_pb2.REPETITION_POLICY_KILL,
}
_REPETITIONS: dict[int, Repetition] = {number: repetition for repetition, number in _POLICIES.items()}


def to_behaviour(message: agent_behaviour_pb2.AgentBehaviour, field: str) -> AgentBehaviour:
    """A valid behaviour, where absent and default are one; raises INVALID_ARGUMENT naming the part below `field`."""
    check_message(message, field)
    return AgentBehaviour(
        platform_prompt=message.platform_prompt,
        tools=tuple(message.tools),
        max_tool_iterations=message.max_tool_iterations if message.HasField("max_tool_iterations") else None,
        signals=tuple(message.signals),
        stop_on_decision_request=message.stop_on_decision_request or not message.HasField("stop_on_decision_request"),
        repetition=_REPETITIONS.get(message.repetition_policy),
        parse_text_tool_calls=message.parse_text_tool_calls or not message.HasField("parse_text_tool_calls"),
    )


def behaviour_message(behaviour: AgentBehaviour) -> agent_behaviour_pb2.AgentBehaviour | None:
    """Return a behaviour for the wire without its default values; None when everything is off."""
    if behaviour == NO_BEHAVIOUR:
        return None
    message = agent_behaviour_pb2.AgentBehaviour(
        platform_prompt=behaviour.platform_prompt,
        tools=behaviour.tools,
        max_tool_iterations=behaviour.max_tool_iterations,
        signals=behaviour.signals,
    )
    if not behaviour.stop_on_decision_request:
        message.stop_on_decision_request = False
    if behaviour.repetition is not None:
        message.repetition_policy = _POLICIES[behaviour.repetition]
    if not behaviour.parse_text_tool_calls:
        message.parse_text_tool_calls = False
    return message


MAX_DESCRIPTION_CHARS = 1_024
MAX_SYSTEM_PROMPT_CHARS = 65_536
MAX_CANDIDATES = 16
MAX_BUDGET_SECONDS = 86_400.0

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def to_manifest(manifest: model_pb2.ModelManifest, field: str, *, published: bool) -> Manifest:
    """Return a valid model; raises INVALID_ARGUMENT naming the field. `published`: sent by a runner."""
    if manifest.pool_name:
        require_name(manifest.pool_name, f"{field}.pool_name")
    if manifest.digest and _DIGEST.fullmatch(manifest.digest) is None:
        raise invalid_field(f"{field}.digest", "must be 'sha256:' and 64 lower-case hex digits, or empty")
    return Manifest(
        name=require_name(manifest.name, f"{field}.name"),
        pool_name=manifest.pool_name,
        operations=_operations(manifest.operations, f"{field}.operations"),
        context_tokens=require_count(manifest.context_tokens, f"{field}.context_tokens"),
        digest=manifest.digest,
        remote=manifest.remote,
        wake=to_wake(manifest.wake, f"{field}.wake", published=published) if manifest.HasField("wake") else None,
        skills=_skills(manifest.skills, f"{field}.skills"),
    )


def to_agent(manifest: agent_pb2.AgentManifest, field: str) -> AgentManifest:
    """A valid agent; raises INVALID_ARGUMENT naming the field."""
    kind = manifest.WhichOneof("target")
    if kind is None:
        raise invalid_field(f"{field}.target", "must be a model or a pool")
    return AgentManifest(
        name=require_name(manifest.name, f"{field}.name"),
        target=require_name(manifest.pool if kind == "pool" else manifest.model, f"{field}.{kind}"),
        targets_pool=kind == "pool",
        description=require_multiline(manifest.description, f"{field}.description", MAX_DESCRIPTION_CHARS),
        system_prompt=require_multiline(manifest.system_prompt, f"{field}.system_prompt", MAX_SYSTEM_PROMPT_CHARS),
        default_params=_params(manifest.default_params, f"{field}.default_params"),
        behaviour=to_behaviour(manifest.behaviour, f"{field}.behaviour"),
    )


def to_route(manifest: route_pb2.RouteManifest, field: str) -> RouteManifest:
    """A valid route; raises INVALID_ARGUMENT naming the field."""
    if not 1 <= len(manifest.candidates) <= MAX_CANDIDATES:
        raise invalid_field(f"{field}.candidates", f"must be 1 to {MAX_CANDIDATES} models or pools")
    names = [require_name(each, f"{field}.candidates[{index}]") for index, each in enumerate(manifest.candidates)]
    require_unique(names, f"{field}.candidates")
    keep_alive = _seconds(manifest.keep_alive) if manifest.HasField("keep_alive") else None
    return RouteManifest(
        name=require_name(manifest.name, f"{field}.name"),
        description=require_multiline(manifest.description, f"{field}.description", MAX_DESCRIPTION_CHARS),
        candidates=tuple(names),
        budget_seconds=_budget(manifest.budget, f"{field}.budget") if manifest.HasField("budget") else None,
        keep_alive_seconds=None if keep_alive is None else keep_alive_seconds(keep_alive, f"{field}.keep_alive"),
        pin_primary=manifest.pin_primary,
    )


def _budget(budget: duration_pb2.Duration, field: str) -> float:
    seconds = _seconds(budget)
    if not 0 < seconds <= MAX_BUDGET_SECONDS:
        raise invalid_field(field, f"must be more than 0 and at most {MAX_BUDGET_SECONDS:.0f} s (24 h)")
    return seconds


def _seconds(length: duration_pb2.Duration) -> float:
    return length.seconds + length.nanos / 1e9


def _skills(numbers: Sequence[int], field: str) -> tuple[Skill, ...]:
    if not {skill.value for skill in Skill}.issuperset(numbers):
        raise invalid_field(field, "must name only known skills")
    return tuple(Skill(number) for number in sorted(set(numbers)))


def _operations(numbers: Sequence[int], field: str) -> tuple[Operation, ...]:
    known = {operation.value for operation in Operation}
    if not numbers or not known.issuperset(numbers):
        raise invalid_field(field, "must name at least one operation, and only known ones")
    return tuple(Operation(number) for number in sorted(set(numbers)))


def _params(params: sampling_pb2.SamplingParams, field: str) -> str:
    """Checked, and as proto JSON with sorted keys, so that equal parameters are equal texts."""
    check_message(params, field)
    return json.dumps(json_format.MessageToDict(params), sort_keys=True, separators=(",", ":"))


def manifest_message(manifest: Manifest) -> model_pb2.ModelManifest:
    """Return the manifest of a model, for the wire."""
    return model_pb2.ModelManifest(
        name=manifest.name,
        pool_name=manifest.pool_name,
        operations=[model_pb2.ModelOperation.ValueType(operation.value) for operation in manifest.operations],
        context_tokens=manifest.context_tokens,
        digest=manifest.digest,
        remote=manifest.remote,
        wake=None if manifest.wake is None else plan_message(manifest.wake),
        skills=[model_pb2.ModelSkill.ValueType(skill.value) for skill in manifest.skills],
    )


def agent_manifest_message(manifest: AgentManifest) -> agent_pb2.AgentManifest:
    """Return the manifest of an agent, for the wire."""
    message = agent_pb2.AgentManifest(
        name=manifest.name,
        description=manifest.description,
        system_prompt=manifest.system_prompt,
        behaviour=behaviour_message(manifest.behaviour),
    )
    if manifest.targets_pool:
        message.pool = manifest.target
    else:
        message.model = manifest.target
    params = json.loads(manifest.default_params or "{}")
    if params:
        json_format.ParseDict(params, message.default_params, ignore_unknown_fields=True)
    return message


def route_manifest_message(manifest: RouteManifest) -> route_pb2.RouteManifest:
    """Return the manifest of a route, for the wire."""
    return route_pb2.RouteManifest(
        name=manifest.name,
        description=manifest.description,
        candidates=manifest.candidates,
        budget=None if manifest.budget_seconds is None else duration_message(manifest.budget_seconds),
        keep_alive=None if manifest.keep_alive_seconds is None else duration_message(manifest.keep_alive_seconds),
        pin_primary=manifest.pin_primary,
    )


MIN_WAIT_SECONDS = 1.0
MAX_URL_CHARS = 2_048
MAX_HEADERS = 32
MAX_HEADER_NAME_CHARS = 128
MAX_HEADER_VALUE_CHARS = 4_096
MAX_ARGUMENTS = 64
MAX_ARGUMENT_CHARS = 4_096
MAX_PORT = 65_535

_METHODS = frozenset({"", "GET", "POST", "PUT", "PATCH", "DELETE"})
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_MAC_ADDRESS = re.compile(r"[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}")


def to_wake(wake: wake_pb2.Wake, field: str, *, published: bool) -> WakePlan:
    """Return a valid wake plan; raises INVALID_ARGUMENT naming the field. `published`: sent by a runner."""
    if wake.HasField("max_wait"):
        seconds = wake.max_wait.seconds + wake.max_wait.nanos / 1e9
        require_range(seconds, f"{field}.max_wait", MIN_WAIT_SECONDS, MAX_WAIT_SECONDS)
    if wake.HasField("by_mesh"):
        _check_recipe(wake.by_mesh, f"{field}.by_mesh", published=published)
    elif not wake.by_runner:
        raise invalid_field(field, "must say who wakes it: by_runner, by_mesh or both")
    return plan_of(wake)


def _check_recipe(recipe: wake_pb2.WakeRecipe, field: str, *, published: bool) -> None:
    match recipe.WhichOneof("action"):
        case "http":
            _check_http(recipe.http, f"{field}.http")
            # A router would substitute them: any publisher of a model could have its secrets sent to any URL.
            if published and any("${" in value for value in recipe.http.headers.values()):
                raise invalid_field(
                    f"{field}.http.headers",
                    "a runner may not use the routers' variables; an operator must declare this recipe with apply",
                )
        case "command":
            # A router would run it: any publisher of a model could run programs on another machine.
            if published:
                raise invalid_field(
                    f"{field}.command",
                    "a runner may not have routers run a program; an operator must declare this recipe with apply",
                )
            _check_command(recipe.command, f"{field}.command")
        case "wake_on_lan":
            _check_wake_on_lan(recipe.wake_on_lan, f"{field}.wake_on_lan")
        case _:
            raise invalid_field(field, "must be one of http, command and wake_on_lan")


def _check_http(action: wake_pb2.HttpAction, field: str) -> None:
    if not _is_web_url(action.url):
        raise invalid_field(f"{field}.url", f"must be an http or https URL of at most {MAX_URL_CHARS} characters")
    if action.method not in _METHODS:
        raise invalid_field(f"{field}.method", "must be GET, POST, PUT, PATCH or DELETE, or empty")
    if len(action.headers) > MAX_HEADERS:
        raise invalid_field(f"{field}.headers", f"at most {MAX_HEADERS}")
    for name, value in action.headers.items():
        if len(name) > MAX_HEADER_NAME_CHARS or _HEADER_NAME.fullmatch(name) is None:
            raise invalid_field(f"{field}.headers", f"names must be tokens of 1 to {MAX_HEADER_NAME_CHARS} characters")
        if len(value) > MAX_HEADER_VALUE_CHARS or not value.isprintable():
            raise invalid_field(
                f"{field}.headers[{name}]",
                f"must be at most {MAX_HEADER_VALUE_CHARS} characters, without line breaks and control characters",
            )


def _is_web_url(url: str) -> bool:
    if len(url) > MAX_URL_CHARS or not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises ValueError when it is none
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname)


def _check_command(action: wake_pb2.CommandAction, field: str) -> None:
    if not 1 <= len(action.argv) <= MAX_ARGUMENTS or not action.argv[0]:
        raise invalid_field(f"{field}.argv", f"must be a program and its arguments, 1 to {MAX_ARGUMENTS} in all")
    for index, argument in enumerate(action.argv):
        if len(argument) > MAX_ARGUMENT_CHARS or "\0" in argument:
            raise invalid_field(
                f"{field}.argv[{index}]", f"must be at most {MAX_ARGUMENT_CHARS} characters, none of them NUL"
            )


def _check_wake_on_lan(action: wake_pb2.WakeOnLanAction, field: str) -> None:
    if _MAC_ADDRESS.fullmatch(action.mac_address) is None:
        raise invalid_field(f"{field}.mac_address", "must be six pairs of hex digits joined by ':' or '-'")
    if action.broadcast_address and not _is_ipv4(action.broadcast_address):
        raise invalid_field(f"{field}.broadcast_address", "must be an IPv4 address, or empty")
    if not 0 <= action.port <= MAX_PORT:
        raise invalid_field(f"{field}.port", f"must be 0 to {MAX_PORT}")


def _is_ipv4(text: str) -> bool:
    try:
        IPv4Address(text)
    except AddressValueError:
        return False
    return True


def to_batch(request: declaration_service_pb2.ApplyRequest, config: RegistryConfig) -> Batch:
    """A valid Apply; raises INVALID_ARGUMENT naming the field."""
    require_at_most(request.declarations, "declarations", config.max_declarations)
    declarations = tuple(
        _declaration(each, f"declarations[{index}]", config) for index, each in enumerate(request.declarations)
    )
    _require_one_namespace(declarations)
    return Batch(declarations=declarations, dry_run=request.dry_run, adopt=request.adopt)


def _declaration(declaration: declaration_service_pb2.Declaration, field: str, config: RegistryConfig) -> Declaration:
    match declaration.WhichOneof("resource"):
        case "model":
            return _model(declaration.model, f"{field}.model")
        case "agent":
            return to_agent(declaration.agent, f"{field}.agent")
        case "route":
            return to_route(declaration.route, f"{field}.route")
        case "runner":
            return RunnerDeclaration(name=require_name(declaration.runner.name, f"{field}.runner.name"))
        case "pool":
            return _pool(declaration.pool, f"{field}.pool", config)
        case _:
            raise invalid_field(field, "must be a model, an agent, a runner, a pool or a route")


def _model(model: declaration_service_pb2.ModelDeclaration, field: str) -> ModelDeclaration:
    if model.runner:
        require_name(model.runner, f"{field}.runner")
    manifest = to_manifest(model.manifest, f"{field}.manifest", published=False)
    return ModelDeclaration(manifest=manifest, runner=model.runner)


def _pool(pool: declaration_service_pb2.PoolDeclaration, field: str, config: RegistryConfig) -> PoolDeclaration:
    require_at_most(pool.members, f"{field}.members", config.max_models)
    members = tuple(require_name(each, f"{field}.members[{index}]") for index, each in enumerate(pool.members))
    require_unique(members, f"{field}.members", "name")
    return PoolDeclaration(name=require_name(pool.name, f"{field}.name"), members=members)


def _require_one_namespace(declarations: Sequence[Declaration]) -> None:
    """No two of one name in one call; only a pool may be called like a model."""
    owners: dict[str, int] = {}
    pools = {each.name for each in declarations if isinstance(each, PoolDeclaration)}
    pools |= {each.manifest.pool_name for each in declarations if isinstance(each, ModelDeclaration)}
    seen_pools: set[str] = set()
    for index, declaration in enumerate(declarations):
        name = name_of(declaration)
        if isinstance(declaration, PoolDeclaration):
            if name in seen_pools:
                raise _twice(index, "also declared in this call")
            seen_pools.add(name)
            continue
        if name in owners:
            raise _twice(index, f"also that of declarations[{owners[name]}]")
        if name in pools and not isinstance(declaration, ModelDeclaration):
            raise _twice(index, "also that of a pool in this call")
        owners[name] = index


def name_of(declaration: Declaration) -> str:
    """The name of that which is declared."""
    return declaration.manifest.name if isinstance(declaration, ModelDeclaration) else declaration.name


def _twice(index: int, why: str) -> FieldError:
    return invalid_field(f"declarations[{index}]", f"its name is {why}")


def applied_message(applied: Applied) -> declaration_service_pb2.ApplyResult:
    """Return the result of one declaration, for the wire."""
    return declaration_service_pb2.ApplyResult(
        kind=kind_message(applied.kind),
        name=applied.name,
        outcome=declaration_service_pb2.ApplyResult.Outcome.ValueType(applied.outcome.value),
        before=None if applied.before is None else declaration_message(applied.before),
        after=declaration_message(applied.after),
    )


def declaration_message(declaration: Declaration) -> declaration_service_pb2.Declaration:
    """The wanted state of one resource."""
    message = declaration_service_pb2.Declaration()
    match declaration:
        case ModelDeclaration(manifest=manifest, runner=runner):
            message.model.manifest.CopyFrom(manifest_message(manifest))
            message.model.runner = runner
        case AgentManifest():
            message.agent.CopyFrom(agent_manifest_message(declaration))
        case RouteManifest():
            message.route.CopyFrom(route_manifest_message(declaration))
        case RunnerDeclaration(name=name):
            message.runner.name = name
        case PoolDeclaration(name=name, members=members):
            message.pool.name = name
            message.pool.members.extend(members)
    return message


_KIND_MESSAGES = {
    Kind.MODEL: resource_kind_pb2.RESOURCE_KIND_MODEL,
    Kind.AGENT: resource_kind_pb2.RESOURCE_KIND_AGENT,
    Kind.RUNNER: resource_kind_pb2.RESOURCE_KIND_RUNNER,
    Kind.POOL: resource_kind_pb2.RESOURCE_KIND_POOL,
    Kind.ROUTE: resource_kind_pb2.RESOURCE_KIND_ROUTE,
}
_KINDS = {number: kind for kind, number in _KIND_MESSAGES.items()}


def kind_message(kind: Kind) -> resource_kind_pb2.ResourceKind.ValueType:
    """A kind of resource."""
    return _KIND_MESSAGES[kind]


def to_kind(kind: resource_kind_pb2.ResourceKind.ValueType, field: str) -> Kind:
    """A kind of resource; raises INVALID_ARGUMENT naming the field when it is none."""
    found = _KINDS.get(kind)
    if found is None:
        raise invalid_field(field, "must be model, agent, runner, pool or route")
    return found
