"""Rows to and from the records of the mesh."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from google.protobuf import json_format

from registry_svc.mesh.domain import JoinToken, Session, Standing
from registry_svc.mesh.records import compact, moment_of
from weft.api.common.v1 import agent_behaviour_pb2, sampling_pb2
from weft.api.registry.v1 import (
    agent_pb2,
    alias_pb2,
    event_pb2,
    journal_pb2,
    model_pb2,
    profile_pb2,
    route_pb2,
    runner_pb2,
    settings_pb2,
    tags_pb2,
    tenant_pb2,
    wake_pb2,
    workflow_pb2,
)
from weft.dispatch.agents import target_of
from weft.kernel.log import get_logger
from weft.kernel.request import JournalMode, Operation, Skill
from weft.kernel.timestamps import duration_of, optional_stamp, stamp_of
from weft.sql.connections import Row
from weft.wake.recipes import DEFAULT_MAX_WAIT_SECONDS, max_wait_seconds, set_defaults


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
    profile: runner_pb2.Runner
    pulse: StoredPulse
    publications: tuple[model_pb2.Model, ...]
    agents: tuple[agent_pb2.Agent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMesh:
    """Everything on disk. Each sequence is ordered by name or, tokens, by id."""

    sessions: tuple[StoredSession, ...] = ()
    models: tuple[model_pb2.Model, ...] = ()
    agents: tuple[agent_pb2.Agent, ...] = ()
    routes: tuple[route_pb2.Route, ...] = ()
    aliases: tuple[alias_pb2.Alias, ...] = ()
    profiles: tuple[profile_pb2.Profile, ...] = ()
    workflows: tuple[workflow_pb2.RegisteredWorkflow, ...] = ()
    tenants: tuple[tenant_pb2.Tenant, ...] = ()
    settings: settings_pb2.MeshSettings | None = None
    """None: never saved."""
    join_tokens: tuple[JoinToken, ...] = ()
    events: tuple[event_pb2.Event, ...] = ()
    """Oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredNames:
    """Names of what is declared, by kind."""

    agents: Sequence[str] = ()
    routes: Sequence[str] = ()
    aliases: Sequence[str] = ()


NO_NAMES = DeclaredNames()
DeclaredManifest = alias_pb2.Alias | profile_pb2.Profile | workflow_pb2.RegisteredWorkflow | tenant_pb2.Tenant
"""What operators declare that is stored as its manifest."""


@dataclass(frozen=True, slots=True)
class DeclaredRecords:
    """What is declared, by kind."""

    models: Sequence[model_pb2.Model] = ()
    agents: Sequence[agent_pb2.Agent] = ()
    routes: Sequence[route_pb2.Route] = ()
    aliases: Sequence[alias_pb2.Alias] = ()
    profiles: Sequence[profile_pb2.Profile] = ()
    workflows: Sequence[workflow_pb2.RegisteredWorkflow] = ()
    tenants: Sequence[tenant_pb2.Tenant] = ()


def plan_to_json(plan: wake_pb2.Wake) -> str:
    """A plan as JSON in ASCII with sorted keys, so that equal plans are equal texts."""
    document: dict[str, Any] = {"by_runner": plan.by_runner, "max_wait_seconds": max_wait_seconds(plan)}
    action = plan.by_mesh.WhichOneof("action")
    if action is not None:
        document["by_mesh"] = {action: _plain(getattr(plan.by_mesh, action))}
    return json.dumps(document, sort_keys=True)


def _plain(action: wake_pb2.HttpAction | wake_pb2.CommandAction | wake_pb2.WakeOnLanAction) -> dict[str, Any]:
    return json_format.MessageToDict(
        action, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def plan_from_json(text: str) -> wake_pb2.Wake | None:
    """Return the plan in `text`; None when it holds no way of waking known here.

    Raises ValueError when `text` is not such a document; the message holds nothing of it.
    """
    # Not chained: json's error carries the whole text, and in it may be credentials.
    try:
        document = json.loads(text)
        plan = wake_pb2.Wake(
            by_runner=bool(document.get("by_runner", False)), by_mesh=_recipe(document.get("by_mesh") or {})
        )
        seconds = float(document.get("max_wait_seconds", DEFAULT_MAX_WAIT_SECONDS))
        plan.max_wait.FromNanoseconds(round(seconds * 1e9))
        set_defaults(plan)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, json_format.ParseError):
        raise ValueError("not a wake plan") from None
    return plan if plan.by_runner or plan.HasField("by_mesh") else None


