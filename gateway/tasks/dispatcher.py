"""Runs what is to be journaled as a task, and everything else at once."""

from gateway.ports import Embedding, Generation, RequestDispatcher, Speech, Whole
from weft.api.common.v1 import audio_pb2, embedding_pb2, image_pb2, rerank_pb2, tokenize_pb2
from weft.dispatch.frames import GenerationPayload
from weft.dispatch.request_trace import RequestContext
from weft.durable.durable_call import DurableCallConfig, DurableCallDeps, DurableEmbedding, DurableGeneration
from weft.durable.tasks import TaskPort
from weft.kernel.clock import Clock


class JournalingDispatcher:
    """A RequestDispatcher over another, and over whoever runs tasks."""

    def __init__(
        self, dispatcher: RequestDispatcher, tasks: TaskPort, clock: Clock, config: DurableCallConfig | None = None
    ) -> None:
        self._dispatcher = dispatcher
        self._tools = DurableCallDeps(tasks, clock, config or DurableCallConfig())

    def generate(self, context: RequestContext, payload: GenerationPayload) -> Generation:
        """See RequestDispatcher.generate."""
        if context.journal is not None:
            return DurableGeneration(self._tools, context, context.journal, payload)
        return self._dispatcher.generate(context, payload)

    def embed(self, context: RequestContext, payload: embedding_pb2.EmbeddingPayload) -> Embedding:
        """See RequestDispatcher.embed."""
        if context.journal is not None:
            return DurableEmbedding(self._tools, context, context.journal, payload)
        return self._dispatcher.embed(context, payload)

    def rerank(self, context: RequestContext, payload: rerank_pb2.RerankPayload) -> Whole[list[rerank_pb2.RerankScore]]:
        """See RequestDispatcher.rerank. It and what follows are never journaled."""
        return self._dispatcher.rerank(context, payload)

    def tokenize(
        self, context: RequestContext, payload: tokenize_pb2.TokenizePayload
    ) -> Whole[tokenize_pb2.TokenizeResult]:
        """See RequestDispatcher.tokenize."""
        return self._dispatcher.tokenize(context, payload)

    def generate_images(
        self, context: RequestContext, payload: image_pb2.ImagePayload
    ) -> Whole[list[image_pb2.GeneratedImage]]:
        """See RequestDispatcher.generate_images."""
        return self._dispatcher.generate_images(context, payload)

    def transcribe(
        self, context: RequestContext, payload: audio_pb2.TranscriptionPayload
    ) -> Whole[audio_pb2.Transcription]:
        """See RequestDispatcher.transcribe."""
        return self._dispatcher.transcribe(context, payload)

    def speak(self, context: RequestContext, payload: audio_pb2.SpeechPayload) -> Speech:
        """See RequestDispatcher.speak."""
        return self._dispatcher.speak(context, payload)
