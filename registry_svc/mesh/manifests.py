"""Checks of manifests and declarations, with every limit, and the canonical form in which they are stored.

Each `valid_*` checks a message that just arrived, brings it to its canonical form in place, and returns it: equal
meanings are equal messages then, and what a newer caller added is dropped.
"""

import re
from collections.abc import Sequence
from ipaddress import AddressValueError, IPv4Address
from urllib.parse import urlsplit

from google.protobuf import duration_pb2

from registry_svc.config import RegistryConfig
from registry_svc.mesh.records import name_of, target_of
from registry_svc.wire_values import (
    duration_message,
    require_at_most,
    require_count,
    require_multiline,
    require_range,
    require_unique,
)
from weft.api.common.v1 import agent_behaviour_pb2
from weft.api.registry.v1 import agent_pb2, declaration_service_pb2, model_pb2, route_pb2, wake_pb2
from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.field_rules import check_message
from weft.kernel.names import require_name
from weft.kernel.request import Operation, Skill
from weft.kernel.units import keep_alive_seconds
from weft.wake.plans import set_defaults
from weft.wake.recipes import MAX_WAIT_SECONDS

MAX_DESCRIPTION_CHARS = 1_024
MAX_SYSTEM_PROMPT_CHARS = 65_536
MAX_CANDIDATES = 16
MAX_BUDGET_SECONDS = 86_400.0

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def valid_model(manifest: model_pb2.ModelManifest, field: str, *, published: bool) -> model_pb2.ModelManifest:
    """Return a valid model; raises INVALID_ARGUMENT naming the field. `published`: sent by a runner."""
    if manifest.pool_name:
        require_name(manifest.pool_name, f"{field}.pool_name")
    if manifest.digest and _DIGEST.fullmatch(manifest.digest) is None:
        raise invalid_field(f"{field}.digest", "must be 'sha256:' and 64 lower-case hex digits, or empty")
    require_name(manifest.name, f"{field}.name")
    if not manifest.operations or not _OPERATIONS.issuperset(manifest.operations):
        raise invalid_field(f"{field}.operations", "must name at least one operation, and only known ones")
    require_count(manifest.context_tokens, f"{field}.context_tokens")
    if manifest.HasField("wake"):
        _check_wake(manifest.wake, f"{field}.wake", published=published)
        set_defaults(manifest.wake)
    if not _SKILLS.issuperset(manifest.skills):
        raise invalid_field(f"{field}.skills", "must name only known skills")
    manifest.DiscardUnknownFields()
    manifest.operations[:] = sorted(set(manifest.operations))
    manifest.skills[:] = sorted(set(manifest.skills))
    return manifest


_OPERATIONS = frozenset(operation.value for operation in Operation)
_SKILLS = frozenset(skill.value for skill in Skill)


def valid_agent(manifest: agent_pb2.AgentManifest, field: str) -> agent_pb2.AgentManifest:
    """Return a valid agent; raises INVALID_ARGUMENT naming the field."""
    kind = manifest.WhichOneof("target")
    if kind is None:
        raise invalid_field(f"{field}.target", "must be a model or a pool")
    require_name(manifest.name, f"{field}.name")
    require_name(target_of(manifest)[0], f"{field}.{kind}")
    require_multiline(manifest.description, f"{field}.description", MAX_DESCRIPTION_CHARS)
    require_multiline(manifest.system_prompt, f"{field}.system_prompt", MAX_SYSTEM_PROMPT_CHARS)
    check_message(manifest.default_params, f"{field}.default_params")
    check_message(manifest.behaviour, f"{field}.behaviour")
    manifest.DiscardUnknownFields()
    if not manifest.default_params.ByteSize():
        manifest.ClearField("default_params")
    _drop_defaults(manifest.behaviour)
    if not manifest.behaviour.ByteSize():
        manifest.ClearField("behaviour")
    return manifest


def _drop_defaults(behaviour: agent_behaviour_pb2.AgentBehaviour) -> None:
    """Clear what is as it is anyway: absent and default are one."""
    if behaviour.stop_on_decision_request:
        behaviour.ClearField("stop_on_decision_request")
    if behaviour.parse_text_tool_calls:
        behaviour.ClearField("parse_text_tool_calls")


