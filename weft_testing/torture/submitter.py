"""A submitter process: `python -m weft_testing.torture.submitter`. Killed at any time, it resumes on restart.

Its state is its history file: it writes an intent, makes the call, and writes the answer. A submission without an
acknowledgement is sent again with the same key, and must then be the same task.
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

CONCURRENCY = 16
"""Submissions in progress."""
MAX_KNOWN = 256
"""Tasks that it polls."""
POLL_SECONDS = 0.05
"""Pause between two polls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitterOptions:
    """The command line options of a submitter."""

    seed: int
    name: str
    address: str
    file: Path
    count: int
    """Total number of submissions, over all restarts."""
    per_second: float


class Submitter:
    """Sends planned submissions, and polls their tasks."""

    def __init__(
        self, options: SubmitterOptions, stub: "TaskServiceAsyncStub", file: EventFile, past: Sequence[Event]
    ) -> None:
        self._options = options
        self._stub = stub
        self._file = file
        self._acked = {event.key: event.task for event in past if event.kind is Kind.ACKED}
        self._cancelled = {event.task for event in past if event.kind is Kind.CANCEL_ACKED}
        self._known = deque(self._acked.values(), maxlen=MAX_KNOWN)

    async def run(self) -> None:
        """Runs until every submission is acknowledged."""
        poller = asyncio.create_task(self._poll())
        numbers = iter(range(self._options.count))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(CONCURRENCY, self._options.count)):
                    group.create_task(self._work(numbers))
        finally:
            poller.cancel()
            with suppress(asyncio.CancelledError):
                await poller

    async def _work(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._handle(submission(self._options.seed, self._options.name, number))

    async def _handle(self, planned: Submission) -> None:
        """Sends one submission with its duplicate and its cancellation; steps done before a restart are skipped."""
        task = self._acked.get(planned.key)
        if task is None:
            await asyncio.sleep(CONCURRENCY / self._options.per_second)
            task = await self._send(planned)
            if planned.is_sent_twice:
                await self._send(planned)
            if planned.is_contradicted:
                await self._contradict(planned)
        if planned.cancel_after_seconds is not None and task not in self._cancelled:
            await asyncio.sleep(planned.cancel_after_seconds)
            await self._cancel(task)

    async def _send(self, planned: Submission) -> str:
        """Sends it until it is acknowledged; returns the id."""
        self._file.write(Kind.INTENT, key=planned.key, tokens=planned.tokens)
        answered = await until_answered(lambda: self._stub.SubmitTask(request_of(planned), timeout=CALL_SECONDS))
        task = answered.answer.task
        self._file.write(
            Kind.ACKED,
            asked_at=answered.asked_at,
            key=planned.key,
            task=task.id,
            state=task.state,
            tokens=planned.tokens,
        )
        self._known.append(task.id)
        return task.id

    async def _contradict(self, planned: Submission) -> None:
        """Sends the same key with another body, which must be refused without effect."""
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
            answered = await until_answered(lambda: self._stub.CancelTask(request, timeout=CALL_SECONDS))
        except AioRpcError as error:
            self._missed(task, error)
        else:
            self._file.write(Kind.CANCEL_ACKED, asked_at=answered.asked_at, task=task, state=answered.answer.task.state)

    async def _poll(self) -> None:
        """Polls random acknowledged tasks, and writes what it sees for the checker."""
        random = Random(f"{self._options.seed}/{self._options.name}/looks")  # noqa: S311 - the seed must decide it
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if self._known:
                await self._poll_task(random.choice(self._known))

    async def _poll_task(self, task: str) -> None:
        request = task_service_pb2.GetTaskRequest(id=task)
        try:
            answered = await until_answered(lambda: self._stub.GetTask(request, timeout=CALL_SECONDS))
        except AioRpcError as error:
            self._missed(task, error)
        else:
            seen = answered.answer.task
            self._file.write(
                Kind.SEEN,
                asked_at=answered.asked_at,
                task=task,
                state=seen.state,
                attempt=seen.attempt,
                owner=seen.owner,
            )

    def _missed(self, task: str, error: AioRpcError) -> None:
        """Writes NOT_FOUND; raises any other error."""
        if error.code() is not StatusCode.NOT_FOUND:
            raise error
        self._file.write(Kind.MISSED, task=task)


async def submit(options: SubmitterOptions) -> None:
    """Runs a submitter once. Raises AioRpcError for an unexpected refusal."""
    file = EventFile(options.file, options.name)
    past = list(read_events(options.file))
    async with open_channel(options.address) as channel:
        await Submitter(options, task_stub(channel), file, past).run()
    file.close()


def command_line(options: SubmitterOptions) -> list[str]:
    """Returns the command line of a submitter, without the interpreter."""
    return [
        *("-m", "weft_testing.torture.submitter"),
        *("--seed", str(options.seed)),
        *("--name", options.name),
        *("--address", options.address),
        *("--file", str(options.file)),
        *("--count", str(options.count)),
        *("--per-second", str(options.per_second)),
    ]


def main(arguments: Sequence[str]) -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(prog="weft_testing.torture.submitter", allow_abbrev=False)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--per-second", type=float, required=True)
    uvloop.run(submit(SubmitterOptions(**vars(parser.parse_args(arguments)))))


if __name__ == "__main__":
    main(sys.argv[1:])
