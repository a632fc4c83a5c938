"""The TaskService client of submitters and readers: plain stubs, without the client library."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode
from grpc.aio import AioRpcError, Channel

from weft.api.common.v1 import chat_pb2, priority_pb2, sampling_pb2
from weft.api.router.v1 import inference_service_pb2, task_pb2, task_service_pb2, task_service_pb2_grpc
from weft_testing.torture.plan import MAX_ATTEMPTS, Submission

if TYPE_CHECKING:
    from weft.api.router.v1.task_service_pb2_grpc import TaskServiceAsyncStub

CALL_SECONDS = 5.0
"""Timeout of a call; after it the result is unknown, and the call is repeated."""
RETRY_SECONDS = 0.1
PENDING_LIMIT_SECONDS = 7200
_UNKNOWN = frozenset(
    {
        StatusCode.UNAVAILABLE,
        StatusCode.DEADLINE_EXCEEDED,
        # The death of the server may end a call with these.
        StatusCode.UNKNOWN,
        StatusCode.CANCELLED,
    }
)

_Answer = TypeVar("_Answer")


def task_stub(channel: Channel) -> "TaskServiceAsyncStub":
    """Returns a stub of TaskService."""
    return cast("TaskServiceAsyncStub", task_service_pb2_grpc.TaskServiceStub(channel))


def request_of(planned: Submission, *, more_tokens: int = 0) -> task_service_pb2.SubmitTaskRequest:
    """Returns the request of a submission; `more_tokens` makes it another body."""
    tokens = planned.tokens + more_tokens
    question = chat_pb2.ContentPart(text=planned.key)
    options = inference_service_pb2.RequestOptions()
    if not planned.is_durable_work:
        options.priority = priority_pb2.PRIORITY_NORMAL
    spec = task_pb2.TaskSpec(
        model=planned.model,
        # Submissions begin before the runners have registered.
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
    """An answer, and the time at which its call was made."""

    answer: _Answer
    asked_at: float


async def until_known(call: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Returns the answer of `until_answered` alone."""
    return (await until_answered(call)).answer


async def until_answered(call: Callable[[], Awaitable[_Answer]]) -> Answered[_Answer]:
    """Repeats a call until its result is known, and returns the answer.

    Raises AioRpcError for a refusal.
    """
    while True:
        asked_at = time.time()
        try:
            return Answered(await call(), asked_at)
        except AioRpcError as error:
            if error.code() not in _UNKNOWN:
                raise
            await asyncio.sleep(RETRY_SECONDS)
