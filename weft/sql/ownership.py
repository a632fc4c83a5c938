"""Ownership of a database: heartbeats of the owner, and takeover by a standby."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

import grpc
from typing_extensions import override

from weft.kernel.access.rpc_auth import Context, RpcGuard
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.health import WELL, HealthCheck, HealthProbe, Observation, down
from weft.kernel.services.service_lifecycle import Service, start_critical, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.sql.owners import OwnerRole, TakenOverError
from weft.sql.standby import OwnerWatch
from weft.sql.store import Store

log = get_logger("weft.ownership")

MAX_BEAT_SECONDS = 1.0
BEATS_PER_SILENCE = 5
LEASE_SHARE = 0.8
"""Share of the standby's silence limit during which an owner answers calls after its last heartbeat. The rest is for
calls that begin just before that."""
RETRY_AFTER_SECONDS = 1.0
FILES_CHECK_SECONDS = 60.0
"""Interval between checks of a standby's files against the database."""


class OwnerHeartbeats:
    """Writes the owner's heartbeats, and tracks the time since the last one."""

    def __init__(
        self,
        database: Store,
        role: OwnerRole,
        clock: Clock,
        silence_seconds: float,
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        """`silence_seconds` is how long a standby tolerates silence.

        `on_return` is called when calls are answered again after they were rejected.
        """
        self._database = database
        self._role = role
        self._clock = clock
        self._interval_seconds = min(MAX_BEAT_SECONDS, silence_seconds / BEATS_PER_SILENCE)
        self._lease_seconds = LEASE_SHARE * silence_seconds
        self._on_return = on_return
        self._has_standby = False
        self._sees_standby = False
        self._is_lost = False
        self._beaten_at = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def is_current(self) -> bool:
        """Whether no other process can own the database yet.

        Without a standby none can, so an owner that has lost its database continues with what it knows.
        """
        if self._is_lost:
            return False
        return not self._has_standby or self._clock.monotonic() - self._beaten_at < self._lease_seconds

    @property
    def expired_lease(self) -> Observation | None:
        """The health of an owner that another process may have replaced; None while `is_current`."""
        if self.is_current:
            return None
        if self._is_lost:
            return down("not_owner", f"another {self._role.service} has taken over its database, and it ends")
        silent = self._clock.monotonic() - self._beaten_at
        return down(
            "not_owner",
            f"its database has taken no heartbeat for {silent:.0f} s, so that a standby may own it by now; it answers "
            "again once its database does",
        )

    @property
    def sees_standby(self) -> bool:
        """Whether a standby was connected at the last heartbeat."""
        return self._sees_standby

    async def until_current(self) -> None:
        """Waits until `is_current`; never returns if another process has taken over."""
        while not self.is_current:
            await self._clock.sleep(self._interval_seconds)

    async def start(self) -> None:
        """Starts heartbeats, once the database is owned. Does nothing if it cannot have standbys."""
        if self._database.may_have_standby:
            self._is_lost, self._beaten_at = False, self._clock.monotonic()
            self._task = start_critical(self._run(), name=f"{self._role.service}-owner")

    async def stop(self) -> None:
        """Stops heartbeats. Safe to call twice, or when never started."""
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        is_silent = False
        while True:
            # Taken before the statement: a standby counts from the time the database executes it.
            began, was_current = self._clock.monotonic(), self.is_current
            try:
                has_standby = await self._database.beat()
            except TakenOverError:
                self._is_lost = True
                # `from None` drops the driver's errors that led to it.
                raise self._role.taken_over() from None
            except WeftError as error:
                if not is_silent:
                    log.warning("the heartbeat of the owner was not written", error=error.message)
                is_silent = True
            else:
                self._note_written(began, has_standby=has_standby, was_current=was_current, was_silent=is_silent)
                is_silent = False
            await self._clock.sleep(self._interval_seconds)

    def _note_written(self, began: float, *, has_standby: bool, was_current: bool, was_silent: bool) -> None:
        if has_standby and not self._sees_standby:
            log.info("a standby waits for the end of this process")
        if self._sees_standby and not has_standby:
            log.warning("no standby waits for the end of this process any more")
        self._sees_standby = has_standby
        # A former standby may come back while this process cannot reach the database to see it.
        self._has_standby = self._has_standby or has_standby
        if was_silent or not was_current:
            log.warning("the heartbeat of the owner is written again", seconds=round(began - self._beaten_at, 1))
        self._beaten_at = began
        if not was_current:
            self._on_return()


class OwnedService(Service, Protocol):
    """A service that only the owner of the database runs."""

    @property
    def heartbeats(self) -> OwnerHeartbeats:
        """Its heartbeats."""
        ...

    def health_checks(self) -> Sequence[HealthCheck]:
        """Returns the checks of an owner."""
        ...

    async def require_files(self, database: Store) -> None:
        """Raises INVALID_ARGUMENT if files of this machine do not match the database."""
        ...


class StandbyPair(Service):
    """A service with several processes on one database: it starts as the owner, or waits as a standby."""

    def __init__(
        self,
        service: OwnedService,
        role: OwnerRole,
        watch: OwnerWatch | None,
        clock: Clock,
        *,
        names_owner: bool = True,
        also_guards: Sequence[str] = (),
    ) -> None:
        """`watch` is None for a database of one machine, where a second process fails to start.

        `names_owner`: whether callers may learn the owner's address, although a standby cannot check their keys.
        `also_guards` are services that also run in a standby, but only answer calls in an owner.
        """
        self._service = service
        self._role = role
        self._word = role.service
        self._watch = watch
        self._clock = clock
        self._names_owner = names_owner
        self.guarded: Sequence[str] = (*service.service_names, *also_guards)
        """Services that only answer calls in an owner."""
        self._waiting: list[asyncio.Task[None]] = []
        self._unfit = ""
        """Why this standby could not take over; empty: it could."""
        self._is_owner = False
        self._on_change: Callable[[], Awaitable[None]] | None = None

    @property
    @override
    def service_names(self) -> Sequence[str]:
        return self._service.service_names

    @override
    def register(self, server: grpc.aio.Server) -> None:
        self._service.register(server)

    @property
    def is_owner(self) -> bool:
        """Whether this process is the owner."""
        return self._is_owner

    def on_takeover(self, notice: Callable[[], Awaitable[None]]) -> None:
        """Calls `notice` when this standby has become the owner."""
        self._on_change = notice

    def on_owner(self, notice: Callable[[str], None]) -> None:
        """Calls `notice` with the owner's address whenever it changes while this process is a standby."""
        if self._watch is not None:
            self._watch.on_owner = notice

    @override
    async def start(self) -> None:
        """Starts as the owner, or as a standby. Raises ALREADY_EXISTS if a standby is not possible."""
        try:
            await self._service.start()
        except WeftError as error:
            if error.reason is not Reason.ALREADY_EXISTS or self._watch is None:
                raise
            await self._require_files(self._watch)
            log.info("another process owns the database: this one is its standby")
            works = {"standby": self._wait(self._watch), "standby-files": self._check(self._watch)}
            self._waiting = [start_critical(work, name=f"{self._word}-{name}") for name, work in works.items()]
        else:
            self._is_owner = True

    @override
    async def stop(self, grace_seconds: float) -> None:
        waiting, self._waiting = self._waiting, []
        await stop_tasks(each for each in waiting if not each.done())
        await self._service.stop(grace_seconds)

    def require_owner(self) -> None:
        """Raises the role's reason, such as REGISTRY_STANDBY, if another process may own the database.

        A standby's error has the owner's address if it is known; an owner's says why it does not answer.
        """
        if self._is_owner:
            if (expired_lease := self._service.heartbeats.expired_lease) is not None:
                raise WeftError(
                    self._role.standby_reason,
                    f"this {self._word} answers no calls: {expired_lease.message}; call the other {self._word}, as "
                    "clients with both addresses do",
                    retry_after_seconds=RETRY_AFTER_SECONDS,
                )
            return
        address = self._owner_address if self._names_owner else ""
        where = f" and serves at {address}" if address else ""
        raise WeftError(
            self._role.standby_reason,
            f"this {self._word} is a standby: another one owns the database{where}; {self._role.advice}",
            metadata={"address": address} if address else {},
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )

    def health_checks(self) -> Sequence[HealthCheck]:
        """Returns the check of ownership, and the owner's checks, which in a standby report that it is one."""
        owner = HealthCheck(name="owner", probe=self._probe, services=tuple(self.guarded), is_immediate=True)
        return (owner, *(replace(each, probe=self._owners(each.probe)) for each in self._service.health_checks()))

    def _owners(self, probe: HealthProbe) -> HealthProbe:
        return lambda: probe() if self._is_owner else self._probe()

    def _probe(self) -> Observation:
        if not self._is_owner and self._unfit:
            return down("standby_unfit", f"this standby cannot take over: {self._unfit}")
        if not self._is_owner:
            where = f" at {self._owner_address}" if self._owner_address else ""
            return down("standby", f"the {self._word}{where} owns the database; this one waits for its end")
        return self._service.heartbeats.expired_lease or WELL

    @property
    def _owner_address(self) -> str:
        return "" if self._watch is None else self._watch.owner_address

    async def _require_files(self, watch: OwnerWatch) -> None:
        try:
            async with watch.database() as database:
                await self._service.require_files(database)
        except WeftError as error:
            # An unreachable database, or one of another version, proves nothing about files.
            if error.reason is not Reason.SERVICE_UNAVAILABLE:
                raise WeftError(
                    error.reason,
                    f"this standby could not take over, copy the file from the owner's machine: {error.message}",
                    metadata=error.metadata,
                ) from None

    async def _check(self, watch: OwnerWatch) -> None:
        """Checks the files of keys and secrets periodically, since the first key may be newer than this standby."""
        while not self._is_owner:
            await self._clock.sleep(FILES_CHECK_SECONDS)
            try:
                await self._require_files(watch)
            except WeftError as error:
                if error.message != self._unfit:
                    log.error("this standby cannot take over", why=error.message)  # noqa: TRY400
                self._unfit = error.message
            else:
                self._unfit = ""

    async def _wait(self, watch: OwnerWatch) -> None:
        while not self._is_owner:
            await watch.until_free()
            try:
                await self._service.start()
            except WeftError as error:
                # Another standby was faster, the owner has reconnected, or the database is unreachable.
                if error.reason not in {Reason.ALREADY_EXISTS, Reason.SERVICE_UNAVAILABLE}:
                    raise
                log.info("the standby continues to wait", why=error.message)
                await self._clock.sleep(RETRY_AFTER_SECONDS)
            else:
                self._is_owner = True
        log.warning("this process has taken over the database", former=watch.owner_address)
        if self._on_change is not None:
            await self._on_change()


class OwnershipGuard(RpcGuard):
    """Rejects calls to a paired service while another process may own the database."""

    def __init__(self) -> None:
        super().__init__()
        self._paired: StandbyPair | None = None
        self._services: frozenset[str] = frozenset()

    def use(self, paired: StandbyPair) -> None:
        """Guards the services of `paired`; before this call, none."""
        self._paired, self._services = paired, frozenset(paired.guarded)

    @override
    def is_open(self, method: str) -> bool:
        return method.removeprefix("/").partition("/")[0] not in self._services

    @override
    def check(self, method: str, context: Context) -> None:
        if self._paired is not None:
            self._paired.require_owner()


INTERVAL_SECONDS = 60.0
"""Time between two writes that check a database while they succeed: each is synchronised to disk."""


def write_check(
    name: str, failure: Callable[[], Awaitable[str]], clock: Clock, *, services: tuple[str, ...]
) -> HealthCheck:
    """Returns the check of a database that gRPC `services` depend on.

    `failure` writes, and returns the database's error code or "". While it succeeds, it is called every
    INTERVAL_SECONDS.
    """
    good_until = clock.monotonic()

    async def write() -> Observation:
        nonlocal good_until
        code = await failure()
        if code:
            return down("store_not_writable", f"the database cannot be written ({code})")
        good_until = clock.monotonic() + INTERVAL_SECONDS
        return WELL

    def probe() -> Observation | Coroutine[Any, Any, Observation]:
        return WELL if clock.monotonic() < good_until else write()

    return HealthCheck(name=name, probe=probe, services=services)
