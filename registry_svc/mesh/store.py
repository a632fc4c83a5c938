"""SQL store of the mesh."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from google.protobuf.message import DecodeError, Message

from registry_svc.mesh.states import JoinToken, Session, Standing
from registry_svc.store.database import RegistryDatabase
from weft.api.registry.v1 import agent_pb2, event_pb2, model_pb2, runner_pb2, settings_pb2
from weft.documents.kinds import DECLARED_KINDS, Key, key_of
from weft.kernel.errors.removed_features import KINDS, removed_documents
from weft.kernel.telemetry.log import get_logger
from weft.sql.connections import Row, Tx

log = get_logger("weft.registry.store")


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
    removed: tuple[str, ...] = ()
    """Messages about stored documents of kinds that were removed."""


_PROFILE = ("name", "incarnation", "address", "host", "runtime", "version", "dial_out", "joined_by")
"""Fields of a runner that are constant for an incarnation, which are columns of `runners`."""
_PULSE = """
    UPDATE runners SET standing = :standing, last_heartbeat_at = :last_heartbeat_at, inactive_since = :inactive_since
    WHERE name = :runner
"""
_SAVE = """
    INSERT INTO documents (kind, name, revision, owner, document) VALUES (:kind, :name, 1, :owner, :document)
    ON CONFLICT (kind, name)
    DO UPDATE SET revision = documents.revision + 1, owner = excluded.owner, document = excluded.document
