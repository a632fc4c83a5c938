"""The run of one prompt in ComfyUI: queued, followed over the websocket, and removed if its caller disconnects.

The websocket reports progress and may disconnect at any time; only /queue and /history decide the prompt's state. A
prompt is queued once: if the response is lost, it is found by its client id, which is unique.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from weft.api.common.v1 import chat_pb2, event_pb2, image_pb2
from weft.dispatch.frames import Frame
from weft.dispatch.workflow_graph import expected_steps
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft_extensions.comfyui import messages
from weft_extensions.comfyui.api import ComfyApi, ComfyUnreachableError
from weft_extensions.comfyui.messages import Executing, Notice, Preview, Progress, QueuedPrompt

log = get_logger("weft.comfyui")

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 2.0
WITHDRAW_SECONDS = 10.0
"""Maximum time for removing or interrupting a prompt."""
WITHDRAW_PAUSE_SECONDS = 0.05
QUEUE_PAUSE_SECONDS = 0.1
"""Delay before the queue is read after a change, since more changes may follow."""
REST_SECONDS = 0.5
"""Maximum wait for the last messages about a finished prompt."""
INTERRUPT_AGAIN_SECONDS = 3.0
"""A node checks for interrupts between steps, so the next interrupt is sent only after this time."""
MEBIBYTE = 1024 * 1024
CLIENT_PREFIX = "weft-"
_CLOSED = frozenset(
    {aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR}
)
_Result = TypeVar("_Result")
OUTCOME_UNKNOWN = "ComfyUI was restarted while the prompt was queued or running, and no longer knows it"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Limits of a run."""

    poll_seconds: float = 1.0
    """Interval between reads of the queue while a request is waiting or running."""
    reconnect_seconds: float = 20.0
    """How long to retry if ComfyUI stops responding during a request."""
    silent_node_seconds: float = 600.0
    """How long a node may run without progress (it may be loading a model) before the request counts as stalled."""
    free_seconds: float = 30.0
    """How long an unload waits until ComfyUI reports its accelerator memory as free."""
    max_image_bytes: int = 48 * MEBIBYTE
    """Maximum size of a generated image; below the mesh's message limit of 64 MiB."""
    max_message_bytes: int = 16 * MEBIBYTE
    """Maximum size of a websocket message, including previews."""
    max_images: int = 16
    """Maximum number of images per workflow run."""


@dataclass(slots=True, kw_only=True)
class StepCounter:
    """Counts the steps of all images in a request."""

    image_count: int
    previews_per_image: int
    _done_before: int = 0
    """Steps of completed images."""
    _expected: int = 0
    """Steps of the current image according to its graph; 0: unknown."""
    _samplers: frozenset[str] = frozenset()
    _nodes: dict[str, Progress] = field(default_factory=dict)
    _previews: int = 0
    _index: int = 0

    def begin(self, graph: Mapping[str, Any], index: int) -> None:
        """Starts counting the steps of another image."""
        self._done_before += self._done
        self._expected = expected_steps(dict(graph))
        self._samplers = frozenset(node for node, each in graph.items() if "steps" in each["inputs"])
        self._nodes.clear()
        self._previews, self._index = 0, index

    @property
    def _done(self) -> int:
        return sum(each.done for each in self._nodes.values())

    @property
    def _total(self) -> int:
        return max(self._expected, sum(each.total for each in self._nodes.values()))

    @property
    def steps(self) -> int:
        """Completed steps of all images."""
        return self._done_before + self._done

    def waiting(self, stage: str) -> Frame:
        """Returns the frame for a waiting prompt."""
        return [self._event(stage)]

    def note(self, progress: Progress) -> Frame:
        """Returns the frame for progress; empty: the node is not a sampler, such as a decoder."""
        if self._samplers and progress.node not in self._samplers:
            return []
        self._nodes[progress.node] = progress
        return [self._event("")]

    def preview(self, preview: Preview) -> Frame:
        """Returns the frame for a preview; empty: none is due."""
        due = self._total * (self._previews + 1) <= self._done * (self.previews_per_image + 1)
        if self._previews >= self.previews_per_image or not self._done or not due or self._done >= self._total:
            return []
        part = chat_pb2.MediaPart(media_type=preview.media_type, data=preview.data)
        partial = image_pb2.PartialImage(index=self._index, partial_index=self._previews, image=part)
        self._previews += 1
        return [event_pb2.InferenceEvent(partial_image=partial)]

    def _event(self, stage: str) -> event_pb2.InferenceEvent:
        progress = event_pb2.WorkProgress(
            unit=event_pb2.WORK_UNIT_STEPS,
            done=self.steps,
            total=self._done_before + self._total * (self.image_count - self._index),
            stage=stage,
        )
        return event_pb2.InferenceEvent(work_progress=progress)


