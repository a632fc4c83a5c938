"""A submitter process: `python -m tools.torture.submitter`. Killed at any time, it resumes on restart.

Its state is its history file: it writes an intent, makes the call, and writes the answer. An unacknowledged submission
is sent again with the same key, and must return the same task. Calls use plain stubs instead of `weft.client`.
"""

import argparse
import asyncio
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc import StatusCode
from grpc.aio import AioRpcError, Channel
from grpc_status import rpc_status

from tools.torture.history import NO_REASON, Event, EventFile, Kind, read_events
from tools.torture.plan import CONCURRENCY, MAX_ATTEMPTS, STEADY_MODEL, Submission, submission
from weft.api.common.v1 import chat_pb2, priority_pb2, sampling_pb2
from weft.api.router.v1 import inference_service_pb2, task_pb2, task_service_pb2, task_service_pb2_grpc
from weft.kernel.channels.rpc import open_channel
from weft.kernel.channels.tls import TlsFiles
from weft.kernel.channels.tls_channel import ChannelSecurity

if TYPE_CHECKING:
    from weft.api.router.v1.task_service_pb2_grpc import TaskServiceAsyncStub


CALL_SECONDS = 5.0
"""Timeout of a call; after it the result is unknown, and the call is repeated."""
RETRY_SECONDS = 0.1
MAX_NOTE_CHARACTERS = 300
PENDING_LIMIT_SECONDS = 7200
_UNKNOWN = frozenset(
    {
        StatusCode.UNAVAILABLE,
        StatusCode.DEADLINE_EXCEEDED,
        # Possible results if the server dies during a call.
        StatusCode.UNKNOWN,
        StatusCode.CANCELLED,
    }
)
_BARE = frozenset({StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED, StatusCode.CANCELLED})
"""Codes that gRPC itself returns if a process died or does not answer."""
_KINDS_OF_THEIR_OWN = frozenset({StatusCode.ALREADY_EXISTS, StatusCode.NOT_FOUND})

_Answer = TypeVar("_Answer")


def task_stub(channel: Channel) -> "TaskServiceAsyncStub":
    """Returns a stub of TaskService."""
    return cast("TaskServiceAsyncStub", task_service_pb2_grpc.TaskServiceStub(channel))


def request_of(planned: Submission, *, more_tokens: int = 0) -> task_service_pb2.SubmitTaskRequest:
    """Returns the request of a submission; `more_tokens` makes its body different."""
    tokens = planned.tokens + more_tokens
    question = chat_pb2.ContentPart(text=planned.key)
    options = inference_service_pb2.RequestOptions()
    if not planned.is_durable_work:
        options.priority = priority_pb2.PRIORITY_NORMAL
    spec = task_pb2.TaskSpec(
        model=planned.model,
        # Submissions start before the runners have registered.
        wait_for_model=True,
        chat=chat_pb2.ChatPayload(
            messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[question])],
            sampling=sampling_pb2.SamplingParams(max_tokens=tokens),
        ),
        options=options,
        pending_limit=Duration(seconds=PENDING_LIMIT_SECONDS),
        max_attempts=MAX_ATTEMPTS,
    )
    return task_service_pb2.SubmitTaskRequest(spec=spec, idempotency_key=planned.key)


@dataclass(frozen=True, slots=True)
class Answered(Generic[_Answer]):
    """An answer, and when its call was made."""

    answer: _Answer
    asked_at: float


def _ignore(_: AioRpcError) -> None:
    pass


async def until_known(
    call: Callable[[], Awaitable[_Answer]], turned_away: Callable[[AioRpcError], None] = _ignore
) -> _Answer:
    """Returns the answer of `until_answered` alone."""
    return (await until_answered(call, turned_away)).answer


async def until_answered(
    call: Callable[[], Awaitable[_Answer]], turned_away: Callable[[AioRpcError], None] = _ignore
) -> Answered[_Answer]:
    """Repeats a call until its result is known, and returns the answer. `turned_away`: called with each failure.

    Raises AioRpcError for a rejection.
    """
    while True:
        asked_at = time.time()
        try:
            return Answered(await call(), asked_at)
        except AioRpcError as error:
            turned_away(error)
            if error.code() not in _UNKNOWN:
                raise
            await asyncio.sleep(RETRY_SECONDS)


