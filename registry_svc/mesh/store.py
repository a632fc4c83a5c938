"""The store of the mesh, on SQL."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from registry_svc.mesh.domain import JoinToken
from registry_svc.mesh.rows import (
    NO_NAMES,
    DeclaredNames,
    DeclaredRecords,
    StoredMesh,
    StoredPulse,
    StoredSession,
    agent_publication_of,
    agent_row,
    declared_agent_of,
    declared_agent_row,
    declared_alias_of,
    declared_model_of,
    declared_model_row,
    declared_profile_of,
    declared_profile_row,
    declared_route_of,
    declared_route_row,
    declared_tenant_of,
    declared_workflow_of,
    join_token_of,
    join_token_row,
    manifest_row,
    model_row,
    publication_of,
    pulse_row,
    runner_row,
    session_row,
    settings_of,
    settings_row,
    stored_session_of,
)
from registry_svc.store.database import RegistryDatabase
from weft.api.registry.v1 import event_pb2, settings_pb2
from weft.sql.connections import Row, Tx

T = TypeVar("T")


class _Published(Protocol):
    @property
    def runner(self) -> str: ...


P = TypeVar("P", bound=_Published)

_PULSE = """
    UPDATE runners SET standing = :standing, last_heartbeat_at = :last_heartbeat_at, inactive_since = :inactive_since
    WHERE name = :runner