def valid_route(manifest: route_pb2.RouteManifest, field: str) -> route_pb2.RouteManifest:
    """Return a valid route; raises INVALID_ARGUMENT naming the field."""
    if not 1 <= len(manifest.candidates) <= MAX_CANDIDATES:
        raise invalid_field(f"{field}.candidates", f"must be 1 to {MAX_CANDIDATES} models or pools")
    for index, name in enumerate(manifest.candidates):
        require_name(name, f"{field}.candidates[{index}]")
    require_unique(manifest.candidates, f"{field}.candidates")
    require_name(manifest.name, f"{field}.name")
    require_multiline(manifest.description, f"{field}.description", MAX_DESCRIPTION_CHARS)
    manifest.DiscardUnknownFields()
    if manifest.HasField("budget"):
        manifest.budget.CopyFrom(duration_message(_budget(manifest.budget, f"{field}.budget")))
    if manifest.HasField("keep_alive"):
        keep_alive = keep_alive_seconds(_seconds(manifest.keep_alive), f"{field}.keep_alive")
        manifest.keep_alive.CopyFrom(duration_message(keep_alive))
    return manifest


def _budget(budget: duration_pb2.Duration, field: str) -> float:
    seconds = _seconds(budget)
    if not 0 < seconds <= MAX_BUDGET_SECONDS:
        raise invalid_field(field, f"must be more than 0 and at most {MAX_BUDGET_SECONDS:.0f} s (24 h)")
    return seconds


def _seconds(length: duration_pb2.Duration) -> float:
    return length.seconds + length.nanos / 1e9


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


def _check_wake(wake: wake_pb2.Wake, field: str, *, published: bool) -> None:
    """Raise INVALID_ARGUMENT naming the field of a wake plan that is not valid. `published`: sent by a runner."""
    if wake.HasField("max_wait"):
        seconds = wake.max_wait.seconds + wake.max_wait.nanos / 1e9
        require_range(seconds, f"{field}.max_wait", MIN_WAIT_SECONDS, MAX_WAIT_SECONDS)
    if wake.HasField("by_mesh"):
        _check_recipe(wake.by_mesh, f"{field}.by_mesh", published=published)
    elif not wake.by_runner:
        raise invalid_field(field, "must say who wakes it: by_runner, by_mesh or both")


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


def valid_batch(
    request: declaration_service_pb2.ApplyRequest, config: RegistryConfig
) -> declaration_service_pb2.ApplyRequest:
    """Return a valid Apply, no two declarations of one name; raises INVALID_ARGUMENT naming the field."""
    require_at_most(request.declarations, "declarations", config.max_declarations)
    for index, declaration in enumerate(request.declarations):
        _check_declaration(declaration, f"declarations[{index}]", config)
    _require_one_namespace(request.declarations)
    return request


def _check_declaration(declaration: declaration_service_pb2.Declaration, field: str, config: RegistryConfig) -> None:
    match declaration.WhichOneof("resource"):
        case "model":
            if declaration.model.runner:
                require_name(declaration.model.runner, f"{field}.model.runner")
            valid_model(declaration.model.manifest, f"{field}.model.manifest", published=False)
        case "agent":
            valid_agent(declaration.agent, f"{field}.agent")
        case "route":
            valid_route(declaration.route, f"{field}.route")
        case "runner":
            require_name(declaration.runner.name, f"{field}.runner.name")
        case "pool":
            _check_pool(declaration.pool, f"{field}.pool", config)
        case _:
            raise invalid_field(field, "must be a model, an agent, a runner, a pool or a route")
    declaration.DiscardUnknownFields()


def _check_pool(pool: declaration_service_pb2.PoolDeclaration, field: str, config: RegistryConfig) -> None:
    require_at_most(pool.members, f"{field}.members", config.max_models)
    for index, name in enumerate(pool.members):
        require_name(name, f"{field}.members[{index}]")
    require_unique(pool.members, f"{field}.members", "name")
    require_name(pool.name, f"{field}.name")


def _require_one_namespace(declarations: Sequence[declaration_service_pb2.Declaration]) -> None:
    """No two of one name in one call; only a pool may be called like a model."""
    owners: dict[str, int] = {}
    pools = {each.pool.name for each in declarations if each.HasField("pool")}
    pools |= {each.model.manifest.pool_name for each in declarations if each.HasField("model")}
    seen_pools: set[str] = set()
    for index, declaration in enumerate(declarations):
        name = name_of(declaration)
        if declaration.HasField("pool"):
            if name in seen_pools:
                raise _twice(index, "also declared in this call")
            seen_pools.add(name)
            continue
        if name in owners:
            raise _twice(index, f"also that of declarations[{owners[name]}]")
        if name in pools and not declaration.HasField("model"):
            raise _twice(index, "also that of a pool in this call")
        owners[name] = index


def _twice(index: int, why: str) -> FieldError:
    return invalid_field(f"declarations[{index}]", f"its name is {why}")
