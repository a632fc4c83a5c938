"""The backend of a publisher's model: each engine request is a task for the publisher, whose result is the answer."""

from collections.abc import Callable
from types import MappingProxyType

from typing_extensions import override

from runner_svc.backend.port import CallInfo, ExitReport
from runner_svc.engine_http.answer import Answer
from runner_svc.openai_upstream.client import CHAT, COMPLETIONS, EMBEDDINGS, RERANK, Endpoint, OpenAiHttp
from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.model_engine import ModelContext, parameter_profile
from runner_svc.runtimes.runtime_settings import UpstreamSettings
from runner_svc.runtimes.unmanaged_server import UnmanagedServer
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft_extensions.publishers.messages import Chunk, Whole, as_chunk
from weft_extensions.publishers.session import PublisherSession, PublisherTask

NOWHERE = "http://publisher.invalid"
"""Placeholder URL of publishers' models; nothing connects to it."""
_OPERATIONS = MappingProxyType({CHAT: "chat", COMPLETIONS: "completion", EMBEDDINGS: "embedding", RERANK: "rerank"})


class PublishedModel(UnmanagedServer[UpstreamSettings]):
    """A Backend for a publisher's model. It is ready while the publisher has an event stream."""

    noun = "publisher"

    def __init__(
        self, model: UpstreamSettings, context: ModelContext, parameters: EngineParameters, session: PublisherSession
    ) -> None:
        """`parameters`: those beyond weft's own that are sent to a publisher."""
        operations = frozenset(Operation[word.upper()] for word in model.operations)
        super().__init__(model, context, operations=operations, parameters=parameter_profile(model, parameters))
        self._session = session

    @override
    async def responds(self, timeout_seconds: float) -> bool:
        return self._session.streaming.is_set()

    @override
    async def wait_exit(self) -> ExitReport:
        await self._session.ended.wait()
        error = self._session.end_error
        return ExitReport(reason=Reason.CONNECT_FAILED, how="" if error is None else error.log_message)

    @override
    def _client(self, endpoint: Endpoint) -> OpenAiHttp:
        return _TaskClient(endpoint, self.context, self._session)

    @override
    async def _require_ready(self, http: OpenAiHttp) -> None:
        """Waits for the publisher's event stream; the session ends if none is opened in time."""
        await self._session.streaming.wait()


class _TaskClient(OpenAiHttp):
    """Sends requests as tasks of a publisher."""

    def __init__(self, endpoint: Endpoint, context: ModelContext, session: PublisherSession) -> None:
        super().__init__(endpoint, context.timeouts, _not_explained)
        self._session = session
        self._tasks: set[PublisherTask] = set()

    @override
    async def close(self) -> None:
        stopped = WeftError(Reason.WORKER_RESTARTED, "the engine was stopped while it processed the request")
        for task in tuple(self._tasks):
            task.fail(stopped)

    @override
    async def _send(self, path: str, body: object, call: CallInfo, authorization: object) -> Answer:
        assert isinstance(body, dict), "publishers have no operations with forms"
        is_streamed = bool(body.get("stream"))
        task = self._session.submit(
            operation=_OPERATIONS[path],
            path=path,
            model=body.get("model", ""),
            stream=is_streamed,
            request_id=call.request_id,
            body=body,
        )
        self._tasks.add(task)
        try:
            first = await task.next()
        except BaseException:
            self._close(task)
            raise
        return _TaskAnswer(task, first, is_streamed=is_streamed, on_release=lambda: self._close(task))

    def _close(self, task: PublisherTask) -> None:
        self._tasks.discard(task)
        self._session.close_task(task)


class _TaskAnswer(Answer):
    """A task's result, as the answer of an OpenAI-compatible server."""

    __slots__ = ("_is_over", "_is_stream", "_piece", "_task")

    def __init__(
        self, task: PublisherTask, first: Chunk | Whole, *, is_streamed: bool, on_release: Callable[[], None]
    ) -> None:
        super().__init__(lambda: None, lambda _: on_release())
        self._task = task
        self._piece: Chunk | Whole | None = first
        self._is_over = False
        status = first.status if isinstance(first, Whole) else 200
        self._is_stream = isinstance(first, Chunk) or (is_streamed and status == 200)
        kind = b"text/event-stream" if self._is_stream else b"application/json"
        self.feed(b"HTTP/1.1 %d Result\r\nContent-Type: %b\r\n\r\n" % (status, kind))

    @override
    async def read(self) -> bytes:
        if self._is_over:
            return b""
        piece, self._piece = self._piece or await self._task.next(), None
        self._is_over = isinstance(piece, Whole) or piece.done
        if not self._is_stream and isinstance(piece, Whole):
            return piece.body
        data = as_chunk(piece.body) if isinstance(piece, Whole) else piece.data
        return (b"data: %b\n\n" % data if data else b"") + (b"data: [DONE]\n\n" if self._is_over else b"")


async def _not_explained(_: Reason) -> WeftError | None:
    """Returns None: there is no process, and failures are those of tasks."""
    return None
