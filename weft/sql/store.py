"""A service's database: transactions run as plain functions in one thread with one connection.

    store = Store(url, "router", schema=SCHEMA)           # sqlite:///file, postgresql://…, or a Path
    await store.open()                                    # migrates; raises one sentence for a terminal
    name = await store.read(lambda tx: tx.value("SELECT name FROM tasks WHERE id = :id", id=task))
    changed = await store.run(work)                       # on disk when it returns
    await store.close()

`work(tx)` is synchronous and uses `tx.execute`, `tx.many`, `tx.rows`, `tx.row` and `tx.value` (see `Tx`); the same
statements work on both databases (see `weft.sql.statements`). It runs in the store's thread, so it must not use the
service's state: pass values in, return values out. Waiting transactions are committed together, because a durable
commit costs the same for one as for many. If a function raises, all of them run again, each in a savepoint, and only
its changes are rolled back; so a function may run twice. The changes of a caller that is cancelled before the commit
are rolled back, too.

If the connection breaks during a commit, its callers wait until the database tells whether it took place; meanwhile
all other transactions fail. So what callers remember agrees with the database.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from weft.api.operations.v1.process_service_pb2 import DatabaseSchema
from weft.kernel.errors.error_tree import WeftError, invalid_field, missing_package
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.sql import connections
from weft.sql.address import DatabaseAddress, address_of
from weft.sql.connections import (
    Connection,
    DatabaseError,
    SqliteConnection,
    Tx,
    location_of,
    problem_of,
    sentence_of,
)
from weft.sql.migrations import Schema, bring_up_to_date, schema_in
from weft.sql.owners import OwnerRole, TakenOverError

log = get_logger("weft.sql")

MAX_GROUP = 256
"""Maximum number of transactions committed together."""
MAX_WAITING = 4096
MAX_WAITING_ORDINARY = MAX_WAITING * 3 // 4
"""Limit for transactions caused by clients, so that heartbeats and lease renewals always have room."""
CLOSE_WAIT_SECONDS = 6.0
"""Maximum wait of `close` for work in progress; a statement may wait BUSY_TIMEOUT_MS for SQLite's lock."""
RETRY_AFTER_SECONDS = 1.0
DOUBT_RETRY_SECONDS = 0.5
"""Interval of the attempts to learn whether a commit took place."""

T = TypeVar("T")
Work = Callable[[Tx], T]


class CommitCounter(Protocol):
    """Counts the commits of a store both in the database and outside. Called in the store's thread."""

    def require_queue_room(self) -> None:
        """Raises if writes are not allowed. Called before each group of writes."""
        ...

    def count(self, tx: Tx) -> None:
        """Counts a transaction that has changed rows, within it."""
        ...

    def keep(self) -> None:
        """Stores the count after a commit, before it is acknowledged. Raises to fail its callers."""
        ...


