"""Migrations that move declarations and publications from columns to messages, and rewrite events."""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.unknown_fields import UnknownFieldSet

from weft.api.common.v1 import agent_behaviour_pb2, sampling_pb2
from weft.api.registry.v1 import (
    agent_pb2,
    alias_pb2,
    event_pb2,
    journal_pb2,
    model_pb2,
    profile_pb2,
    route_pb2,
    settings_pb2,
    tags_pb2,
    tenant_pb2,
    wake_pb2,
    workflow_pb2,
)
from weft.kernel.log import get_logger
from weft.kernel.timestamps import duration_of, optional_stamp, stamp_of
from weft.sql.connections import Row, Tx
from weft.wake.recipes import DEFAULT_MAX_WAIT_SECONDS, set_defaults

log = get_logger("weft.registry.store")

T = TypeVar("T")


def move_documents(tx: Tx) -> None:
    """Moves all rows and drops their tables."""
    for table, (kind, record_of) in _TABLES.items():
        for row in tx.rows(f"SELECT * FROM {table}"):  # noqa: S608 - our tables
            record = record_of(row)
            moved = {"kind": kind, "name": row.name, "document": record.SerializeToString(deterministic=True)}
            if table in _PUBLISHED:
                tx.insert("publications", {**moved, "runner": row.runner})
            else:
                tags = getattr(record.manifest, "tags", None)
                tx.insert("documents", {**moved, "revision": 1, "owner": "" if tags is None else tags.owner})
        tx.execute(f"DROP TABLE {table}")
    for row in tx.rows("SELECT * FROM mesh_settings"):
        settings = settings_pb2.MeshSettings(
            allow_cloud_fallback=row.allow_cloud_fallback, revision=row.revision, journal=_journal(row.journal)
        )
        moved = {"kind": "settings", "name": "mesh", "document": settings.SerializeToString(deterministic=True)}
        tx.insert("documents", {**moved, "revision": row.revision, "owner": ""})
    tx.execute("DROP TABLE mesh_settings")


_EVENT_KINDS = ("mesh", "model", "agent", "runner", "pool", "route", "alias", "profile", "workflow", "tenant")
"""Names of the numbers in field 3 of old events."""
_EVENT_KIND_FIELD = 3


def name_event_kinds(tx: Tx) -> None:
    """Replaces the number of the kind in each event by its name."""
    rows = []
    for row in tx.rows("SELECT sequence, event FROM events"):
        event = event_pb2.Event.FromString(bytes(row.event))
        unknown: Any = UnknownFieldSet(event)
        numbers = [each.data for each in unknown if each.field_number == _EVENT_KIND_FIELD]
        event.kind = _EVENT_KINDS[numbers[0] if numbers else 0]
        event.DiscardUnknownFields()
        rows.append({"sequence": row.sequence, "event": event.SerializeToString()})
    tx.many("UPDATE events SET event = :event WHERE sequence = :sequence", rows)


def _model(row: Row) -> model_pb2.Model:
    return model_pb2.Model(
        manifest=_manifest(row),
        runner=row.runner,
        kind=model_pb2.Model.KIND_VIRTUAL,
        create_time=stamp_of(row.created_at),
    )


def _declared_model(row: Row) -> model_pb2.Model:
    manifest = _manifest(row)
    if row.provider is not None:
        manifest.provider.ParseFromString(bytes(row.provider))
    created, kind = stamp_of(row.created_at), model_pb2.Model.KIND_PUBLIC
    return model_pb2.Model(manifest=manifest, declared_runner=row.runner, kind=kind, create_time=created)


def _agent(row: Row) -> agent_pb2.Agent:
    created, kind = stamp_of(row.created_at), agent_pb2.Agent.KIND_VIRTUAL
    return agent_pb2.Agent(manifest=_agent_manifest(row), runner=row.runner, kind=kind, create_time=created)


def _declared_agent(row: Row) -> agent_pb2.Agent:
    created, kind = stamp_of(row.created_at), agent_pb2.Agent.KIND_PUBLIC
    return agent_pb2.Agent(manifest=_agent_manifest(row), kind=kind, create_time=created)


def _route(row: Row) -> route_pb2.Route:
    manifest = route_pb2.RouteManifest(
        name=row.name,
        description=row.description,
        candidates=row.candidates.split(","),
        budget=None if row.budget_seconds is None else duration_of(row.budget_seconds),
        keep_alive=None if row.keep_alive_seconds is None else duration_of(row.keep_alive_seconds),
        pin_primary=row.pin_primary,
    )
    return route_pb2.Route(manifest=manifest, create_time=stamp_of(row.created_at))


def _alias(row: Row) -> alias_pb2.Alias:
    manifest = alias_pb2.AliasManifest.FromString(bytes(row.manifest))
    source, created = alias_pb2.Alias.SOURCE_DECLARED, stamp_of(row.created_at)
    return alias_pb2.Alias(manifest=manifest, source=source, create_time=created)


