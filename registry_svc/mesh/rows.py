"""Rows to and from the registry's nouns."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row

from registry_svc.mesh.domain import (
    NO_BEHAVIOUR,
    AgentBehaviour,
    AgentManifest,
    AgentPublication,
    DeclaredAgent,
    DeclaredModel,
    DeclaredRoute,
    JoinToken,
    Manifest,
    MeshSettings,
    Publication,
    Repetition,
    RouteManifest,
    RunnerProfile,
    Session,
    Standing,
)
from weft.kernel.log import get_logger
from weft.kernel.request import Operation, Skill
from weft.wake.recipes import (
    DEFAULT_BROADCAST_ADDRESS,
    DEFAULT_MAX_WAIT_SECONDS,
    DEFAULT_WAKE_PORT,
    CommandRecipe,
    HttpRecipe,
    Recipe,
    WakeOnLanRecipe,
    WakePlan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPulse:
    """A runner's liveness on disk; may be older than in memory."""

    runner: str
    standing: Standing
    last_heartbeat_at: datetime
    inactive_since: datetime | None
    """None while it is active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session with all its rows."""

    session: Session
    profile: RunnerProfile
    pulse: StoredPulse
    publications: tuple[Publication, ...]
    agents: tuple[AgentPublication, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMesh:
    """Everything on disk. Each sequence is ordered by name or, tokens, by id."""

    sessions: tuple[StoredSession, ...] = ()
    models: tuple[DeclaredModel, ...] = ()
    agents: tuple[DeclaredAgent, ...] = ()
    routes: tuple[DeclaredRoute, ...] = ()
    settings: MeshSettings | None = None
    """None: never saved."""
    join_tokens: tuple[JoinToken, ...] = ()


def plan_to_json(plan: WakePlan) -> str:
    """A plan as JSON in ASCII with sorted keys, so that equal plans are equal texts."""
    document: dict[str, Any] = {"by_runner": plan.by_runner, "max_wait_seconds": plan.max_wait_seconds}
    if plan.by_mesh is not None:
        document["by_mesh"] = _action(plan.by_mesh)
    return json.dumps(document, sort_keys=True)


def plan_from_json(text: str) -> WakePlan | None:
    """Return the plan in `text`; None when it holds no way of waking known here.

    Raises ValueError when `text` is not such a document; the message holds nothing of it.
    """
    # Not chained: json's error carries the whole text, and in it may be credentials.
    try:
        document = json.loads(text)
        plan = WakePlan(
            by_runner=bool(document.get("by_runner", False)),
            by_mesh=_recipe(document.get("by_mesh") or {}),
            max_wait_seconds=float(document.get("max_wait_seconds", DEFAULT_MAX_WAIT_SECONDS)),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError("not a wake plan") from None
    return plan if plan.by_runner or plan.by_mesh is not None else None


def _action(recipe: Recipe) -> dict[str, Any]:
    match recipe:
        case HttpRecipe(url=url, method=method, headers=headers):
            return {"http": {"url": url, "method": method, "headers": dict(headers)}}
        case CommandRecipe(argv=argv):
            return {"command": {"argv": list(argv)}}
        case WakeOnLanRecipe(mac_address=mac_address, broadcast_address=broadcast_address, port=port):
            packet = {"mac_address": mac_address, "broadcast_address": broadcast_address, "port": port}
            return {"wake_on_lan": packet}


def _recipe(action: dict[str, Any]) -> Recipe | None:
    if "http" in action:
        http = action["http"]
        headers = {str(name): str(value) for name, value in http.get("headers", {}).items()}
        return HttpRecipe(url=str(http["url"]), method=str(http.get("method", "POST")), headers=headers)
    if "command" in action:
        return CommandRecipe(argv=tuple(str(part) for part in action["command"]["argv"]))
    if "wake_on_lan" in action:
        packet = action["wake_on_lan"]
        return WakeOnLanRecipe(
            mac_address=str(packet["mac_address"]),
            broadcast_address=str(packet.get("broadcast_address", DEFAULT_BROADCAST_ADDRESS)),
            port=int(packet.get("port", DEFAULT_WAKE_PORT)),
        )
    return None


_MAX_INT32 = 2**31 - 1
"""The largest value on the wire."""


def behaviour_to_json(behaviour: AgentBehaviour) -> str | None:
    """A behaviour as JSON with sorted keys, so that equal ones are equal texts; None for none at all."""
    if behaviour == NO_BEHAVIOUR:
        return None
    values = asdict(behaviour)
    given = {name: value for name, value in values.items() if value != getattr(NO_BEHAVIOUR, name)}
    if behaviour.repetition is not None:
        given["repetition"] = behaviour.repetition.value
    return json.dumps(given, sort_keys=True)


def behaviour_from_json(text: str | None) -> AgentBehaviour:
    """The behaviour in `text`. Raises ValueError when it is no such document."""
    if text is None:
        return NO_BEHAVIOUR
    try:
        document = json.loads(text)
        return AgentBehaviour(
            platform_prompt=bool(document.get("platform_prompt", False)),
            tools=_names(document.get("tools", [])),
            max_tool_iterations=_count(document.get("max_tool_iterations")),
            signals=_names(document.get("signals", [])),
            stop_on_decision_request=bool(document.get("stop_on_decision_request", True)),
            repetition=_repetition(document.get("repetition")),
            parse_text_tool_calls=bool(document.get("parse_text_tool_calls", True)),
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ValueError("not an agent's behaviour") from None


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value <= _MAX_INT32:
        raise TypeError
    return value


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(str(name) for name in value)


def _repetition(word: Any) -> Repetition | None:
    """A value of a newer release counts as unset."""
    return Repetition(word) if word in {each.value for each in Repetition} else None


log = get_logger("weft.registry.store")

SETTINGS_ID = 1
"""Of the only row of `mesh_settings`."""

Values = dict[str, Any]
"""Values of one row, by column."""


def session_row(session: Session) -> Values:
    """A row of `sessions`."""
    return {"id": session.id, "request_id": session.request_id, "ticket_key": session.ticket_key}


def runner_row(stored: StoredSession) -> Values:
    """A row of `runners`."""
    profile = stored.profile
    return {
        "name": profile.name,
        "session_id": stored.session.id,
        "incarnation": profile.incarnation,
        "address": profile.address,
        "host": profile.host,
        "runtime": profile.runtime,
        "version": profile.version,
        "dial_out": profile.dial_out,
        **pulse_row(stored.pulse),
    }


def pulse_row(pulse: StoredPulse) -> Values:
    """The columns of `runners` that a pulse changes."""
    return {
        "standing": pulse.standing.value,
        "last_heartbeat_at": pulse.last_heartbeat_at,
        "inactive_since": pulse.inactive_since,
    }


def model_row(model: Publication | DeclaredModel) -> Values:
    """A row of `models` or of `declared_models`."""
    manifest = model.manifest
    return {
        "name": manifest.name,
        "runner": model.runner,
        "pool_name": manifest.pool_name,
        "operations": ",".join(operation.name.lower() for operation in manifest.operations),
        "context_tokens": manifest.context_tokens,
        "digest": manifest.digest,
        "remote": manifest.remote,
        "wake": None if manifest.wake is None else plan_to_json(manifest.wake),
        "skills": ",".join(skill.name.lower() for skill in manifest.skills) or None,
        "created_at": model.created_at,
    }


def declared_agent_row(agent: DeclaredAgent | AgentPublication) -> Values:
    """A row of `declared_agents`."""
    manifest = agent.manifest
    return {
        "name": manifest.name,
        "target": manifest.target,
        "targets_pool": manifest.targets_pool,
        "description": manifest.description,
        "system_prompt": manifest.system_prompt,
        "default_params": manifest.default_params,
        "behaviour": behaviour_to_json(manifest.behaviour),
        "created_at": agent.created_at,
    }


def agent_row(agent: AgentPublication) -> Values:
    """A row of `agents`."""
    return {"runner": agent.runner, **declared_agent_row(agent)}


def declared_route_row(route: DeclaredRoute) -> Values:
    """A row of `declared_routes`."""
    manifest = route.manifest
    return {
        "name": manifest.name,
        "description": manifest.description,
        # No name has a comma.
        "candidates": ",".join(manifest.candidates),
        "budget_seconds": manifest.budget_seconds,
        "keep_alive_seconds": manifest.keep_alive_seconds,
        "pin_primary": manifest.pin_primary,
        "created_at": route.created_at,
    }


def settings_row(settings: MeshSettings) -> Values:
    """The row of `mesh_settings`."""
    return {
        "id": SETTINGS_ID,
        "allow_cloud_fallback": settings.allow_cloud_fallback,
        "revision": settings.revision,
    }


def join_token_row(token: JoinToken) -> Values:
    """A row of `join_tokens`."""
    return {
        "id": token.id,
        "description": token.description,
        "secret_sha256": token.secret_sha256,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
    }


def publication_of(row: Row[Any]) -> Publication:
    """Read a row of `models`."""
    return Publication(manifest=_manifest(row), runner=row.runner, created_at=row.created_at)


def declared_model_of(row: Row[Any]) -> DeclaredModel:
    """Read a row of `declared_models`."""
    return DeclaredModel(manifest=_manifest(row), runner=row.runner, created_at=row.created_at)


def agent_publication_of(row: Row[Any]) -> AgentPublication:
    """Read a row of `agents`."""
    return AgentPublication(manifest=_agent_manifest(row), runner=row.runner, created_at=row.created_at)


def declared_agent_of(row: Row[Any]) -> DeclaredAgent:
    """Read a row of `declared_agents`."""
    return DeclaredAgent(manifest=_agent_manifest(row), created_at=row.created_at)


def declared_route_of(row: Row[Any]) -> DeclaredRoute:
    """Read a row of `declared_routes`."""
    manifest = RouteManifest(
        name=row.name,
        description=row.description,
        candidates=tuple(row.candidates.split(",")),
        budget_seconds=row.budget_seconds,
        keep_alive_seconds=row.keep_alive_seconds,
        pin_primary=row.pin_primary,
    )
    return DeclaredRoute(manifest=manifest, created_at=row.created_at)


def settings_of(row: Row[Any]) -> MeshSettings:
    """Read the row of `mesh_settings`."""
    return MeshSettings(allow_cloud_fallback=row.allow_cloud_fallback, revision=row.revision)


def join_token_of(row: Row[Any]) -> JoinToken:
    """Read a row of `join_tokens`."""
    return JoinToken(
        id=row.id,
        description=row.description,
        secret_sha256=row.secret_sha256,
        created_at=row.created_at,
        expires_at=row.expires_at,
    )


def stored_session_of(
    row: Row[Any], publications: Sequence[Publication], agents: Sequence[AgentPublication]
) -> StoredSession:
    """Read a row of `runners` joined with its row of `sessions`."""
    return StoredSession(
        session=Session(
            id=row.session_id,
            request_id=row.request_id,
            runner=row.name,
            incarnation=row.incarnation,
            ticket_key=row.ticket_key,
        ),
        profile=RunnerProfile(
            name=row.name,
            incarnation=row.incarnation,
            address=row.address,
            host=row.host,
            runtime=row.runtime,
            version=row.version,
            dial_out=row.dial_out,
        ),
        pulse=StoredPulse(
            runner=row.name,
            standing=Standing(row.standing),
            last_heartbeat_at=row.last_heartbeat_at,
            inactive_since=row.inactive_since,
        ),
        publications=tuple(publications),
        agents=tuple(agents),
    )


def _manifest(row: Row[Any]) -> Manifest:
    return Manifest(
        name=row.name,
        pool_name=row.pool_name,
        operations=tuple(Operation[name.upper()] for name in row.operations.split(",") if name),
        context_tokens=row.context_tokens,
        digest=row.digest,
        remote=row.remote,
        wake=None if row.wake is None else _wake_plan(row),
        skills=tuple(Skill[name.upper()] for name in (row.skills or "").split(",") if name),
    )


def _wake_plan(row: Row[Any]) -> WakePlan | None:
    try:
        return plan_from_json(row.wake)
    except ValueError:
        # One damaged row must not keep the whole mesh from starting. Without its plan the model counts as never asleep.
        log.warning("wake plan cannot be read, apply or publish the model again", model=row.name)
        return None


def _agent_manifest(row: Row[Any]) -> AgentManifest:
    return AgentManifest(
        name=row.name,
        target=row.target,
        targets_pool=row.targets_pool,
        description=row.description,
        system_prompt=row.system_prompt,
        default_params=row.default_params,
        behaviour=_behaviour(row),
    )


def _behaviour(row: Row[Any]) -> AgentBehaviour:
    try:
        return behaviour_from_json(row.behaviour)
    except ValueError:
        # As with wake plans. Without its behaviour the agent gets no tools and no signals, and answers still.
        log.warning("agent's behaviour cannot be read, apply or publish the agent again", agent=row.name)
        return NO_BEHAVIOUR
