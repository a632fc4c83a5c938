"""The store on SQL: SQLite now, PostgreSQL when it is outgrown."""

import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import URL, Connection, Row, bindparam, delete, event, insert, make_url, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from registry_svc.domain import Manifest, Publication, RunnerProfile, Session, Standing
from registry_svc.store.lock import FileLock
from registry_svc.store.migrate import upgrade
from registry_svc.store.port import StoredPulse, StoredSession
from registry_svc.store.tables import models, runners, sessions
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

log = structlog.get_logger("weft.registry.store")

BUSY_TIMEOUT_MS = 5_000
# Databases limit the parameters of one statement; PostgreSQL's and SQLite's limits are above 32,000.
MAX_IDS_PER_STATEMENT = 1_000


class SqlStore:
    """See Store. On SQLite one registry owns the file, guarded by a lock file beside it."""

    def __init__(self, database_url: str) -> None:
        self._url = make_url(database_url)
        self._path = _sqlite_path(self._url)
        self._lock = None if self._path is None else FileLock(self._path.with_name(f"{self._path.name}.lock"))
        self._engine: AsyncEngine | None = None

    async def open(self) -> None:
        """See Store.open."""
        try:
            with self._explained():
                self._take_file()
                self._engine = create_async_engine(self._url, hide_parameters=True)
            if self._url.get_backend_name() == "sqlite":
                _tame_sqlite(self._engine)
            async with self._transaction() as connection:
                await connection.run_sync(upgrade)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """See Store.close."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.dispose()
        if self._lock is not None:
            self._lock.release()

    async def load(self) -> Sequence[StoredSession]:
        """See Store.load."""
        async with self._transaction() as connection:
            model_rows = await connection.execute(select(models).order_by(models.c.name))
            publications: dict[str, list[Publication]] = defaultdict(list)
            for row in model_rows:
                publications[row.runner].append(_publication(row))
            runner_rows = await connection.execute(
                select(runners, sessions.c.request_id, sessions.c.ticket_key).join(sessions).order_by(runners.c.name)
            )
            return [_stored_session(row, publications.get(row.name, [])) for row in runner_rows]

    async def save_session(self, stored: StoredSession, *, evicted: Sequence[str] = ()) -> None:
        """See Store.save_session."""
        # Deleting and inserting anew is upsert in the SQL that every database speaks.
        names = [publication.manifest.name for publication in stored.publications]
        async with self._transaction() as connection:
            for some in _chunks(names):
                await connection.execute(delete(models).where(models.c.name.in_(some)))
            await _delete_sessions(connection, [stored.session.id, *evicted])
            await connection.execute(insert(sessions), _session_row(stored.session))
            await connection.execute(insert(runners), _runner_row(stored))
            if stored.publications:
                await connection.execute(insert(models), [_model_row(model) for model in stored.publications])

    async def save_pulses(self, pulses: Sequence[StoredPulse]) -> None:
        """See Store.save_pulses."""
        if not pulses:
            return
        statement = update(runners).where(runners.c.name == bindparam("of_runner"))
        async with self._transaction() as connection:
            await connection.execute(statement, [{"of_runner": pulse.runner, **_pulse_row(pulse)} for pulse in pulses])

    async def delete_sessions(self, session_ids: Sequence[str]) -> None:
        """See Store.delete_sessions."""
        async with self._transaction() as connection:
            await _delete_sessions(connection, session_ids)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection]:
        if self._engine is None:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry's database is not open")
        with self._explained():
            async with self._engine.begin() as connection:
                yield connection

    def _take_file(self) -> None:
        if self._path is not None and self._lock is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            _make_private(self._path)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, OSError) as error:
            # Not `log.exception`: tracebacks show local variables, and among them would be ticket keys.
            log.error("database failed", database=str(self._url), error=str(error))  # noqa: TRY400
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE, "the registry's database failed; its log has details"
            ) from error


def _sqlite_path(url: URL) -> Path | None:
    """The file behind `url`; None for other databases and for SQLite in memory."""
    if url.get_backend_name() != "sqlite" or url.database in {None, "", ":memory:"}:
        return None
    name = str(url.database)
    if name.startswith("file:"):
        raise invalid_field("database_url", "SQLite's file: form is not supported, name the file by its path")
    return Path(name)


def _make_private(path: Path) -> None:
    """Create the file for its owner's eyes only: it holds ticket keys. SQLite's side files inherit its mode."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _tame_sqlite(engine: AsyncEngine) -> None:
    """Durable commits, readers beside the writer, foreign keys, and transactions that hold DDL too."""

    @event.listens_for(engine.sync_engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        # The driver's own BEGIN leaves DDL and SELECT outside of transactions; `begin` below does not.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            f"busy_timeout={BUSY_TIMEOUT_MS}",
            "foreign_keys=ON",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")


async def _delete_sessions(connection: AsyncConnection, session_ids: Sequence[str]) -> None:
    for some in _chunks(session_ids):
        await connection.execute(delete(sessions).where(sessions.c.id.in_(some)))


def _chunks(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (ids[start : start + MAX_IDS_PER_STATEMENT] for start in range(0, len(ids), MAX_IDS_PER_STATEMENT))


def _session_row(session: Session) -> dict[str, Any]:
    return {"id": session.id, "request_id": session.request_id, "ticket_key": session.ticket_key}


def _runner_row(stored: StoredSession) -> dict[str, Any]:
    profile = stored.profile
    return {
        "name": profile.name,
        "session_id": stored.session.id,
        "incarnation": profile.incarnation,
        "address": profile.address,
        "host": profile.host,
        "runtime": profile.runtime,
        "version": profile.version,
        **_pulse_row(stored.pulse),
    }


def _pulse_row(pulse: StoredPulse) -> dict[str, Any]:
    return {
        "standing": pulse.standing.value,
        "last_heartbeat_at": pulse.last_heartbeat_at,
        "inactive_since": pulse.inactive_since,
    }


def _model_row(publication: Publication) -> dict[str, Any]:
    manifest = publication.manifest
    return {
        "name": manifest.name,
        "runner": publication.runner,
        "pool_name": manifest.pool_name,
        "operations": ",".join(operation.name.lower() for operation in manifest.operations),
        "context_tokens": manifest.context_tokens,
        "digest": manifest.digest,
        "remote": manifest.remote,
        "created_at": publication.created_at,
    }


def _publication(row: Row[Any]) -> Publication:
    operations = tuple(Operation[name.upper()] for name in row.operations.split(",") if name)
    manifest = Manifest(
        name=row.name,
        pool_name=row.pool_name,
        operations=operations,
        context_tokens=row.context_tokens,
        digest=row.digest,
        remote=row.remote,
    )
    return Publication(manifest=manifest, runner=row.runner, created_at=row.created_at)


def _stored_session(row: Row[Any], publications: Sequence[Publication]) -> StoredSession:
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
        ),
        pulse=StoredPulse(
            runner=row.name,
            standing=Standing(row.standing),
            last_heartbeat_at=row.last_heartbeat_at,
            inactive_since=row.inactive_since,
        ),
        publications=tuple(publications),
    )
