"""The store of the mesh: its port, and its implementation on SQL."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from sqlalchemy import Row, Select, Table, bindparam, delete, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from registry_svc.mesh.domain import JoinToken
from registry_svc.mesh.rows import (
    NO_NAMES,
    SETTINGS_ID,
    DeclaredNames,
    DeclaredRecords,
    StoredMesh,
    StoredPulse,
    StoredSession,
    Values,
    agent_publication_of,
    agent_row,
    declared_agent_of,
    declared_agent_row,
    declared_alias_of,
    declared_alias_row,
    declared_model_of,
    declared_model_row,
    declared_profile_of,
    declared_profile_row,
    declared_route_of,
    declared_route_row,
    declared_tenant_of,
    declared_tenant_row,
    declared_workflow_of,
    declared_workflow_row,
    join_token_of,
    join_token_row,
    model_row,
    publication_of,
    pulse_row,
    runner_row,
    session_row,
    settings_of,
    settings_row,
    stored_session_of,
)
from registry_svc.store.database import RegistryDatabase, delete_rows
from registry_svc.store.schema import (
    agents,
    declared_agents,
    declared_aliases,
    declared_models,
    declared_profiles,
    declared_routes,
    declared_tenants,
    declared_workflows,
    events,
    join_tokens,
    mesh_settings,
    models,
    runners,
    sessions,
)
from weft.api.registry.v1 import event_pb2, settings_pb2
from weft.kernel.log import get_logger


class Store(Protocol):
    """Store of sessions with their rows, declarations, settings and join tokens. One owner at a time.

    Every write is one transaction that is on disk when the call returns. All methods raise SERVICE_UNAVAILABLE when the
    database fails; then nothing was written.
    """

    async def open(self) -> None:
        """Take ownership and bring the schema up to date; raises ALREADY_EXISTS when another registry owns it."""
        ...

    async def close(self) -> None:
        """Give it up. Safe to call twice, or when never opened."""
        ...

    async def load(self) -> StoredMesh:
        """Everything there is; sessions ordered by runner, their publications and agents by name."""
        ...

    async def save_session(self, stored: StoredSession, *, evicted: Sequence[str] = ()) -> None:
        """Replace all rows of a session, and the publications of the models and agents it names.

        Its earlier rows are deleted, its models and agents are withdrawn from other publishers, and the sessions
        `evicted` (by id) end, as does any other that holds its runner's name. Declarations are untouched.
        """
        ...

    async def save_pulses(self, pulses: Sequence[StoredPulse]) -> None:
        """Update the liveness of these runners; unknown names are ignored."""
        ...

    async def delete_sessions(self, session_ids: Sequence[str]) -> None:
        """Delete these sessions with their runners, agents and models; unknown ids are ignored."""
        ...

    async def save_declarations(self, declared: DeclaredRecords, gone: DeclaredNames = NO_NAMES) -> None:
        """Put these declarations in place of earlier ones of their names, and delete `gone`; all of it, or nothing."""
        ...

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
        ...

    async def save_settings(self, settings: settings_pb2.MeshSettings) -> None:
        """Keep the mesh's settings in place of earlier ones."""
        ...

    async def save_join_token(self, token: JoinToken) -> None:
        """Keep a token; one of the same id is replaced."""
        ...

    async def delete_join_token(self, token_id: str) -> None:
        """Delete a token; an unknown id is ignored."""
        ...

    async def save_events(self, new: Sequence[event_pb2.Event], oldest: int) -> None:
        """Keep new events, at least one, with rising numbers; delete those with a number below `oldest`."""
        ...


log = get_logger("weft.registry.store")

T = TypeVar("T")


class _Published(Protocol):
    @property
    def runner(self) -> str: ...


P = TypeVar("P", bound=_Published)