"""
_READ: Mapping[str, str] = {
    "runners": "SELECT r.*, s.request_id, s.ticket_key FROM runners r JOIN sessions s ON s.id = r.session_id",
    "events": "SELECT event FROM events ORDER BY sequence",
    "documents": "SELECT * FROM documents",
    "publications": "SELECT * FROM publications",
    "join_tokens": "SELECT * FROM join_tokens",
}
_SETTINGS = {"kind": "settings", "name": "mesh", "owner": ""}
"""Key of the mesh settings in `documents`."""


class SqlStore(RegistryDatabase):
    """Stores sessions with their resources, declarations, settings and join tokens. One owner at a time.

    Writes are durable when the call returns. All methods raise SERVICE_UNAVAILABLE if the database fails; then nothing
    was written.
    """

    async def load(self) -> StoredMesh:
        """Returns everything that is stored; sessions are sorted by runner, publications and documents by name."""
        found = await self.read(lambda tx: {table: tx.rows(statement) for table, statement in _READ.items()})
        published: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for row, record in _records(found["publications"]):
            published[row.runner][row.kind].append(record)
        settings = next((row for row in found["documents"] if row.kind == _SETTINGS["kind"]), None)
        return StoredMesh(
            sessions=tuple(
                _session_of(row, published[row.name]["model"], published[row.name]["agent"])
                for row in _in_order(found["runners"], "name")
            ),
            documents=tuple(record for _, record in _records(found["documents"])),
            settings=None if settings is None else settings_pb2.MeshSettings.FromString(settings.document),
            join_tokens=tuple(JoinToken(**row._asdict()) for row in _in_order(found["join_tokens"], "id")),
            events=tuple(event_pb2.Event.FromString(row.event) for row in found["events"]),
            removed=tuple(_removed(found["documents"])),
        )

    async def save_session(self, stored: StoredSession, *, evicted: Sequence[str] = ()) -> None:
        """Replaces a session with its runner and publications.

        Its models and agents are withdrawn from other publishers. The sessions `evicted` (by id) are deleted, and any
        other with its runner's name. Declarations are unchanged.
        """
        runner, session = stored.profile.name, stored.session
        rows = [{**_record_row(record), "runner": runner} for record in (*stored.publications, *stored.agents)]

        def work(tx: Tx) -> None:
            # Deletes cascade from sessions to runners, and from runners to publications.
            tx.delete("sessions", "id", [session.id, *evicted])
            # The caller does not know a session that was committed without an acknowledgement.
            tx.execute(
                "DELETE FROM sessions WHERE id IN (SELECT session_id FROM runners WHERE name = :runner)", runner=runner
            )
            row = {"id": session.id, "request_id": session.request_id, "ticket_key": session.ticket_key}
            tx.insert("sessions", row)
            profile = {name: getattr(stored.profile, name) for name in _PROFILE}
            tx.insert("runners", {**profile, "session_id": session.id, **_pulse_row(stored.pulse)})
            tx.many("DELETE FROM publications WHERE kind = :kind AND name = :name", map(_key, rows))
            tx.insert("publications", *rows)

        await self.run(work)

    async def save_pulses(self, pulses: Sequence[StoredPulse]) -> None:
        """Updates the liveness of runners. Ignores unknown names."""
        if pulses:
            rows = [{"runner": pulse.runner, **_pulse_row(pulse)} for pulse in pulses]
            await self.run(lambda tx: tx.many(_PULSE, rows))

    async def delete_sessions(self, session_ids: Sequence[str]) -> None:
        """Deletes sessions with their runners, agents and models. Ignores unknown ids."""
        await self.run(lambda tx: tx.delete("sessions", "id", session_ids))

    async def save_documents(self, records: Sequence[Message], gone: Collection[Key] = ()) -> None:
        """Adds or replaces declarations, and deletes `gone`, all or none."""
        rows = [{**_record_row(record), "owner": owner_of(record)} for record in records]

        def work(tx: Tx) -> None:
            _delete(tx, "documents", gone)
            tx.many(_SAVE, rows)

        await self.run(work)

    async def delete_documents(self, keys: Collection[Key]) -> None:
        """Deletes declared and published resources. Ignores unknown ones."""

        def work(tx: Tx) -> None:
            _delete(tx, "documents", keys)
            _delete(tx, "publications", keys)

        await self.run(work)

    async def save_settings(self, settings: settings_pb2.MeshSettings) -> None:
        """Replaces the mesh settings."""
        row = {**_SETTINGS, "document": settings.SerializeToString(deterministic=True)}
        await self.run(lambda tx: tx.many(_SAVE, [row]))

    async def save_join_token(self, token: JoinToken) -> None:
        """Adds or replaces a token."""
        await self.run(lambda tx: tx.replace("join_tokens", "id", asdict(token)))

    async def exchange_join_token(self, token_id: str, machine: JoinToken) -> None:
        """Replaces a token by the machine that joined with it."""

        def work(tx: Tx) -> None:
            tx.delete("join_tokens", "id", [token_id])
            tx.replace("join_tokens", "id", asdict(machine))

        await self.run(work)

    async def delete_join_token(self, token_id: str) -> None:
        """Deletes a token. Ignores an unknown id."""
        await self.run(lambda tx: tx.delete("join_tokens", "id", [token_id]))

    async def save_events(self, new: Sequence[event_pb2.Event], oldest: int) -> None:
        """Stores at least one new event, with increasing numbers, and deletes those with a number below `oldest`."""
        rows = [{"sequence": event.sequence, "event": event.SerializeToString()} for event in new]

        def work(tx: Tx) -> None:
            # Writes without an acknowledgement are repeated.
            tx.execute(
                "DELETE FROM events WHERE sequence < :oldest OR sequence >= :first",
                oldest=oldest,
                first=rows[0]["sequence"],
            )
            tx.insert("events", *rows)

        await self.run(work)


def _records(rows: Sequence[Row]) -> Iterator[tuple[Row, Message]]:
    """Yields rows with their records, by kind and name."""
    for kind, declared in DECLARED_KINDS.items():
        for row in _in_order([row for row in rows if row.kind == kind.value], "name"):
            try:
                yield row, declared.record.FromString(bytes(row.document))
            except DecodeError:
                # One damaged row must not prevent a start.
                log.warning("stored resource cannot be read, apply or publish it again", kind=row.kind, name=row.name)


def _removed(rows: Sequence[Row]) -> Iterator[str]:
    for kind in KINDS:
        if names := [row.name for row in rows if row.kind == kind]:
            yield removed_documents(kind, names)


def _in_order(rows: Sequence[Row], column: str) -> list[Row]:
    # Not with ORDER BY: PostgreSQL sorts by the locale of the database, in which "b" comes before "C".
    return sorted(rows, key=lambda row: str(getattr(row, column)))


def _delete(tx: Tx, table: str, keys: Collection[Key]) -> None:
    rows = [{"kind": kind.value, "name": name} for kind, name in keys]
    tx.many(f"DELETE FROM {table} WHERE kind = :kind AND name = :name", rows)  # noqa: S608 - our tables


def _key(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"kind": row["kind"], "name": row["name"]}


def _record_row(record: Any) -> dict[str, Any]:
    kind, name = key_of(record)
    return {"kind": kind.value, "name": name, "document": record.SerializeToString(deterministic=True)}


def owner_of(record: Any) -> str:
    """Returns the owner in a record's tags; empty: none, or its kind has no tags."""
    tags = getattr(record.manifest, "tags", None)
    return "" if tags is None else str(tags.owner)


def _pulse_row(pulse: StoredPulse) -> dict[str, Any]:
    return {
        "standing": pulse.standing.value,
        "last_heartbeat_at": pulse.last_heartbeat_at,
        "inactive_since": pulse.inactive_since,
    }


def profile_of(runner: Any) -> runner_pb2.Runner:
    """Returns the facts of a runner's incarnation, without report and state, from a message or a row."""
    return runner_pb2.Runner(**{name: getattr(runner, name) for name in _PROFILE})


def _session_of(row: Row, publications: Sequence[model_pb2.Model], agents: Sequence[agent_pb2.Agent]) -> StoredSession:
    """Reads a row of `runners` joined with its row of `sessions`."""
    return StoredSession(
        session=Session(
            id=row.session_id,
            request_id=row.request_id,
            runner=row.name,
            incarnation=row.incarnation,
            ticket_key=row.ticket_key,
        ),
        profile=profile_of(row),
        pulse=StoredPulse(
            runner=row.name,
            standing=Standing(row.standing),
            last_heartbeat_at=row.last_heartbeat_at,
            inactive_since=row.inactive_since,
        ),
        publications=tuple(publications),
        agents=tuple(agents),
    )