@dataclass(slots=True)
class PromptRun:
    """One prompt, from submission to end."""

    api: ComfyApi
    limits: RunLimits
    own_clients: set[str]
    """Clients of all runs of this backend, to identify prompts of others."""
    explain_break: Callable[[], Awaitable[WeftError | None]]
    """Returns why ComfyUI is gone, if its process is known."""
    client: str = field(default_factory=lambda: f"{CLIENT_PREFIX}{secrets.token_hex(16)}")
    prompt_id: str = ""
    """Empty until the prompt is queued."""
    _has_ended: bool = False
    _may_be_queued: bool = False
    _node: str = ""
    _node_since: float = 0.0
    _interrupted_at: float | None = None

    async def frames(
        self, graph: dict[str, Any], counter: StepCounter, on_progress: Callable[[], None]
    ) -> AsyncGenerator[Frame]:
        """Queues the prompt and yields its progress until it has ended, successfully or not; see `entry`.

        `on_progress` is called for each sign that it waits or is computed.

        Raises BACKEND_REJECTED if the prompt is rejected, SERVER_DIED if it is lost. Closing the generator removes the
        prompt from the queue, or interrupts it if it is running.
        """
        self.own_clients.add(self.client)
        shown: str | None = None
        try:
            async with AsyncExitStack() as stack:
                socket = await self._connected(stack)
                await self._submit(graph)
                async with aclosing(self._followed(socket, stack)) as followed:
                    async for happening in followed:
                        frame: Frame = []
                        if isinstance(happening, Progress):
                            frame = counter.note(happening)
                        elif isinstance(happening, Preview):
                            frame = counter.preview(happening)
                        elif happening != shown:
                            shown = happening
                            frame = counter.waiting(happening)
                        if not self._is_silent:
                            on_progress()
                        if frame:
                            yield frame
            self._has_ended = True
        finally:
            self.own_clients.discard(self.client)
            if self._may_be_queued and not self._has_ended:
                await self._withdrawn()

    async def entry(self) -> dict[str, Any]:
        """Returns the history of the finished prompt. Raises SERVER_DIED if there is none."""
        found = await self._tried(lambda: self.api.history(self.prompt_id))
        if found is None:
            raise await self._lost()
        return found

    async def _connected(self, stack: AsyncExitStack) -> aiohttp.ClientWebSocketResponse:
        return await self._tried(lambda: stack.enter_async_context(self.api.socket(self.client)))

    async def _submit(self, graph: dict[str, Any]) -> None:
        self._may_be_queued = True
        try:
            self.prompt_id = await self.api.submit(graph, self.client)
        except WeftError:
            self._may_be_queued = False
            raise
        except ComfyUnreachableError:
            # The prompt may have been accepted: queued again, it would run twice.
            self.prompt_id = await self._tried(self._found)
            if not self.prompt_id:
                self._may_be_queued = False
                raise await self._lost() from None

    async def _found(self) -> str:
        """Returns the id of this client's prompt; empty: ComfyUI has none."""
        queued = next((each.prompt_id for each in await self.api.queue() if each.client == self.client), "")
        return queued or await self.api.ended_prompt_of(self.client) or ""

    async def _followed(
        self, socket: aiohttp.ClientWebSocketResponse, stack: AsyncExitStack
    ) -> AsyncGenerator[Progress | Preview | str]:
        """Yields its progress and, at intervals, its stage in the queue; empty: it is next, or running."""
        loop = asyncio.get_running_loop()
        self._node_since = loop.time()
        look_at = loop.time()
        while True:
            if loop.time() >= look_at:
                state = await self._looked()
                if state is None:
                    break
                yield state
                look_at = loop.time() + self.limits.poll_seconds
            try:
                async with asyncio.timeout_at(look_at):
                    received = await socket.receive()
            except TimeoutError:
                continue
            if received.type in _CLOSED:
                # This includes a message that is too large; the queue shows what happened to the prompt.
                await socket.close()
                socket = await self._connected(stack)
                look_at = loop.time()
                continue
            happening = self._read(received)
            if isinstance(happening, Progress | Preview):
                yield happening
            elif happening is not None:
                look_at = min(look_at, loop.time() + (0.0 if happening is Notice.ENDED else QUEUE_PAUSE_SECONDS))
        async for late in self._rest(socket):
            yield late

    async def _rest(self, socket: aiohttp.ClientWebSocketResponse) -> AsyncGenerator[Progress | Preview | str]:
        """Yields the remaining messages about a prompt after its end was detected."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REST_SECONDS):
                while (received := await socket.receive()).type not in _CLOSED:
                    happening = self._read(received)
                    if isinstance(happening, Progress | Preview):
                        yield happening
                    elif happening is Notice.ENDED:
                        return

    def _read(self, received: aiohttp.WSMessage) -> messages.Message | None:
        if received.type is aiohttp.WSMsgType.BINARY:
            return messages.read_binary(received.data, self.limits.max_message_bytes)
        if received.type is not aiohttp.WSMsgType.TEXT:
            return None
        found = messages.read_text(received.data, self.prompt_id)
        if isinstance(found, Executing):
            self._node, self._node_since = found.node, asyncio.get_running_loop().time()
            return None
        if isinstance(found, Progress):
            self._node_since = asyncio.get_running_loop().time()
        # While the prompt is running, the queue behind it does not matter.
        return None if found is Notice.QUEUE_CHANGED and self._node else found

    async def _looked(self) -> str | None:
        """Returns what the prompt waits for; empty: it is next, or running; None: it has ended.

        Raises SERVER_DIED if ComfyUI does not know it.
        """
        queue = await self._tried(self.api.queue)
        ahead: list[QueuedPrompt] = []
        for each in queue:
            if each.prompt_id != self.prompt_id:
                ahead.append(each)
                continue
            if not each.is_running:
                self._node_since = asyncio.get_running_loop().time()
                return messages.stage_behind(ahead, self.own_clients)
            return ""
        # A prompt moves atomically from the queue to the history.
        if await self._tried(lambda: self.api.history(self.prompt_id)) is None:
            raise await self._lost()
        return None

    @property
    def _is_silent(self) -> bool:
        """Whether the running node has reported no progress for too long."""
        return asyncio.get_running_loop().time() - self._node_since > self.limits.silent_node_seconds

    async def _lost(self) -> WeftError:
        self._has_ended = True
        return await self.explain_break() or WeftError(Reason.SERVER_DIED, OUTCOME_UNKNOWN)

    async def _tried(self, call: Callable[[], Awaitable[_Result]]) -> _Result:
        """Returns the result of a read-only call, which is retried for a limited time if ComfyUI does not respond.

        Then raises SERVER_DIED, or the known error of the process.
        """
        loop = asyncio.get_running_loop()
        began, pause = loop.time(), FIRST_RETRY_SECONDS
        while True:
            try:
                return await call()
            except ComfyUnreachableError as error:
                gone = await self.explain_break()
                if gone is not None:
                    self._has_ended = True
                    raise gone from error
                if loop.time() - began >= self.limits.reconnect_seconds:
                    self._has_ended = self._has_ended or not self._may_be_queued
                    raise WeftError(Reason.SERVER_DIED, "ComfyUI no longer responds") from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, MAX_RETRY_SECONDS)

    async def _withdrawn(self) -> None:
        """Removes the prompt within a time limit, even if the caller is cancelled."""
        task = asyncio.create_task(self._withdraw())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    async def _withdraw(self) -> None:
        with suppress(ComfyUnreachableError, WeftError):
            try:
                async with asyncio.timeout(WITHDRAW_SECONDS):
                    await self._remove_all()
            except TimeoutError:
                log.warning("a prompt could not be withdrawn from ComfyUI in time", seconds=WITHDRAW_SECONDS)
            if self.prompt_id:
                await self.api.forget(self.prompt_id)

    async def _remove_all(self) -> None:
        is_queued = True
        while is_queued:
            is_queued = await self._remove()
            await asyncio.sleep(WITHDRAW_PAUSE_SECONDS if is_queued else 0)

    async def _remove(self) -> bool:
        """Performs one step of removing the prompt; returns whether it is still in the queue.

        An interrupt hits whatever is running, so it is sent only if the queue shows this prompt as running.
        """
        own = next((each for each in await self.api.queue() if each.client == self.client), None)
        if own is None:
            return False
        self.prompt_id = own.prompt_id
        now = asyncio.get_running_loop().time()
        if not own.is_running:
            await self.api.delete_pending(own.prompt_id)
        elif self._interrupted_at is None or now - self._interrupted_at >= INTERRUPT_AGAIN_SECONDS:
            self._interrupted_at = now
            await self.api.interrupt(own.prompt_id)
        return True


def foreign_count(queue: list[QueuedPrompt], own_clients: Container[str]) -> int:
    """Returns the number of prompts of other clients."""
    return sum(each.client not in own_clients for each in queue)