_REQUIRED = {"http": "url", "command": "argv", "wake_on_lan": "mac_address"}
"""The field without which a recipe is none, by its action."""


def _recipe(document: dict[str, Any]) -> wake_pb2.WakeRecipe | None:
    action = next((action for action in _REQUIRED if action in document), None)
    if action is None:
        return None
    recipe = json_format.ParseDict({action: document[action]}, wake_pb2.WakeRecipe(), ignore_unknown_fields=True)
    if not document[action][_REQUIRED[action]]:
        raise ValueError(_REQUIRED[action])
    return recipe


def behaviour_to_json(behaviour: agent_behaviour_pb2.AgentBehaviour) -> str | None:
    """A behaviour as JSON with sorted keys, so that equal ones are equal texts; None for none at all."""
    given = json_format.MessageToDict(behaviour, preserving_proto_field_name=True)
    policy = given.pop("repetition_policy", None)
    if policy is not None:
        given["repetition"] = policy.removeprefix(_POLICY_PREFIX).lower()
    return json.dumps(given, sort_keys=True) if given else None


def behaviour_from_json(text: str | None) -> agent_behaviour_pb2.AgentBehaviour | None:
    """The behaviour in `text`; None for none at all. Raises ValueError when it is no such document."""
    if text is None:
        return None
    try:
        document = json.loads(text)
        word = document.pop("repetition", None)
        document["repetition_policy"] = 0 if word is None else _policy_of(word)
        behaviour = json_format.ParseDict(document, agent_behaviour_pb2.AgentBehaviour(), ignore_unknown_fields=True)
    except (ValueError, TypeError, AttributeError, RecursionError, json_format.ParseError):
        raise ValueError("not an agent's behaviour") from None
    if behaviour.max_tool_iterations < 0:
        raise ValueError("not an agent's behaviour")
    return behaviour if behaviour.ByteSize() else None


def _policy_of(word: str) -> int:
    """Return the number of a repetition policy; a value of a newer release counts as unset."""
    return dict(agent_behaviour_pb2.RepetitionPolicy.items()).get(_POLICY_PREFIX + word.upper(), 0)


_POLICY_PREFIX = "REPETITION_POLICY_"


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


def model_row(model: model_pb2.Model) -> Values:
    """A row of `models` or of `declared_models`."""
    manifest = model.manifest
    is_public = model.kind == model_pb2.Model.KIND_PUBLIC
    return {
        "name": manifest.name,
        "runner": model.declared_runner if is_public else model.runner,
        "pool_name": manifest.pool_name,
        "operations": ",".join(Operation(number).name.lower() for number in manifest.operations),
        "context_tokens": manifest.context_tokens,
        "digest": manifest.digest,
        "remote": manifest.remote,
        "wake": plan_to_json(manifest.wake) if manifest.HasField("wake") else None,
        "skills": ",".join(Skill(number).name.lower() for number in manifest.skills) or None,
        "tags": _tags_column(manifest),
        "upstream": manifest.upstream or None,
        "journal": _journal_word(manifest.journal),
        "created_at": moment_of(model),
    }


def _tags_column(manifest: model_pb2.ModelManifest | agent_pb2.AgentManifest) -> bytes | None:
    return manifest.tags.SerializeToString(deterministic=True) if manifest.HasField("tags") else None


def declared_model_row(model: model_pb2.Model) -> Values:
    """A row of `declared_models`."""
    manifest = model.manifest
    provider = manifest.provider.SerializeToString() if manifest.HasField("provider") else None
    return {**model_row(model), "provider": provider}


def declared_agent_row(agent: agent_pb2.Agent) -> Values:
    """A row of `declared_agents`."""
    manifest = agent.manifest
    target, is_pool = target_of(manifest)
    params = json_format.MessageToDict(manifest.default_params)
    return {
        "name": manifest.name,
        "target": target,
        "targets_pool": is_pool,
        "description": manifest.description,
        "system_prompt": manifest.system_prompt,
        "default_params": json.dumps(params, sort_keys=True, separators=(",", ":")),
        "behaviour": behaviour_to_json(manifest.behaviour),
        "tags": _tags_column(manifest),
        "created_at": moment_of(agent),
    }


def agent_row(agent: agent_pb2.Agent) -> Values:
    """A row of `agents`."""
    return {"runner": agent.runner, **declared_agent_row(agent)}