class SqlStore(RegistryDatabase, Store):
    """See Store. One registry owns the database: see sqlite.py and postgres.py for how.

    Raises INVALID_ARGUMENT when `database_url` is of no kind that is supported.
    """

    @override
    async def load(self) -> StoredMesh:
        async with self.transaction() as connection:
            publications = _by_runner(await _rows(connection, models, publication_of))
            published_agents = _by_runner(await _rows(connection, agents, agent_publication_of))
            found = await connection.execute(
                select(runners, sessions.c.request_id, sessions.c.ticket_key).join(sessions)
            )
            return StoredMesh(
                sessions=tuple(
                    stored_session_of(row, publications.get(row.name, ()), published_agents.get(row.name, ()))
                    for row in _in_order(found.all(), "name")
                ),
                models=tuple(await _rows(connection, declared_models, declared_model_of)),
                agents=tuple(await _rows(connection, declared_agents, declared_agent_of)),
                routes=tuple(await _rows(connection, declared_routes, declared_route_of)),
                aliases=tuple(await _rows(connection, declared_aliases, declared_alias_of)),
                profiles=tuple(await _rows(connection, declared_profiles, declared_profile_of)),
                workflows=tuple(await _rows(connection, declared_workflows, declared_workflow_of)),
                tenants=tuple(await _rows(connection, declared_tenants, declared_tenant_of)),
                settings=next(iter(await _rows(connection, mesh_settings, settings_of, order_by="id")), None),
                join_tokens=tuple(await _rows(connection, join_tokens, join_token_of, order_by="id")),
                events=tuple(
                    event_pb2.Event.FromString(row.event)
                    for row in await connection.execute(select(events).order_by(events.c.sequence))
                ),
            )

    @override
    async def save_session(self, stored: StoredSession, *, evicted: Sequence[str] = ()) -> None:
        # Delete and insert is an upsert in the SQL that every database supports.
        async with self.transaction() as connection:
            await delete_rows(connection, models.c.name, [each.manifest.name for each in stored.publications])
            await delete_rows(connection, agents.c.name, [each.manifest.name for each in stored.agents])
            await delete_rows(connection, sessions.c.id, [stored.session.id, *evicted])
            await connection.execute(delete(sessions).where(sessions.c.id.in_(_holding(stored.profile.name))))
            await _insert(connection, sessions, [session_row(stored.session)])
            await _insert(connection, runners, [runner_row(stored)])
            await _insert(connection, models, [model_row(each) for each in stored.publications])
            await _insert(connection, agents, [agent_row(each) for each in stored.agents])

    @override
    async def save_pulses(self, pulses: Sequence[StoredPulse]) -> None:
        if not pulses:
            return
        statement = update(runners).where(runners.c.name == bindparam("of_runner"))
        async with self.transaction() as connection:
            await connection.execute(statement, [{"of_runner": pulse.runner, **pulse_row(pulse)} for pulse in pulses])

    @override
    async def delete_sessions(self, session_ids: Sequence[str]) -> None:
        async with self.transaction() as connection:
            # Runners go with their sessions, and models and agents with their runners.
            await delete_rows(connection, sessions.c.id, session_ids)

    @override
    async def save_declarations(self, declared: DeclaredRecords, gone: DeclaredNames = NO_NAMES) -> None:
        async with self.transaction() as connection:
            await delete_rows(connection, declared_agents.c.name, gone.agents)
            await delete_rows(connection, declared_routes.c.name, gone.routes)
            await delete_rows(connection, declared_aliases.c.name, gone.aliases)
            for table, row, records in (
                (declared_models, declared_model_row, declared.models),
                (declared_agents, declared_agent_row, declared.agents),
                (declared_routes, declared_route_row, declared.routes),
                (declared_aliases, declared_alias_row, declared.aliases),
                (declared_profiles, declared_profile_row, declared.profiles),
                (declared_workflows, declared_workflow_row, declared.workflows),
                (declared_tenants, declared_tenant_row, declared.tenants),
            ):
                await _replace(connection, table, row, records)

    @override
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
        async with self.transaction() as connection:
            await _delete_names(connection, agent_names=agents, model_names=models)
            await delete_rows(connection, declared_routes.c.name, routes)
            await delete_rows(connection, declared_aliases.c.name, aliases)
            await delete_rows(connection, declared_profiles.c.name, profiles)
            await delete_rows(connection, declared_workflows.c.name, workflows)
            await delete_rows(connection, declared_tenants.c.name, tenants)

    @override
    async def save_settings(self, settings: settings_pb2.MeshSettings) -> None:
        async with self.transaction() as connection:
            await connection.execute(delete(mesh_settings).where(mesh_settings.c.id == SETTINGS_ID))
            await _insert(connection, mesh_settings, [settings_row(settings)])

    @override
    async def save_join_token(self, token: JoinToken) -> None:
        async with self.transaction() as connection:
            await delete_rows(connection, join_tokens.c.id, [token.id])
            await _insert(connection, join_tokens, [join_token_row(token)])

    @override
    async def delete_join_token(self, token_id: str) -> None:
        async with self.transaction() as connection:
            await delete_rows(connection, join_tokens.c.id, [token_id])

    @override
    async def save_events(self, new: Sequence[event_pb2.Event], oldest: int) -> None:
        number = events.c.sequence
        async with self.transaction() as connection:
            # A write whose acknowledgement was lost is written again.
            await connection.execute(delete(events).where(or_(number < oldest, number >= new[0].sequence)))
            rows = [{"sequence": event.sequence, "event": event.SerializeToString()} for event in new]
            await _insert(connection, events, rows)


async def _rows(
    connection: AsyncConnection, table: Table, value_of: Callable[[Row[Any]], T], *, order_by: str = "name"
) -> list[T]:
    found = await connection.execute(select(table))
    return [value_of(row) for row in _in_order(found.all(), order_by)]


def _in_order(rows: Sequence[Row[Any]], column: str) -> list[Row[Any]]:
    # Not ORDER BY: PostgreSQL sorts by the locale of the database, where "b" comes before "C".
    return sorted(rows, key=lambda row: str(getattr(row, column)))


def _by_runner(published: Sequence[P]) -> dict[str, list[P]]:
    grouped: dict[str, list[P]] = defaultdict(list)
    for each in published:
        grouped[each.runner].append(each)
    return grouped


def _holding(runner: str) -> Select[tuple[str]]:
    """The id of the session that holds a runner's name, which the caller does not know.

    A COMMIT whose acknowledgement was lost is reported as a failure although it is on disk.
    """
    return select(runners.c.session_id).where(runners.c.name == runner)


async def _insert(connection: AsyncConnection, table: Table, rows: list[Values]) -> None:
    if rows:
        await connection.execute(insert(table), rows)


async def _replace(
    connection: AsyncConnection, table: Table, row_of: Callable[[Any], Values], records: Sequence[Any]
) -> None:
    """Put the rows of records in place of earlier ones of their names."""
    await delete_rows(connection, table.c.name, [each.manifest.name for each in records])
    await _insert(connection, table, [row_of(each) for each in records])


async def _delete_names(connection: AsyncConnection, *, agent_names: Sequence[str], model_names: Sequence[str]) -> None:
    for table in (agents, declared_agents):
        await delete_rows(connection, table.c.name, agent_names)
    for table in (models, declared_models):
        await delete_rows(connection, table.c.name, model_names)
