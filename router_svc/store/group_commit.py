"""Group commit: concurrent writes share one transaction, because a durable commit costs the same for one as for many.

No write waits for a timer. Writes gather while a transaction is in progress; an idle database takes a write at once.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.store.database import RouterDatabase
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.service import start_critical

MAX_WAITING_WRITES = 4096
"""Writes that may wait for a transaction."""
SHARED_PART = 0.75
"""The part of it for shared writes, which clients cause: leases can be renewed however many of them wait."""
RETRY_AFTER_SECONDS = 1.0

Item = TypeVar("Item")
Done = TypeVar("Done")
_Ops = Callable[[AsyncConnection, Sequence[Any]], Awaitable[Sequence[Any]]]


class GroupCommit:
    """A queue of writes with one worker. Life cycle: start, stop; the database is open in between.

    If a write of a shared transaction fails, every write of it is repeated alone, so a write must have no effect except
    through the connection. A caller that stops waiting does not know whether its write was done. If the commit itself
    fails, no caller knows: the connection may have broken after it.
    """

    def __init__(self, database: RouterDatabase, *, max_batch: int, max_waiting: int = MAX_WAITING_WRITES) -> None:
        self._database = database
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._waiting: deque[_Write] = deque()
        self._filled = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._is_stopping = False

    async def start(self) -> None:
        """Starts the worker."""
        self._is_stopping = False
        self._worker = start_critical(self._work(), name="group-commit")

    async def stop(self) -> None:
        """Refuses new writes and finishes the waiting ones. Safe to call twice."""
        self._is_stopping = True
        self._filled.set()
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker

    async def run(self, op: Callable[[AsyncConnection], Awaitable[Done]]) -> Done:
        """Runs one write; it is on disk when this returns.

        Raises what `op` raises, SERVICE_UNAVAILABLE when the database fails or too many wait already.
        """
        done: Done = await self._queued(_one_by_one, op, self._max_waiting)
        return done

    async def share(
        self, ops: Callable[[AsyncConnection, Sequence[Item]], Awaitable[Sequence[Done | WeftError]]], item: Item
    ) -> Done:
        """Runs one of many similar writes: `ops` gets all items of a transaction and returns the result of each.

        An error among the results is raised for its item alone; the others are committed. Raises as `run`.
        """
        done: Done = await self._queued(ops, item, max(1, int(self._max_waiting * SHARED_PART)))
        return done

    async def _queued(self, run: "_Ops", item: Any, most_waiting: int) -> Any:
        if self._worker is None or self._is_stopping:
            raise _closed()
        if len(self._waiting) >= most_waiting:
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE,
                "too many writes wait for the router's database",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        write = _Write(run=run, item=item)
        self._waiting.append(write)
        self._filled.set()
        return await write.outcome

    async def _work(self) -> None:
        try:
            while batch := await self._next_batch():
                await self._settle(batch)
        finally:
            # If this task is cancelled, the waiting callers must not hang.
            self._fail_waiting(_closed())

    async def _next_batch(self) -> "Sequence[_Write]":
        """Returns the next writes whose callers still wait; none: the worker stops."""
        batch: list[_Write] = []
        while not batch:
            if not self._waiting:
                if self._is_stopping:
                    return ()
                self._filled.clear()
                await self._filled.wait()
            while self._waiting and len(batch) < self._max_batch:
                write = self._waiting.popleft()
                if not write.outcome.done():
                    batch.append(write)
        return batch

    async def _settle(self, batch: "Sequence[_Write]") -> None:
        """Commits the writes; every caller gets a result or an error in any case."""
        try:
            failure = await self._try(batch)
            if failure is None:
                return
            if failure.may_be_one_writes_fault and not failure.is_down and len(batch) > 1:
                await self._settle_alone(batch)
            else:
                self._fail(batch, failure)
        finally:
            for write in batch:
                write.settle(_closed())

    async def _settle_alone(self, batch: "Sequence[_Write]") -> None:
        for place, write in enumerate(batch):
            failure = None if write.outcome.done() else await self._try([write])
            if failure is not None and failure.is_down:
                self._fail(batch[place:], failure)
                return
            if failure is not None:
                self._fail([write], failure)

    async def _try(self, batch: "Sequence[_Write]") -> "_Failure | None":
        """Runs one transaction. Nothing of it is on disk if the returned failure may be one write's fault."""
        failure = _Failure(_closed(), is_down=True)
        try:
            async with self._database.writing() as connection:
                failure.is_down, failure.may_be_one_writes_fault = False, True
                outcomes = await _outcomes(connection, batch)
                failure.may_be_one_writes_fault = False
        except Exception as error:  # noqa: BLE001 - it is raised for the callers
            failure.error = error
            # The next write would wait as long.
            failure.is_down |= isinstance(error.__cause__, TimeoutError)
            return failure
        for write, outcome in zip(batch, outcomes, strict=True):
            write.settle(outcome)
        return None

    def _fail(self, batch: "Sequence[_Write]", failure: "_Failure") -> None:
        for write in batch:
            write.settle(_copy_of(failure.error))
        if failure.is_down:
            # Writes that came meanwhile would wait as long for the same error.
            self._fail_waiting(failure.error)

    def _fail_waiting(self, error: Exception) -> None:
        while self._waiting:
            self._waiting.popleft().settle(_copy_of(error))


@dataclass(slots=True)
class _Failure:
    error: Exception
    is_down: bool = False
    """Whether no transaction could be begun."""
    may_be_one_writes_fault: bool = False


@dataclass(slots=True, kw_only=True)
class _Write:
    run: _Ops
    item: Any
    outcome: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def settle(self, outcome: Any) -> None:
        """Gives the caller its result, unless it stopped waiting or has one."""
        if self.outcome.done():
            return
        if isinstance(outcome, Exception):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)


def _closed() -> WeftError:
    return WeftError(Reason.SERVICE_UNAVAILABLE, "the router's database is not open")


def _copy_of(error: Exception) -> Exception:
    """Returns a copy for each caller, because a traceback grows with every raise."""
    if type(error) is not WeftError:
        return error
    copy = WeftError(
        error.reason, error.message, metadata=error.metadata, retry_after_seconds=error.retry_after_seconds
    )
    copy.__cause__ = error.__cause__
    return copy


async def _one_by_one(connection: AsyncConnection, ops: Sequence[Callable[[AsyncConnection], Awaitable[Any]]]) -> Any:
    return [await op(connection) for op in ops]


async def _outcomes(connection: AsyncConnection, batch: Sequence[_Write]) -> Sequence[Any]:
    """Returns the result of each write, in order."""
    groups: dict[_Ops, list[int]] = {}
    for place, write in enumerate(batch):
        groups.setdefault(write.run, []).append(place)
    outcomes: list[Any] = [None] * len(batch)
    for run, places in groups.items():
        done = await run(connection, [batch[place].item for place in places])
        for place, outcome in zip(places, done, strict=True):
            outcomes[place] = outcome
    return outcomes