def reason_of(error: AioRpcError) -> str:
    """Returns the reason in the ErrorInfo of a failed call; empty: it has none."""
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    if status is not None and any(detail.Unpack(info) for detail in status.details):
        return str(info.reason)
    return ""


MAX_KNOWN = 256
"""Maximum number of polled tasks."""
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitterOptions:
    """The command line options of a submitter."""

    seed: int
    name: str
    address: str
    """Addresses of routers, comma-separated: calls go to the leader."""
    file: Path
    count: int
    """Total number of submissions, over all restarts."""
    per_second: float
    pools: Sequence[str] = (STEADY_MODEL,)
    """The targets of most tasks."""
    certificates: Path | None = None
    """The certificate that it shows, beside its key and the root certificate; None: routers are on this machine."""


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
            options = self._options
            await self._handle(submission(options.seed, options.name, number, options.pools))

    async def _handle(self, planned: Submission) -> None:
        """Sends a submission with its duplicate and its cancellation; skips steps done before a restart."""
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
        answered = await until_answered(
            lambda: self._stub.SubmitTask(request_of(planned), timeout=CALL_SECONDS), self._turned_away
        )
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
        """Sends the same key with another body, which must be rejected without effect."""
        request = request_of(planned, more_tokens=1)
        try:
            await until_known(lambda: self._stub.SubmitTask(request, timeout=CALL_SECONDS), self._turned_away)
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
            answered = await until_answered(
                lambda: self._stub.CancelTask(request, timeout=CALL_SECONDS), self._turned_away
            )
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
            answered = await until_answered(
                lambda: self._stub.GetTask(request, timeout=CALL_SECONDS), self._turned_away
            )
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

    def _turned_away(self, error: AioRpcError) -> None:
        """Records a rejection, unless it has a separate event kind, or the connection or the call's time was lost."""
        reason = reason_of(error)
        if error.code() not in _KINDS_OF_THEIR_OWN and (reason or error.code() not in _BARE):
            note = f"{error.code().name} {reason or NO_REASON} {error.details()}"
            self._file.write(Kind.TURNED_AWAY, note=note[:MAX_NOTE_CHARACTERS])

    def _missed(self, task: str, error: AioRpcError) -> None:
        """Writes NOT_FOUND; raises any other error."""
        if error.code() is not StatusCode.NOT_FOUND:
            raise error
        self._file.write(Kind.MISSED, task=task)


async def submit(options: SubmitterOptions) -> None:
    """Runs a submitter once. Raises AioRpcError for an unexpected rejection."""
    file = EventFile(options.file, options.name)
    past = list(read_events(options.file))
    async with open_channel(options.address, _security(options.certificates)) as channel:
        await Submitter(options, task_stub(channel), file, past).run()
    file.close()


def _security(certificate: Path | None) -> ChannelSecurity | None:
    if certificate is None:
        return None
    key, root = certificate.with_suffix(".key"), certificate.with_name(f"{certificate.stem}-ca.pem")
    return ChannelSecurity(files=TlsFiles(certificate_file=certificate, key_file=key, ca_file=root))


def command_line(options: SubmitterOptions) -> list[str]:
    """Returns the command line of a submitter, without the interpreter."""
    return [
        *("-m", "tools.torture.submitter"),
        *("--seed", str(options.seed)),
        *("--name", options.name),
        *("--address", options.address),
        *(part for pool in options.pools for part in ("--pool", pool)),
        *("--file", str(options.file)),
        *("--count", str(options.count)),
        *("--per-second", str(options.per_second)),
        *(() if options.certificates is None else ("--certificates", str(options.certificates))),
    ]


def main(arguments: Sequence[str]) -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(prog="tools.torture.submitter", allow_abbrev=False)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--pool", dest="pools", action="append", required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--per-second", type=float, required=True)
    parser.add_argument("--certificates", type=Path)
    asyncio.run(submit(SubmitterOptions(**vars(parser.parse_args(arguments)))))


if __name__ == "__main__":
    main(sys.argv[1:])