def declared_route_row(route: route_pb2.Route) -> Values:
    """A row of `declared_routes`."""
    manifest = route.manifest
    return {
        "name": manifest.name,
        "description": manifest.description,
        # No name has a comma.
        "candidates": ",".join(manifest.candidates),
        "budget_seconds": manifest.budget.ToNanoseconds() / 1e9 if manifest.HasField("budget") else None,
        "keep_alive_seconds": manifest.keep_alive.ToNanoseconds() / 1e9 if manifest.HasField("keep_alive") else None,
        "pin_primary": manifest.pin_primary,
        "created_at": moment_of(route),
    }


def manifest_row(record: DeclaredManifest) -> Values:
    """A row of a table of manifests, such as `declared_aliases`."""
    manifest = record.manifest
    return {
        "name": manifest.name,
        "manifest": manifest.SerializeToString(deterministic=True),
        "created_at": moment_of(record),
    }


def declared_profile_row(profile: profile_pb2.Profile) -> Values:
    """A row of `declared_profiles`."""
    return manifest_row(profile) | {
        "active_since": profile.active_time.ToDatetime(tzinfo=UTC) if profile.active else None
    }


def settings_row(settings: settings_pb2.MeshSettings) -> Values:
    """The row of `mesh_settings`."""
    return {
        "id": SETTINGS_ID,
        "allow_cloud_fallback": settings.allow_cloud_fallback,
        "revision": settings.revision,
        "journal": _journal_word(settings.journal),
    }


def _journal_word(number: int) -> str | None:
    return JournalMode(number).name.lower() if number else None


def _journal_of(word: str | None) -> "journal_pb2.JournalMode.ValueType":
    """Returns the mode of a stored word; one that a newer release wrote demands as much as there is."""
    known = "" if word is None else word.upper()
    found = JournalMode[known] if known in JournalMode.__members__ else JournalMode.KEEP
    return journal_pb2.JournalMode.ValueType(JournalMode.UNSET if word is None else found)


def join_token_row(token: JoinToken) -> Values:
    """A row of `join_tokens`."""
    return {
        "id": token.id,
        "description": token.description,
        "secret_sha256": token.secret_sha256,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
    }


def publication_of(row: Row) -> model_pb2.Model:
    """Read a row of `models`."""
    kind, created = model_pb2.Model.KIND_VIRTUAL, stamp_of(row.created_at)
    return compact(model_pb2.Model(manifest=_manifest(row), runner=row.runner, kind=kind, create_time=created))


def declared_model_of(row: Row) -> model_pb2.Model:
    """Read a row of `declared_models`."""
    kind, created = model_pb2.Model.KIND_PUBLIC, stamp_of(row.created_at)
    manifest = _manifest(row)
    if row.provider is not None:
        manifest.provider.ParseFromString(row.provider)
    return model_pb2.Model(manifest=manifest, declared_runner=row.runner, kind=kind, create_time=created)


def agent_publication_of(row: Row) -> agent_pb2.Agent:
    """Read a row of `agents`."""
    kind, created = agent_pb2.Agent.KIND_VIRTUAL, stamp_of(row.created_at)
    return compact(agent_pb2.Agent(manifest=_agent_manifest(row), runner=row.runner, kind=kind, create_time=created))


def declared_agent_of(row: Row) -> agent_pb2.Agent:
    """Read a row of `declared_agents`."""
    kind, created = agent_pb2.Agent.KIND_PUBLIC, stamp_of(row.created_at)
    return agent_pb2.Agent(manifest=_agent_manifest(row), kind=kind, create_time=created)


def declared_route_of(row: Row) -> route_pb2.Route:
    """Read a row of `declared_routes`."""
    manifest = route_pb2.RouteManifest(
        name=row.name,
        description=row.description,
        candidates=row.candidates.split(","),
        budget=None if row.budget_seconds is None else duration_of(row.budget_seconds),
        keep_alive=None if row.keep_alive_seconds is None else duration_of(row.keep_alive_seconds),
        pin_primary=row.pin_primary,
    )
    return route_pb2.Route(manifest=manifest, create_time=stamp_of(row.created_at))


def declared_alias_of(row: Row) -> alias_pb2.Alias:
    """Read a row of `declared_aliases`."""
    manifest = alias_pb2.AliasManifest.FromString(row.manifest)
    source = alias_pb2.Alias.SOURCE_DECLARED
    return alias_pb2.Alias(manifest=manifest, source=source, create_time=stamp_of(row.created_at))


