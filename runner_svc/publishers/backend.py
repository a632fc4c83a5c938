"""The backend of a model that a publisher serves: its requests become tasks, over the edge's private socket."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace

from typing_extensions import override

from runner_svc.backend.port import CallInfo, EmbeddingResult, ExitReport, RerankResult
from runner_svc.engine_http.answer import Answer
from runner_svc.openai_upstream.client import Endpoint, Open, OpenAiHttp
from runner_svc.policy.parameters import EngineParameters
from runner_svc.publishers.session import PublisherSession
from runner_svc.runtimes.model_engine import ModelContext, parameter_profile
from runner_svc.runtimes.settings import UpstreamSettings
from runner_svc.runtimes.unmanaged_server import UnmanagedServer
from weft.api.common.v1 import embedding_pb2, rerank_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation


class PublishedModel(UnmanagedServer[UpstreamSettings]):
    """A Backend over one model of a publisher. It is ready while the publisher has an event stream."""

    noun = "publisher"

    def __init__(
        self,
        model: UpstreamSettings,
        context: ModelContext,
        parameters: EngineParameters,
        session: PublisherSession,
        socket_path: str,
    ) -> None:
        """`parameters`: those beyond weft's own that a publisher is sent."""
        operations = frozenset(Operation[word.upper()] for word in model.operations)
        super().__init__(model, context, operations=operations, parameters=parameter_profile(model, parameters))
        self._session = session
        self._socket_path = socket_path

    @override
    async def responds(self, timeout_seconds: float) -> bool:
        return self._session.streaming.is_set()

    @override
    async def wait_exit(self) -> ExitReport:
        await self._session.ended.wait()
        return ExitReport(reason=Reason.CONNECT_FAILED, how=self._lost().message)

    @override
    def _client(self, endpoint: Endpoint) -> OpenAiHttp:
        local = replace(endpoint, socket_path=self._socket_path)
        return OpenAiHttp(local, self.context.timeouts, self._explain_break, self._open)

    @override
    async def _open(self, open_response: Open, call: CallInfo) -> Answer:
        return await open_response()

    @override
    async def _require_ready(self, http: OpenAiHttp) -> None:
        """Waits for the publisher's event stream; the session ends where none is opened in time."""
        await self._session.streaming.wait()

    @override
    async def _is_there(self, http: OpenAiHttp) -> bool:
        return self._session.streaming.is_set()

    @override
    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        with self._explained(call):
            async with aclosing(super().generate(payload, call)) as frames:
                async for frame in frames:
                    yield frame

    @override
    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        with self._explained(call):
            return await super().embed(payload, call)

    @override
    async def rerank(self, payload: rerank_pb2.RerankPayload, call: CallInfo) -> RerankResult:
        with self._explained(call):
            return await super().rerank(payload, call)

    @contextmanager
    def _explained(self, call: CallInfo) -> Iterator[None]:
        """Replaces what the private socket shows of a failure by the failure itself."""
        try:
            yield
        except WeftError as error:
            failure = self._session.failure_of(call.request_id)
            if failure is None and self._session.end_error is not None:
                failure = self._lost()
            if failure is None:
                raise
            raise failure from error

    def _lost(self) -> WeftError:
        error = self._session.end_error
        words = "the publisher is gone" if error is None else error.message
        return WeftError(Reason.WORKER_LOST, words)