def _profile(row: Row) -> profile_pb2.Profile:
    return profile_pb2.Profile(
        manifest=profile_pb2.ProfileManifest.FromString(bytes(row.manifest)),
        active=row.active_since is not None,
        active_time=optional_stamp(row.active_since),
        create_time=stamp_of(row.created_at),
    )


def _workflow(row: Row) -> workflow_pb2.RegisteredWorkflow:
    manifest = workflow_pb2.WorkflowManifest.FromString(bytes(row.manifest))
    return workflow_pb2.RegisteredWorkflow(manifest=manifest, create_time=stamp_of(row.created_at))


def _tenant(row: Row) -> tenant_pb2.Tenant:
    manifest = tenant_pb2.TenantManifest.FromString(bytes(row.manifest))
    source, created = tenant_pb2.Tenant.SOURCE_DECLARED, stamp_of(row.created_at)
    return tenant_pb2.Tenant(manifest=manifest, source=source, create_time=created)


_TABLES: Mapping[str, tuple[str, Callable[[Row], Any]]] = MappingProxyType(
    {
        "models": ("model", _model),
        "agents": ("agent", _agent),
        "declared_models": ("model", _declared_model),
        "declared_agents": ("agent", _declared_agent),
        "declared_routes": ("route", _route),
        "declared_aliases": ("alias", _alias),
        "declared_profiles": ("profile", _profile),
        "declared_workflows": ("workflow", _workflow),
        "declared_tenants": ("tenant", _tenant),
    }
)
_PUBLISHED = frozenset({"models", "agents"})


def _manifest(row: Row) -> model_pb2.ModelManifest:
    return model_pb2.ModelManifest(
        name=row.name,
        pool_name=row.pool_name,
        operations=_numbers(model_pb2.ModelOperation, "MODEL_OPERATION_", row.operations),
        context_tokens=row.context_tokens,
        digest=row.digest,
        remote=row.remote,
        wake=_read(row, "wake", _wake),
        skills=_numbers(model_pb2.ModelSkill, "MODEL_SKILL_", row.skills or ""),
        tags=_tags(row),
        upstream=row.upstream or "",
        journal=_journal(row.journal),
    )


def _agent_manifest(row: Row) -> agent_pb2.AgentManifest:
    manifest = agent_pb2.AgentManifest(
        name=row.name,
        description=row.description,
        system_prompt=row.system_prompt,
        default_params=_read(row, "default_params", _sampling),
        behaviour=_read(row, "behaviour", _agent_behaviour),
        tags=_tags(row),
    )
    setattr(manifest, "pool" if row.targets_pool else "model", row.target)
    return manifest


def _numbers(enum: Any, prefix: str, words: str) -> list[Any]:
    return [enum.Value(prefix + word.upper()) for word in words.split(",") if word]


def _tags(row: Row) -> tags_pb2.Tags | None:
    return None if row.tags is None else tags_pb2.Tags.FromString(bytes(row.tags))


def _journal(word: str | None) -> journal_pb2.JournalMode.ValueType:
    return journal_pb2.JournalMode.Value(f"JOURNAL_MODE_{(word or 'unspecified').upper()}")


def _read(row: Row, column: str, read: Callable[[Any], T]) -> T | None:
    """Returns the value of a JSON column; None if it is empty or damaged."""
    text = getattr(row, column)
    try:
        # The log omits the text, which may contain credentials. Damaged rows must not prevent a start.
        return read(json.loads(text)) if text else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, json_format.ParseError):
        log.warning("stored value cannot be read, apply or publish its resource again", name=row.name, column=column)
        return None


def _wake(document: dict[str, Any]) -> wake_pb2.Wake | None:
    plan = wake_pb2.Wake(by_runner=bool(document.get("by_runner")))
    if document.get("by_mesh"):
        json_format.ParseDict(document["by_mesh"], plan.by_mesh, ignore_unknown_fields=True)
    plan.max_wait.FromNanoseconds(round(float(document.get("max_wait_seconds", DEFAULT_MAX_WAIT_SECONDS)) * 1e9))
    set_defaults(plan)
    return plan if plan.by_runner or plan.by_mesh.WhichOneof("action") else None


def _sampling(document: dict[str, Any]) -> sampling_pb2.SamplingParams | None:
    params = json_format.ParseDict(document, sampling_pb2.SamplingParams(), ignore_unknown_fields=True)
    return params if document else None


def _agent_behaviour(document: dict[str, Any]) -> agent_behaviour_pb2.AgentBehaviour:
    word = document.pop("repetition", None)
    if word is not None:
        document["repetition_policy"] = f"REPETITION_POLICY_{word.upper()}"
    return json_format.ParseDict(document, agent_behaviour_pb2.AgentBehaviour(), ignore_unknown_fields=True)