def declared_profile_of(row: Row) -> profile_pb2.Profile:
    """Read a row of `declared_profiles`."""
    return profile_pb2.Profile(
        manifest=profile_pb2.ProfileManifest.FromString(row.manifest),
        active=row.active_since is not None,
        active_time=optional_stamp(row.active_since),
        create_time=stamp_of(row.created_at),
    )


def declared_workflow_of(row: Row) -> workflow_pb2.RegisteredWorkflow:
    """Read a row of `declared_workflows`."""
    manifest = workflow_pb2.WorkflowManifest.FromString(row.manifest)
    return workflow_pb2.RegisteredWorkflow(manifest=manifest, create_time=stamp_of(row.created_at))


def declared_tenant_of(row: Row) -> tenant_pb2.Tenant:
    """Read a row of `declared_tenants`."""
    manifest = tenant_pb2.TenantManifest.FromString(row.manifest)
    source = tenant_pb2.Tenant.SOURCE_DECLARED
    return tenant_pb2.Tenant(manifest=manifest, source=source, create_time=stamp_of(row.created_at))


def settings_of(row: Row) -> settings_pb2.MeshSettings:
    """Read the row of `mesh_settings`."""
    return settings_pb2.MeshSettings(
        allow_cloud_fallback=row.allow_cloud_fallback, revision=row.revision, journal=_journal_of(row.journal)
    )


def join_token_of(row: Row) -> JoinToken:
    """Read a row of `join_tokens`."""
    return JoinToken(
        id=row.id,
        description=row.description,
        secret_sha256=row.secret_sha256,
        created_at=row.created_at,
        expires_at=row.expires_at,
    )


def stored_session_of(
    row: Row, publications: Sequence[model_pb2.Model], agents: Sequence[agent_pb2.Agent]
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
        profile=runner_pb2.Runner(
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


def _manifest(row: Row) -> model_pb2.ModelManifest:
    return model_pb2.ModelManifest(
        name=row.name,
        pool_name=row.pool_name,
        operations=[Operation[name.upper()].value for name in row.operations.split(",") if name],  # type: ignore[misc]  # same numbers
        context_tokens=row.context_tokens,
        digest=row.digest,
        remote=row.remote,
        wake=None if row.wake is None else _wake_plan(row),
        skills=[Skill[name.upper()].value for name in (row.skills or "").split(",") if name],  # type: ignore[misc]  # same numbers
        tags=_tags(row),
        upstream=row.upstream or "",
        journal=_journal_of(row.journal),
    )


def _tags(row: Row) -> tags_pb2.Tags | None:
    return None if row.tags is None else tags_pb2.Tags.FromString(bytes(row.tags))


def _wake_plan(row: Row) -> wake_pb2.Wake | None:
    try:
        return plan_from_json(row.wake)
    except ValueError:
        # One damaged row must not keep the whole mesh from starting. Without its plan the model counts as never asleep.
        log.warning("wake plan cannot be read, apply or publish the model again", model=row.name)
        return None


def _agent_manifest(row: Row) -> agent_pb2.AgentManifest:
    manifest = agent_pb2.AgentManifest(
        name=row.name,
        description=row.description,
        system_prompt=row.system_prompt,
        default_params=_default_params(row),
        behaviour=_behaviour(row),
        tags=_tags(row),
    )
    if row.targets_pool:
        manifest.pool = row.target
    else:
        manifest.model = row.target
    return manifest


def _default_params(row: Row) -> sampling_pb2.SamplingParams | None:
    try:
        params = json.loads(row.default_params or "{}")
        message = json_format.ParseDict(params, sampling_pb2.SamplingParams(), ignore_unknown_fields=True)
    except (ValueError, TypeError, AttributeError, RecursionError, json_format.ParseError):
        # As with wake plans. Without its defaults the agent answers with those of its model.
        log.warning("agent's default parameters cannot be read, apply or publish the agent again", agent=row.name)
        return None
    return message if params else None


def _behaviour(row: Row) -> agent_behaviour_pb2.AgentBehaviour | None:
    try:
        return behaviour_from_json(row.behaviour)
    except ValueError:
        # As with wake plans. Without its behaviour the agent gets no tools and no signals, and answers still.
        log.warning("agent's behaviour cannot be read, apply or publish the agent again", agent=row.name)
        return None
