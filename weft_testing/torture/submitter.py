"""A submitter: `python -m weft_testing.torture.submitter`. It is killed at any moment, and its next life goes on.

Its file is all that it knows: it writes what it is about to do, does it, and writes what it was told. A submission that
was begun and not acknowledged is sent again with the same key, and must then be the same task.
"""

import argparse
import asyncio
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import uvloop
from grpc import StatusCode
from grpc.aio import AioRpcError

from weft.api.router.v1 import task_service_pb2
from weft.kernel.rpc import open_channel
from weft_testing.torture.history import Event, EventFile, Kind, read_events
from weft_testing.torture.plan import Submission, submission
from weft_testing.torture.task_client import CALL_SECONDS, request_of, task_stub, until_answered, until_known

if TYPE_CHECKING:
    from weft.api.router.v1.task_service_pb2_grpc import TaskServiceAsyncStub

AT_ONCE = 16
"""Submissions under way."""
MAX_KNOWN = 256
"""Tasks that it looks at again and again."""
LOOK_SECONDS = 0.05
"""Pause between two looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What it is told by the command line."""

    seed: int
    name: str
    address: str
    file: Path
    count: int
    """Submissions in all of its lives together."""
    per_second: float


class Submitter:
    """Sends what the plan says, and looks at what became of it."""

    def __init__(self, orders: Orders, stub: "TaskServiceAsyncStub", file: EventFile, past: Sequence[Event]) -> None:
        self._orders = orders
        self._stub = stub
        self._file = file
        self._acked = {event.key: event.task for event in past if event.kind is Kind.ACKED}
        self._cancelled = {event.task for event in past if event.kind is Kind.CANCEL_ACKED}
        self._known = deque(self._acked.values(), maxlen=MAX_KNOWN)

    async def run(self) -> None:
        """Until everything is acknowledged."""
        looking = asyncio.create_task(self._look())
        numbers = iter(range(self._orders.count))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE, self._orders.count)):
                    group.create_task(self._work(numbers))
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking

    async def _work(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._handle(submission(self._orders.seed, self._orders.name, number))

    async def _handle(self, planned: Submission) -> None:
        """One submission with all that belongs to it; what an earlier life has done is not done again."""
        task = self._acked.get(planned.key)
        if task is None:
            await asyncio.sleep(AT_ONCE / self._orders.per_second)
            task = await self._send(planned)
            if planned.is_sent_twice:
                await self._send(planned)
            if planned.is_contradicted:
                await self._contradict(planned)
        if planned.cancel_after_seconds is not None and task not in self._cancelled:
            await asyncio.sleep(planned.cancel_after_seconds)
            await self._cancel(task)

    async def _send(self, planned: Submission) -> str:
        """Until it is acknowledged; the id."""
        self._file.write(Kind.INTENT, key=planned.key, tokens=planned.tokens)
        told = await until_answered(lambda: self._stub.SubmitTask(request_of(planned), timeout=CALL_SECONDS))
        task = told.answer.task
        self._file.write(
            Kind.ACKED,
            asked_at=told.asked_at,
            key=planned.key,
            task=task.id,
            state=task.state,
            tokens=planned.tokens,
        )
        self._known.append(task.id)
        return task.id

    async def _contradict(self, planned: Submission) -> None:
        """The same key with another body: it must be refused, and change nothing."""
        request = request_of(planned, more_tokens=1)
        try:
            await until_known(lambda: self._stub.SubmitTask(request, timeout=CALL_SECONDS))
        except AioRpcError as error:
            if error.code() is not StatusCode.ALREADY_EXISTS:
                raise
            self._file.write(Kind.REFUSED, key=planned.key)
        else:
            self._file.write(Kind.CONTRADICTED, key=planned.key)

    async def _cancel(self, task: str) -> None:
        self._file.write(Kind.CANCEL_INTENT, task=task)
        request = task_service_pb2.CancelTaskRequest(id=task)
        try:
            told = await until_answered(lambda: self._stub.CancelTask(request, timeout=CALL_SECONDS))
        except AioRpcError as error:
            self._missed(task, error)
        else:
            self._file.write(Kind.CANCEL_ACKED, asked_at=told.asked_at, task=task, state=told.answer.task.state)

    async def _look(self) -> None:
        """See that what was acknowledged is there, and that what is over stays as it is."""
        random = Random(f"{self._orders.seed}/{self._orders.name}/looks")  # noqa: S311 - no secret
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._known:
                await self._look_at(random.choice(self._known))

    async def _look_at(self, task: str) -> None:
        request = task_service_pb2.GetTaskRequest(id=task)
        try:
            told = await until_answered(lambda: self._stub.GetTask(request, timeout=CALL_SECONDS))
        except AioRpcError as error:
            self._missed(task, error)
        else:
            seen = told.answer.task
            self._file.write(
                Kind.SEEN,
                asked_at=told.asked_at,
                task=task,
                state=seen.state,
                attempt=seen.attempt,
                owner=seen.owner,
            )

    def _missed(self, task: str, error: AioRpcError) -> None:
        """Raises the error unless it says that there is no such task."""
        if error.code() is not StatusCode.NOT_FOUND:
            raise error
        self._file.write(Kind.MISSED, task=task)


async def submit(orders: Orders) -> None:
    """One life of a submitter. Raises AioRpcError for a refusal that it did not ask for."""
    file = EventFile(orders.file, orders.name)
    past = list(read_events(orders.file))
    async with open_channel(orders.address) as channel:
        await Submitter(orders, task_stub(channel), file, past).run()
    file.close()


def command_line(orders: Orders) -> list[str]:
    """What starts one, without the interpreter."""
    return [
        *("-m", "weft_testing.torture.submitter"),
        *("--seed", str(orders.seed)),
        *("--name", orders.name),
        *("--address", orders.address),
        *("--file", str(orders.file)),
        *("--count", str(orders.count)),
        *("--per-second", str(orders.per_second)),
    ]


def main(arguments: Sequence[str]) -> None:
    """The program."""
    parser = argparse.ArgumentParser(prog="weft_testing.torture.submitter", allow_abbrev=False)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--per-second", type=float, required=True)
    uvloop.run(submit(Orders(**vars(parser.parse_args(arguments)))))


if __name__ == "__main__":
    main(sys.argv[1:])
