"""Helpers of the backend suite: the engines it needs, requests, and processes."""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from enum import Enum
from typing import TypeVar

import psutil

from runner_svc.backend.port import Backend, CallInfo
from weft.api.common.v1 import chat_pb2, completion_pb2, event_pb2, sampling_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

ANSWER_TOKENS = 8
MAX_LOG_BYTES = 2 * 1024 * 1024
"""Output of an engine that exceeds what any backend keeps."""
POLL_SECONDS = 0.01
TRACEBACK = re.compile(r"Traceback \(most recent call last\)|File \"")
Result = TypeVar("Result")


class Engine(Enum):
    """The kind of engine that a test needs behind its backend."""

    NORMAL = "answers at once; two slots or more; an answer to any prompt has at least ANSWER_TOKENS tokens"
    SLOW = "one slot; an answer lasts 20 s or more, its first token comes within 2 s"
    NEVER_READY = "runs but never becomes ready; the engine gives up within `start_seconds`"
    EXITS_AT_START = "writes the cause, in Python with a traceback, and exits with code 3 before it is ready"
    IGNORES_SIGTERM = "as NORMAL, but SIGTERM has no effect"
    NOISY = "as NORMAL, and writes MAX_LOG_BYTES or more to its stderr before it is ready"
    WITH_DESCENDANT = "as NORMAL, with a child process that holds its stdout and stderr open"


def call(on_token: Callable[[], None] = lambda: None) -> CallInfo:
    """A request as the runner describes it to its backend."""
    return CallInfo(request_id="req-conformance", traceparent="", on_token=on_token)


def chat(*, text: str = "Count.", max_tokens: int = ANSWER_TOKENS, choice_count: int = 1) -> chat_pb2.ChatPayload:
    """Returns a short question."""
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text=text)])
    sampling = sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0)
    return chat_pb2.ChatPayload(messages=[message], sampling=sampling, choice_count=choice_count)


def completion() -> completion_pb2.CompletionPayload:
    """Returns two prompts to complete."""
    return completion_pb2.CompletionPayload(
        prompts=[completion_pb2.PromptInput(text=text) for text in ("One, two, three,", "Once upon a time")],
        sampling=sampling_pb2.SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0),
    )


def has_content(event: event_pb2.InferenceEvent) -> bool:
    """Whether an event has content of an answer."""
    delta = event.delta
    return event.HasField("delta") and bool(delta.text or delta.reasoning or delta.refusal or delta.tool_calls)


async def run(backend: Backend, payload: GenerationPayload) -> list[Frame]:
    """Returns all frames of one generation."""
    return await collect(backend.generate(payload, call()))


async def collect(stream: AsyncGenerator[Frame]) -> list[Frame]:
    """Returns all frames of a stream."""
    return [frame async for frame in stream]


def flat(frames: Iterable[Frame]) -> Frame:
    """Returns the events of all frames."""
    return [event for frame in frames for event in frame]


async def read_first_content(stream: AsyncGenerator[Frame]) -> None:
    """Reads up to the first content of the answer."""
    async for frame in stream:
        if any(map(has_content, frame)):
            return
    raise AssertionError("the stream ended without content")


@asynccontextmanager
async def beside(work: Coroutine[object, object, Result]) -> AsyncGenerator[asyncio.Task[Result]]:
    """Runs `work` as a task during the block, then cancels it and retrieves its outcome.

    The event loop logs the exception of a failed task that nothing retrieved when the task is collected. Before CPython
    3.11.8 such a log record, formatted while pytest parses the source of a failed test, ends all of pytest.
    """
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def read_on(stream: AsyncGenerator[Frame], started: asyncio.Event) -> None:
    """Reads a stream to its end; sets `started` at its first content."""
    async with contextlib.aclosing(stream):
        await read_first_content(stream)
        started.set()
        await collect(stream)


async def begun(reader: asyncio.Task[None], started: asyncio.Event) -> None:
    """Waits until `started` is set. Raises the error that ended `reader` before that."""
    async with beside(started.wait()) as waiting:
        await asyncio.wait({waiting, reader}, return_when=asyncio.FIRST_COMPLETED)
    if not started.is_set():
        reader.result()


async def failure(work: Awaitable[object]) -> Reason:
    """Returns the reason of the WeftError that `work` raises."""
    try:
        await work
    except WeftError as error:
        return error.reason
    raise AssertionError("a typed error was expected")


def distance(left: list[float], right: list[float]) -> float:
    """Returns the distance of two vectors."""
    return math.dist(left, right)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def no_process_left(seconds: float) -> AsyncGenerator[Callable[[], list[psutil.Process]]]:
    """Fails when a child process started in the block outlives it by `seconds`; yields a function that lists them."""
    test = psutil.Process()
    before = set(test.children(recursive=True))

    def new_processes() -> list[psutil.Process]:
        return [child for child in test.children(recursive=True) if child not in before and is_alive(child)]

    yield new_processes
    await until(lambda: not new_processes(), seconds, "a process was left behind")


async def until(condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Waits until `condition` holds; fails with `otherwise` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        await asyncio.sleep(POLL_SECONDS)
