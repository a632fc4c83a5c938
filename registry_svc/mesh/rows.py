"""Conversion of database rows to and from records of the mesh."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from google.protobuf.message import Message

from registry_svc.mesh.domain import JoinToken, Session, Standing
from weft.api.registry.v1 import agent_pb2, event_pb2, model_pb2, runner_pb2, settings_pb2
from weft.documents.kinds import key_of
from weft.sql.connections import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPulse:
    """A runner's stored liveness, which may be older than in memory."""

    runner: str
    standing: Standing
    last_heartbeat_at: datetime
    inactive_since: datetime | None
    """None while active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session with all its resources."""

    session: Session
    profile: runner_pb2.Runner
    pulse: StoredPulse
    publications: tuple[model_pb2.Model, ...]
    agents: tuple[agent_pb2.Agent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMesh:
    """Everything that is stored. Sessions are sorted by name, documents by kind and name."""

    sessions: tuple[StoredSession, ...] = ()
    documents: tuple[Message, ...] = ()
    """Declared documents: Model, Agent, Alias and so on."""
    settings: settings_pb2.MeshSettings | None = None
    """None: never saved."""
    join_tokens: tuple[JoinToken, ...] = ()
    events: tuple[event_pb2.Event, ...] = ()
    """Oldest first."""


Values = dict[str, Any]
"""Values of one row, by column."""


def session_row(session: Session) -> Values:
    """Returns a row of `sessions`."""
    return {"id": session.id, "request_id": session.request_id, "ticket_key": session.ticket_key}


def runner_row(stored: StoredSession) -> Values:
    """Returns a row of `runners`."""
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
    """Returns the columns of `runners` that depend on liveness."""
    return {
        "standing": pulse.standing.value,
        "last_heartbeat_at": pulse.last_heartbeat_at,
        "inactive_since": pulse.inactive_since,
    }


def record_row(record: Any) -> Values:
    """Returns the common columns of `documents` and `publications`."""
    kind, name = key_of(record)
    return {"kind": kind.value, "name": name, "document": record.SerializeToString(deterministic=True)}


def owner_of(record: Any) -> str:
    """Returns the owner in a record's tags; empty: none, or its kind has no tags."""
    tags = getattr(record.manifest, "tags", None)
    return "" if tags is None else str(tags.owner)


def join_token_row(token: JoinToken) -> Values:
    """Returns a row of `join_tokens`."""
    return {
        "id": token.id,
        "description": token.description,
        "secret_sha256": token.secret_sha256,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
    }


def join_token_of(row: Row) -> JoinToken:
    """Reads a row of `join_tokens`."""
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
    """Reads a row of `runners` joined with its row of `sessions`."""
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