"""
_READ: Mapping[str, str] = {
    "runners": "SELECT r.*, s.request_id, s.ticket_key FROM runners r JOIN sessions s ON s.id = r.session_id",
    "events": "SELECT event FROM events ORDER BY sequence",
    **{
        table: f"SELECT * FROM {table}"  # noqa: S608 - our tables
        for table in (
            *("models", "agents", "declared_models", "declared_agents", "declared_routes", "declared_aliases"),
            *("declared_profiles", "declared_workflows", "declared_tenants", "mesh_settings", "join_tokens"),
        )
    },
}


class SqlStore(RegistryDatabase):
    """Store of sessions with their rows, declarations, settings and join tokens. One owner at a time.

    Every write is one transaction that is on disk when the call returns. All methods raise SERVICE_UNAVAILABLE when the
    database fails; then nothing was written.
    """

    async def load(self) -> StoredMesh:
        """Everything there is; sessions ordered by runner, their publications and agents by name."""
        found = await self.read(lambda tx: {table: tx.rows(statement) for table, statement in _READ.items()})
        publications = _by_runner(_values(found["models"], publication_of))
        published_agents = _by_runner(_values(found["agents"], agent_publication_of))
        return StoredMesh(
            sessions=tuple(
                stored_session_of(row, publications.get(row.name, ()), published_agents.get(row.name, ()))
                for row in _in_order(found["runners"], "name")
            ),
            models=_values(found["declared_models"], declared_model_of),
            agents=_values(found["declared_agents"], declared_agent_of),
            routes=_values(found["declared_routes"], declared_route_of),
            aliases=_values(found["declared_aliases"], declared_alias_of),
            profiles=_values(found["declared_profiles"], declared_profile_of),
            workflows=_values(found["declared_workflows"], declared_workflow_of),
            tenants=_values(found["declared_tenants"], declared_tenant_of),
            settings=next(map(settings_of, found["mesh_settings"]), None),
            join_tokens=_values(found["join_tokens"], join_token_of, order_by="id"),
            events=tuple(event_pb2.Event.FromString(row.event) for row in found["events"]),
        )

    async def save_session(self, stored: StoredSession, *, evicted: Sequence[str] = ()) -> None:
        """Replace all rows of a session, and the publications of the models and agents it names.

        Its earlier rows are deleted, its models and agents are withdrawn from other publishers, and the sessions
        `evicted` (by id) end, as does any other that holds its runner's name. Declarations are untouched.
        """
        models, agents = list(map(model_row, stored.publications)), list(map(agent_row, stored.agents))

        def work(tx: Tx) -> None:
            # Runners go with their sessions, and models and agents with their runners.
            tx.delete("sessions", "id", [stored.session.id, *evicted])
            # The caller does not know of a session whose COMMIT is on disk although its acknowledgement was lost.
            tx.execute(
                "DELETE FROM sessions WHERE id IN (SELECT session_id FROM runners WHERE name = :runner)",
                runner=stored.profile.name,
            )
            tx.insert("sessions", session_row(stored.session))
            tx.insert("runners", runner_row(stored))
            tx.replace("models", "name", *models)
            tx.replace("agents", "name", *agents)

        await self.run(work)

    async def save_pulses(self, pulses: Sequence[StoredPulse]) -> None:
        """Update the liveness of these runners; unknown names are ignored."""
        if pulses:
            rows = [{"runner": pulse.runner, **pulse_row(pulse)} for pulse in pulses]
            await self.run(lambda tx: tx.many(_PULSE, rows))

    async def delete_sessions(self, session_ids: Sequence[str]) -> None:
        """Delete these sessions with their runners, agents and models; unknown ids are ignored."""
        await self.run(lambda tx: tx.delete("sessions", "id", session_ids))

    async def save_declarations(self, declared: DeclaredRecords, gone: DeclaredNames = NO_NAMES) -> None:
        """Put these declarations in place of earlier ones of their names, and delete `gone`; all of it, or nothing."""
        deleted = {"declared_agents": gone.agents, "declared_routes": gone.routes, "declared_aliases": gone.aliases}
        saved = {
            "declared_models": list(map(declared_model_row, declared.models)),
            "declared_agents": list(map(declared_agent_row, declared.agents)),
            "declared_routes": list(map(declared_route_row, declared.routes)),
            "declared_aliases": list(map(manifest_row, declared.aliases)),
            "declared_profiles": list(map(declared_profile_row, declared.profiles)),
            "declared_workflows": list(map(manifest_row, declared.workflows)),
            "declared_tenants": list(map(manifest_row, declared.tenants)),
        }

        def work(tx: Tx) -> None:
            _delete_names(tx, deleted)
            for table, rows in saved.items():
                tx.replace(table, "name", *rows)

        await self.run(work)

    async def delete_names(
        self,
        models: Sequence[str],
        agents: Sequence[str],
        routes: Sequence[str] = (),
        aliases: Sequence[str] = (),
        profiles: Sequence[str] = (),
        workflows: Sequence[str] = (),
        tenants: Sequence[str] = (),
    ) -> None:
        """Delete models and agents of these names, declared and published, and what else operators declared.

        Unknown names are ignored.
        """
        names = {
            "agents": agents,
            "declared_agents": agents,
            "models": models,
            "declared_models": models,
            "declared_routes": routes,
            "declared_aliases": aliases,
            "declared_profiles": profiles,
            "declared_workflows": workflows,
            "declared_tenants": tenants,
        }
        await self.run(lambda tx: _delete_names(tx, names))

    async def save_settings(self, settings: settings_pb2.MeshSettings) -> None:
        """Keep the mesh's settings in place of earlier ones."""
        row = settings_row(settings)
        await self.run(lambda tx: tx.replace("mesh_settings", "id", row))

    async def save_join_token(self, token: JoinToken) -> None:
        """Keep a token; one of the same id is replaced."""
        await self.run(lambda tx: tx.replace("join_tokens", "id", join_token_row(token)))

    async def delete_join_token(self, token_id: str) -> None:
        """Delete a token; an unknown id is ignored."""
        await self.run(lambda tx: tx.delete("join_tokens", "id", [token_id]))

    async def save_events(self, new: Sequence[event_pb2.Event], oldest: int) -> None:
        """Keep new events, at least one, with rising numbers; delete those with a number below `oldest`."""
        rows = [{"sequence": event.sequence, "event": event.SerializeToString()} for event in new]

        def work(tx: Tx) -> None:
            # A write whose acknowledgement was lost is written again.
            tx.execute(
                "DELETE FROM events WHERE sequence < :oldest OR sequence >= :first",
                oldest=oldest,
                first=rows[0]["sequence"],
            )
            tx.insert("events", *rows)

        await self.run(work)


def _values(rows: Sequence[Row], value_of: Callable[[Row], T], *, order_by: str = "name") -> tuple[T, ...]:
    return tuple(map(value_of, _in_order(rows, order_by)))


def _in_order(rows: Sequence[Row], column: str) -> list[Row]:
    # Not ORDER BY: PostgreSQL sorts by the locale of the database, where "b" comes before "C".
    return sorted(rows, key=lambda row: str(getattr(row, column)))


def _by_runner(published: Sequence[P]) -> dict[str, list[P]]:
    grouped: dict[str, list[P]] = defaultdict(list)
    for each in published:
        grouped[each.runner].append(each)
    return grouped


def _delete_names(tx: Tx, names: Mapping[str, Sequence[str]]) -> None:
    for table, some in names.items():
        tx.delete(table, "name", some)
