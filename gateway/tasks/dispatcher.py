"""The dispatcher of durable requests (`durable: "wait"`), which run as tasks, and the task port's timeouts."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

from typing_extensions import override

from gateway.ports import Embedding, Generation, RequestDispatcher, Speech, UnaryCall
from weft.api.common.v1 import audio_pb2, embedding_pb2, image_pb2, rerank_pb2, tokenize_pb2
from weft.dispatch.frames import GenerationPayload
from weft.dispatch.request_trace import RequestContext
from weft.durable.durable_call import DurableCallConfig, DurableCallDeps, DurableEmbedding, DurableGeneration
from weft.durable.tasks import NewTask, Submitted, Task, TaskDetails, TaskEvent, TaskPage, TaskPort, TaskQuery
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

Answer = TypeVar("Answer")


class TasksWithTimeout(TaskPort):
    """A TaskPort whose every method but `watch` raises SERVICE_UNAVAILABLE where the answer takes too long."""

    def __init__(self, tasks: TaskPort, *, timeout_seconds: float) -> None:
        self._tasks = tasks
        self._timeout_seconds = timeout_seconds

    @override
    async def submit(self, new: NewTask) -> Submitted:
        """A task whose submission timed out may exist: its idempotency key finds it."""
        return await self._in_time(self._tasks.submit(new))

    @override
    async def get(self, tenant: str, task_id: str) -> Task:
        return await self._in_time(self._tasks.get(tenant, task_id))

    @override
    async def details(self, tenant: str, task_id: str) -> TaskDetails:
        return await self._in_time(self._tasks.details(tenant, task_id))

    @override
    async def list_page(self, tenant: str, query: TaskQuery) -> TaskPage:
        return await self._in_time(self._tasks.list_page(tenant, query))

    @override
    async def cancel(self, tenant: str, task_id: str) -> Task:
        return await self._in_time(self._tasks.cancel(tenant, task_id))

    @override
    async def delete(self, tenant: str, task_id: str) -> None:
        await self._in_time(self._tasks.delete(tenant, task_id))

    @override
    def watch(self, tenant: str, task_id: str, after_event: int = 0) -> AsyncGenerator[TaskEvent]:
        """It has no timeout: a task may take hours."""
        return self._tasks.watch(tenant, task_id, after_event)

    async def _in_time(self, answer: Awaitable[Answer]) -> Answer:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await answer
        except TimeoutError:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "task store timed out", retry_after_seconds=2) from None


class DurableDispatcher(RequestDispatcher):
    """Runs durable requests as tasks, and all others with the inner dispatcher."""

    def __init__(
        self, dispatcher: RequestDispatcher, tasks: TaskPort, clock: Clock, config: DurableCallConfig | None = None
    ) -> None:
        self._dispatcher = dispatcher
        self._tools = DurableCallDeps(tasks, clock, config or DurableCallConfig())

    @override
    def generate(self, context: RequestContext, payload: GenerationPayload) -> Generation:
        if context.journal is not None:
            return DurableGeneration(self._tools, context, context.journal, payload)
        return self._dispatcher.generate(context, payload)

    @override
    def embed(self, context: RequestContext, payload: embedding_pb2.EmbeddingPayload) -> Embedding:
        if context.journal is not None:
            return DurableEmbedding(self._tools, context, context.journal, payload)
        return self._dispatcher.embed(context, payload)

    @override
    def rerank(
        self, context: RequestContext, payload: rerank_pb2.RerankPayload
    ) -> UnaryCall[list[rerank_pb2.RerankScore]]:
        """It and the operations below are never durable."""
        return self._dispatcher.rerank(context, payload)

    @override
    def tokenize(
        self, context: RequestContext, payload: tokenize_pb2.TokenizePayload
    ) -> UnaryCall[tokenize_pb2.TokenizeResult]:
        return self._dispatcher.tokenize(context, payload)

    @override
    def generate_images(
        self, context: RequestContext, payload: image_pb2.ImagePayload
    ) -> UnaryCall[list[image_pb2.GeneratedImage]]:
        return self._dispatcher.generate_images(context, payload)

    @override
    def transcribe(
        self, context: RequestContext, payload: audio_pb2.TranscriptionPayload
    ) -> UnaryCall[audio_pb2.Transcription]:
        return self._dispatcher.transcribe(context, payload)

    @override
    def speak(self, context: RequestContext, payload: audio_pb2.SpeechPayload) -> Speech:
        return self._dispatcher.speak(context, payload)
