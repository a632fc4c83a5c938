"""Requests, verdicts and helpers of the runner suite."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from weft.api.common.v1 import chat_pb2
from weft.dispatch.frames import has_content
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.conformance.findings import BrokenPromiseError, NotCheckedError, require
from weft_testing.conformance.runner_under_test import POLL_SECONDS, Events, RunnerUnderTest


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise of a runner."""

    name: str
    promise: str
    """The promise as a sentence about the runner."""
    run: Callable[[RunnerUnderTest], Awaitable[str]]
    """Runs the check and returns its observation. Raises BrokenPromiseError or NotCheckedError."""
    unloads: bool = False
    chats: bool = False
    """Whether the model must support chat."""


SHORT_ANSWER_TOKENS = 8
ENDLESS_ANSWER_TOKENS = 100_000
"""Length of an answer that no check reads to its end."""
FIRST_CONTENT_SECONDS = 120.0
MAX_FILLED_TOKENS = 1_000_000
"""Maximum context to fill with a prompt: larger messages approach the size limit."""
NOTICE_SECONDS = 2.0
"""Time for a runner to detect that its caller has left."""
CONTEXT_GUESS_TOKENS = 2048
"""Assumed context of a slot if the runner reports none."""
ENDED_EARLY = "the model ended its answer before the check was made"


def chat(text: str, max_tokens: int = SHORT_ANSWER_TOKENS) -> chat_pb2.ChatPayload:
    """Returns a question."""
    payload = chat_pb2.ChatPayload()
    payload.sampling.max_tokens = max_tokens
    payload.sampling.temperature = 0.0
    payload.messages.add(role=chat_pb2.ROLE_USER).content.add(text=text)
    return payload


def endless() -> chat_pb2.ChatPayload:
    """Returns a question with a long answer."""
    return chat("Count from one to ten thousand, one number per line, and do not stop.", ENDLESS_ANSWER_TOKENS)


async def long_prompt(runner: RunnerUnderTest, share_of_context: float) -> chat_pb2.ChatPayload:
    """Returns a prompt that fills about this share of a slot's context."""
    context = (await runner.state()).context_tokens or CONTEXT_GUESS_TOKENS
    if context > MAX_FILLED_TOKENS:
        raise NotCheckedError(f"a slot has a context of {context} tokens; at most {MAX_FILLED_TOKENS} are filled")
    return chat("stone river " * int(context * share_of_context / 2), max_tokens=1)


def kinds(frames: list[Events]) -> list[str]:
    """Returns the kinds of all events in order."""
    return [event.WhichOneof("event") or "" for frame in frames for event in frame]


def text_of(frames: list[Events]) -> str:
    """Returns the text of the answer, including reasoning."""
    deltas = [event.delta for frame in frames for event in frame if event.WhichOneof("event") == "delta"]
    return "".join(delta.reasoning + delta.text for delta in deltas)


async def refusal(action: Awaitable[object], expected: Reason) -> str:
    """Requires that an action fails with this reason. Raises BrokenPromiseError."""
    try:
        await action
    except WeftError as error:
        if error.reason is not expected:
            if error.reason is Reason.NO_SLOT_AVAILABLE:
                # Possibly because of other callers, which `_verdict` finds out.
                raise
            found = f"{error.reason.name}: {error.message}"
            raise BrokenPromiseError(f"expected {expected.name}, got {found}") from None
        return expected.name
    raise BrokenPromiseError(f"expected {expected.name}, but it succeeded")


async def until(condition: Callable[[], Awaitable[bool]], limit_seconds: float, otherwise: str) -> float:
    """Waits for a condition and returns the seconds. Raises BrokenPromiseError with `otherwise` after the limit."""
    began = time.monotonic()
    while not await condition():
        require(time.monotonic() - began < limit_seconds, otherwise)
        await asyncio.sleep(POLL_SECONDS)
    return time.monotonic() - began


class Generation:
    """A generation in the background, identified by its request id."""

    def __init__(self, runner: RunnerUnderTest, payload: chat_pb2.ChatPayload, request_id: str) -> None:
        self._runner = runner
        self.request_id = request_id
        self.content = asyncio.Event()
        """Set with the first content."""
        self.task = asyncio.create_task(self._read(payload))

    async def _read(self, payload: chat_pb2.ChatPayload) -> None:
        async for frame in self._runner.frames(payload, self.request_id):
            if has_content(frame):
                self.content.set()

    async def first_content(self) -> None:
        """Waits for the first content. Raises the request's error; NotCheckedError if no content arrives."""
        waiting = asyncio.create_task(self.content.wait())
        await asyncio.wait({waiting, self.task}, timeout=FIRST_CONTENT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.content.is_set():
            return
        if self.task.done():
            self.task.result()
        raise NotCheckedError(f"no content came within {FIRST_CONTENT_SECONDS:g} s")

    def require_running(self) -> None:
        """Raises NotCheckedError if the answer has ended, because the check needs a running one."""
        if self.task.done():
            raise NotCheckedError(ENDED_EARLY)

    async def leave(self) -> None:
        """Cancels the call, like a caller that disconnects."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)  # otherwise asyncio logs its exception