class Store:
    """See the module. Raises INVALID_ARGUMENT for an unsupported URL, or if its driver is not installed."""

    def __init__(
        self,
        database: str | Path | DatabaseAddress,
        service: str,
        *,
        schema: Schema | None = None,
        role: OwnerRole | None = None,
        address: str = "",
        application: str = "",
        counter: CommitCounter | None = None,
    ) -> None:
        """`service` is the owner's name in messages. Without a `schema`, no table is created, migrated or marked.

        `role` is taken by `open` and released by `close`; `address` is where its owner serves. `application` is the
        PostgreSQL application name of a store without a role.
        """
        self.address = database if isinstance(database, DatabaseAddress) else address_of(database)
        self._service = service
        self._schema = schema
        self._role = role
        self._counter = counter
        self._connection = _connection_to(self.address, application or f"weft-{service}", role, address)
        self._tx = Tx(self._connection)
        self._turn = threading.Condition()
        """Guards the queues and `_is_open`."""
        self._reads: deque[_Job] = deque()
        self._writes: deque[_Job] = deque()
        self._is_open = False
        self.is_in_doubt = False
        """Whether it is unknown if the last commit took place: its callers wait, and no other transaction runs."""
        self._locked_since: float | None = None
        """When writes began to wait for another program, on the monotonic clock."""
        self._loop: asyncio.AbstractEventLoop
        """That of `connect`."""
        self._ended: asyncio.Future[None] | None = None
        """Done once the thread has ended; None: no thread."""

    async def open(self, first: Work[None] | None = None) -> None:
        """Connects, takes the role, migrates, and runs `first` in the same transaction.

        Raises ALREADY_EXISTS if another process has the role, and SERVICE_UNAVAILABLE with a sentence for a terminal.
        """
        try:
            await self.connect(first)
        except (DatabaseError, OSError) as error:
            code = error.code if isinstance(error, DatabaseError) else str(error.errno)
            log.error(  # noqa: TRY400 - a traceback shows local variables
                "the database cannot be opened",
                owner=self._service,
                url=self.address.shown,
                kind=type(error).__name__,
                code=code,
            )
            raise WeftError(Reason.SERVICE_UNAVAILABLE, sentence_of(self._service, self.address, error)) from None
        except WeftError as error:
            location = location_of(self._service, self.address)
            raise WeftError(error.reason, f"{location}: {error.message}", metadata=error.metadata) from error

    async def connect(self, first: Work[None] | None = None) -> None:
        """As `open`, but raises DatabaseError or OSError if the database cannot be used."""
        loop = self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        self._ended = loop.create_future()
        self._is_open = True
        threading.Thread(
            target=self._serve, args=(loop, opened, self._ended, first), name=f"{self._service}-store", daemon=True
        ).start()
        try:
            await asyncio.shield(opened)
        except BaseException:
            await self._end()
            raise

    async def close(self) -> None:
        """Finishes waiting transactions within CLOSE_WAIT_SECONDS, and releases the role. Safe to call twice."""
        await self._end()

    async def _end(self) -> None:
        with self._turn:
            self._is_open = False
            self._turn.notify()
        if self._ended is None:
            return
        ended = self._ended
        done, _ = await asyncio.wait([ended], timeout=CLOSE_WAIT_SECONDS)
        if not done:
            _deliver(self._refused())
            self._connection.interrupt()
            await asyncio.wait([ended], timeout=CLOSE_WAIT_SECONDS)
        self._ended = None

    async def run(self, work: Work[T], *, vital: bool = False) -> T:
        """Runs a transaction that may write; it is on disk when this returns.

        Raises what `work` raises, and SERVICE_UNAVAILABLE if the database fails or too many transactions wait. `vital`
        transactions have a higher limit.
        """
        try:
            return await self._queued(self._writes, work, MAX_WAITING if vital else MAX_WAITING_ORDINARY)
        except DatabaseError as error:
            raise self._failed(error) from None

    async def read(self, work: Work[T]) -> T:
        """Runs a read-only transaction. Raises as `run`."""
        try:
            return await self._queued(self._reads, work, MAX_WAITING)
        except DatabaseError as error:
            raise self._failed(error) from None

    async def attempt(self, work: Work[T], *, writes: bool = True) -> T:
        """Runs a transaction alone and before waiting ones. Raises DatabaseError if the database fails."""
        return await self._queued(self._writes if writes else self._reads, work, MAX_WAITING, alone=True)

    @property
    def owner(self) -> str | None:
        """The id with which this process has the role on PostgreSQL; None: it does not have it."""
        return self._connection.owner

    @property
    def may_have_standby(self) -> bool:
        """Whether a standby may watch this process's heartbeat."""
        return self._role is not None and not self.address.is_sqlite

    async def beat(self) -> bool:
        """Writes the owner's heartbeat. Returns whether a standby is connected.

        Raises TakenOverError if another process now owns the database, and SERVICE_UNAVAILABLE, without a log entry, if
        the database fails.
        """
        try:
            return await self.attempt(self._connection.beat)
        except DatabaseError as error:
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE, f"the {self._service}'s database does not answer ({error.code})"
            ) from None

    async def write_failure(self) -> str:
        """Writes without changing anything. Returns the database's error code; empty if it succeeds."""
        if not self._is_open:
            return "not open"
        try:
            await self.attempt(_write_nothing)
        except DatabaseError as error:
            return error.code
        return ""

    @property
    def known_schema(self) -> DatabaseSchema:
        """The schema revision of this release."""
        assert self._schema is not None, "it has tables"
        return DatabaseSchema(service=self._schema.owner, known_revision=self._schema.newest)

    async def schema(self) -> DatabaseSchema:
        """Returns the schema revisions of this release and the database; the latter is empty if it does not answer."""
        schema = self._schema
        assert schema is not None, "it has tables"
        try:
            return await self.attempt(lambda tx: schema_in(tx, schema), writes=False)
        except (DatabaseError, WeftError):
            return self.known_schema

    async def _queued(self, queue: "deque[_Job]", work: Work[T], most: int, *, alone: bool = False) -> T:
        job = _Job(work, asyncio.get_running_loop().create_future(), alone)
        with self._turn:
            if not self._is_open:
                raise self._closed()
            if len(queue) >= most:
                raise WeftError(
                    Reason.SERVICE_UNAVAILABLE,
                    f"too many writes wait for the {self._service}'s database",
                    retry_after_seconds=RETRY_AFTER_SECONDS,
                )
            if alone:
                queue.appendleft(job)
            else:
                queue.append(job)
            self._turn.notify()
        result: T = await job.outcome
        return result

    def _serve(
        self,
        loop: asyncio.AbstractEventLoop,
        opened: asyncio.Future[None],
        ended: asyncio.Future[None],
        first: Work[None] | None,
    ) -> None:
        """The thread: opens, runs transactions until the store is closed and none wait, and disconnects."""
        failure: Exception | None = None
        try:
            self._begin(first)
        except Exception as error:  # noqa: BLE001 - `open` raises it
            failure = error
        _settle(loop, [(opened, None, failure)])
        try:
            while failure is None and (groups := self._next_groups()):
                for jobs, is_write in groups:
                    _settle(loop, self._settled(jobs, is_write=is_write))
        finally:
            self._connection.close()
            _settle(loop, [*self._refused(), (ended, None, None)])

    def _begin(self, first: Work[None] | None) -> None:
        connection = self._connection
        connection.open()
        # A read transaction, so that a running backup does not block a start without migrations.
        connection.begin(writes=connection.dialect != "sqlite")
        try:
            if self._schema is not None:
                bring_up_to_date(self._tx, self._schema)
            if first is not None:
                first(self._tx)
            if self._schema is not None:
                connection.mark_owner(self._tx)
            connection.commit()
        except BaseException:
            self._roll_back()
            raise

    def _next_groups(self) -> "Sequence[tuple[list[_Job], bool]]":
        """Waits for jobs. Returns groups of reads and writes, with whether they write; empty: the store is closed."""
        with self._turn:
            while not self._reads and not self._writes:
                if not self._is_open:
                    return ()
                self._turn.wait()
            queues = [queue for queue in (self._reads, self._writes) if queue]
            return [(_taken(queue), queue is self._writes) for queue in queues]

    def _settled(self, taken: "list[_Job]", *, is_write: bool) -> "Sequence[_Settled]":
        """Runs a group in one transaction. Returns the outcome for each caller."""
        jobs = [job for job in taken if not job.outcome.cancelled()]
        has_begun = False
        try:
            if is_write and self._counter is not None:
                self._counter.require_queue_room()
            if jobs:
                self._connection.begin(writes=is_write)
                has_begun = True
            if is_write:
                self._locked_since = None
            return self._transacted(jobs) if jobs else ()
        except Exception as error:  # noqa: BLE001 - the callers get it
            self._roll_back()
            if not has_begun and isinstance(error, DatabaseError):
                with self._turn:
                    if self._tries_again(error):
                        self._writes.extendleft(reversed(jobs))
                        return ()
                # Jobs that came meanwhile would only wait for the same error.
                jobs += self._emptied(self._writes if is_write else self._reads)
            return [(job.outcome, None, error) for job in jobs]

    def _emptied(self, queue: "deque[_Job]") -> "list[_Job]":
        with self._turn:
            jobs = list(queue)
            queue.clear()
        return jobs

    def _tries_again(self, error: DatabaseError) -> bool:
        """Whether to retry writes that could not begin because another program has SQLite's lock."""
        if error.code != "SQLITE_BUSY":
            return False
        now = time.monotonic()
        self._locked_since = now if self._locked_since is None else self._locked_since
        if now - self._locked_since < connections.BUSY_TIMEOUT_MS / 1000:
            return True
        self._locked_since = None
        return False

    def _transacted(self, jobs: "Sequence[_Job]") -> "Sequence[_Settled]":
        before = self._connection.changes
        first = jobs[0]
        settled = self._ran(jobs) if len(jobs) > 1 else [(first.outcome, first.done(self._tx), None)]
        counter = self._counter if self._connection.changes != before else None
        if counter is not None:
            counter.count(self._tx)
        try:
            self._connection.commit()
        except DatabaseError as error:
            if not self._connection.is_in_doubt:
                raise
            return self._after_doubt(settled, error)
        if counter is not None:
            counter.keep()
        return settled

    def _after_doubt(self, settled: "Sequence[_Settled]", error: DatabaseError) -> "Sequence[_Settled]":
        """Waits until the database tells whether a commit took place. Returns the outcome for each caller."""
        log.warning("a commit broke off; asking the database for its outcome", owner=self._service, error=str(error))
        self.is_in_doubt = True
        try:
            while (took_place := self._answer_to_doubt()) is None:
                if not self._is_open:
                    raise WeftError(
                        Reason.SERVICE_UNAVAILABLE,
                        f"the {self._service} ends before its database told whether this was stored",
                    )
        finally:
            self.is_in_doubt = False
        log.warning("the outcome of the commit is known", owner=self._service, stored=took_place)
        if took_place:
            return settled
        raise error

    def _answer_to_doubt(self) -> bool | None:
        """Returns whether the commit in doubt took place; None after a failed attempt and a pause."""
        try:
            return self._connection.settle()
        except TakenOverError:
            raise
        except (DatabaseError, WeftError) as failure:
            refused = [*self._emptied(self._reads), *self._emptied(self._writes)]
            _settle(self._loop, [(job.outcome, None, failure) for job in refused])
        with self._turn:
            self._turn.wait_for(lambda: not self._is_open, DOUBT_RETRY_SECONDS)
        return None

    def _ran(self, jobs: "Sequence[_Job]") -> "Sequence[_Settled]":
        """Runs transactions in one savepoint; if one fails, in one each. Raises if none of them can be committed."""
        connection = self._connection
        connection.execute("SAVEPOINT members")
        try:
            settled: Sequence[_Settled] = [(job.outcome, job.done(self._tx), None) for job in jobs]
        except Exception as error:
            if not connection.is_in_transaction:
                raise
            connection.execute("ROLLBACK TO SAVEPOINT members")
            if len(jobs) == 1:
                settled = [(jobs[0].outcome, None, error)]
            else:
                settled = [each for job in jobs for each in self._ran([job])]
        connection.execute("RELEASE SAVEPOINT members")
        return settled

    def _refused(self) -> "list[_Settled]":
        """Closes the queues. Returns errors for the jobs in them."""
        with self._turn:
            self._is_open = False
            left = [*self._reads, *self._writes]
            self._reads.clear()
            self._writes.clear()
        return [(job.outcome, None, self._closed()) for job in left]

    def _roll_back(self) -> None:
        try:
            self._connection.rollback()
        except DatabaseError as error:
            log.warning("a transaction was not rolled back", error=str(error))

    def _failed(self, error: DatabaseError) -> WeftError:
        # Not chained, and not `log.exception`: tracebacks show local variables, which may be secrets.
        log.error("database failed", owner=self._service, code=error.code, error=str(error))
        return WeftError(
            Reason.SERVICE_UNAVAILABLE,
            f"the {self._service}'s database failed: it {problem_of(error)}",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )

    def _closed(self) -> WeftError:
        return WeftError(Reason.SERVICE_UNAVAILABLE, f"the {self._service}'s database is not open")


