"""Embeddings as tasks."""

from collections.abc import Iterable

from gateway.answers.chunks import unfinished_answer
from gateway.media import RequestMedia
from gateway.openai import embedding_payload
from gateway.openai.embedding_schema import EmbeddingRequest
from gateway.openai.prompts import prompt_count
from gateway.tasks.base import JsonSurface
from weft.api.common.v1 import embedding_pb2, receipt_pb2
from weft.api.router.v1 import task_pb2
from weft.durable.tasks import Task
from weft.kernel.request import Operation


class EmbeddingSurface(JsonSurface[EmbeddingRequest]):
    """`/v1/embeddings`."""

    kind = "embeddings"
    endpoint = "/v1/embeddings"
    operation = Operation.EMBEDDING
    schema = EmbeddingRequest

    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        """See Surface.answer."""
        asked = self._asked(origin)
        vectors, receipt = vectors_of(outputs)
        return embedding_payload.to_body(
            vectors,
            expected=prompt_count(asked.input),
            model=receipt.model or task.model,
            usage=receipt.usage,
            as_base64=asked.encoding_format == "base64",
            dimensions=asked.dimensions,
        )

    def _model(self, asked: EmbeddingRequest) -> str:
        return asked.model

    def _payload(self, asked: EmbeddingRequest, media: RequestMedia) -> embedding_pb2.EmbeddingPayload:  # noqa: ARG002 - an embedding has none
        return embedding_payload.to_payload(asked, self._parts.config.limits)


def vectors_of(
    outputs: Iterable[task_pb2.TaskOutput],
) -> tuple[list[embedding_pb2.Embedding], receipt_pb2.Receipt]:
    """The vectors that are kept, and what happened. Raises BACKEND_PROTOCOL_ERROR where the end is missing."""
    vectors: list[embedding_pb2.Embedding] = []
    receipt: receipt_pb2.Receipt | None = None
    for output in outputs:
        vectors.extend(output.embeddings)
        for event in output.events:
            if event.HasField("finished"):
                receipt = event.finished.receipt
    if receipt is None:
        raise unfinished_answer()
    return vectors, receipt