@dataclass(frozen=True, slots=True)
class _Job:
    work: Work[Any]
    outcome: asyncio.Future[Any]
    alone: bool

    def done(self, tx: Tx) -> Any:
        """Runs the transaction. Raises if its caller was cancelled meanwhile."""
        result = self.work(tx)
        if self.outcome.cancelled():
            raise _GivenUpError
        return result


class _GivenUpError(Exception):
    """The caller of a transaction was cancelled before the commit."""


_Settled = tuple[asyncio.Future[Any], Any, Exception | None]
"""A caller's future, and its result or error."""


def _taken(queue: deque[_Job]) -> list[_Job]:
    """Removes the first job of a queue, and those after it that may be committed together with it."""
    taken = [queue.popleft()]
    while queue and len(taken) < MAX_GROUP and not taken[0].alone and not queue[0].alone:
        taken.append(queue.popleft())
    return taken


def _settle(loop: asyncio.AbstractEventLoop, settled: Sequence[_Settled]) -> None:
    """Resolves the futures of callers in the event loop, unless the loop was closed."""
    try:
        loop.call_soon_threadsafe(_deliver, settled)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _deliver(settled: Sequence[_Settled]) -> None:
    for outcome, result, error in settled:
        if outcome.done():
            continue
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)


def _write_nothing(tx: Tx) -> None:
    """Makes the commit write to disk: SQLite its header, PostgreSQL a transaction id."""
    if tx.dialect == "sqlite":
        tx.execute(f"PRAGMA user_version = {int(tx.value('PRAGMA user_version'))}")
    else:
        tx.value("SELECT txid_current()")


def _connection_to(address: DatabaseAddress, application: str, role: OwnerRole | None, own_address: str) -> Connection:
    if address.is_sqlite:
        return SqliteConnection(address, role)
    try:
        from weft.sql.postgres import PostgresConnection  # noqa: PLC0415 - the driver is an optional package
    except ImportError as error:
        raise invalid_field("database_url", missing_package("PostgreSQL needs", "psycopg[binary]")) from error
    return PostgresConnection(address, role.owner_application if role else application, role, own_address)
