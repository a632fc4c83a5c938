"""The table of operations: the payload, rpcs and result of each.

Dispatchers, the router's public service and relay, and runner servicers all use this table; CONTRIBUTING lists what a
new operation needs. A row's `fold` converts a runner's response to a chunk for the caller.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from weft.api.common.v1 import (
    audio_pb2,
    chat_pb2,
    completion_pb2,
    embedding_pb2,
    image_pb2,
    receipt_pb2,
    rerank_pb2,
    tokenize_pb2,
    warning_pb2,
)
from weft.api.router.v1 import inference_service_pb2
from weft.api.runner.v1 import embedding_service_pb2, generation_service_pb2, model_call_service_pb2
from weft.dispatch import payload_checks
from weft.dispatch.frames import Frame, GenerationPayload, collected_images, collected_transcription, has_content
from weft.dispatch.placement import Decision, waiting_event
from weft.dispatch.request_receipt import RequestTrace, is_miscounted
from weft.kernel.channels.rpc import RpcMethod
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.schemas.json_schema import SchemaLimits

PayloadT = TypeVar("PayloadT", bound=Message)
ChunkT = TypeVar("ChunkT")


class Attempt(Protocol):
    """An attempt of a request, as `fold` sees it."""

    has_content: bool
    trace: RequestTrace

    def note_content(self) -> None:
        """Records the first content, which rules out failover."""
        ...

    def note_tools(self, frame: Frame) -> None:
        """Records the tool calls and tool results of a frame."""
        ...

    def complete(self, runner_part: receipt_pb2.Receipt) -> receipt_pb2.Receipt:
        """Returns the receipt of the completed request, given the runner's part."""
        ...


@dataclass(frozen=True, slots=True)
class SpeechPiece:
    """A chunk of speech."""

    data: bytes
    media_type: str
    """Media type of the recording; set only in the first chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeAnswer:
    """A unary method of the public service that returns the whole answer of a streamed operation."""

    rpc: RpcMethod
    field: str
    collect: Callable[[Iterable[Frame]], Any]
    """Builds the result from all frames of the stream."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperationSpec(Generic[PayloadT, ChunkT]):
    """An operation. A unary one has exactly one chunk, its result."""

    operation: Operation
    runner_rpc: RpcMethod
    """The runner's method. Its request has a ticket, the payload and options."""
    router_rpc: RpcMethod
    """The method of the public service. Its request has a model, the payload and options."""
    check: Callable[[PayloadT, SchemaLimits], list[warning_pb2.Warning] | None]
    """Returns warnings about the payload of a public call. Raises INVALID_ARGUMENT naming the wrong field."""
    fold: Callable[[Attempt, Any], ChunkT | None]
    """Returns the chunk in a runner's response, None if it has none; reports to the attempt."""
    field: str = ""
    """The chunk's field in the responses of both rpcs; empty: the response has the chunk's fields."""
    payload_field: str = "payload"
    streamed: bool = False
    waiting: Callable[[Decision], ChunkT] | None = None
    """Returns the chunk that tells the caller that the request waits; None: callers are not informed."""
    takes_slot: bool = True
    """Whether it occupies a slot of the model."""
    whole: WholeAnswer | None = None
    """The public unary method of a streamed operation; None: there is none."""

    def fields(self, chunk: ChunkT) -> dict[str, Any]:
        """Returns the response fields of a chunk."""
        return {self.field: chunk} if self.field else {name: getattr(chunk, name) for name in type(chunk).__slots__}  # type: ignore[attr-defined]  # a slotted dataclass


_OF_TOOLS = frozenset({"tool_call", "tool_result", "warning"})
"""The last events of frames with tool calls or their results."""


def _frame(attempt: Attempt, response: generation_service_pb2.GenerateResponse) -> Frame:
    frame = [event for event in response.events if not (event.HasField("usage") and is_miscounted(event.usage))]
    trace = attempt.trace
    if trace.seen is not None:
        # Counted here so that interrupted answers are included.
        trace.seen.note(frame)
    if not attempt.has_content and has_content(frame):
        attempt.note_content()
    last = frame[-1].WhichOneof("event") if frame else None
    if last in _OF_TOOLS:
        attempt.note_tools(frame)
    elif last == "usage":
        trace.usage = frame[-1].usage
    elif last == "finished":
        finished = frame[-1].finished
        finished.receipt.CopyFrom(attempt.complete(finished.receipt))
    return frame


def _speech(attempt: Attempt, response: model_call_service_pb2.SpeakResponse) -> SpeechPiece | None:
    """Returns the next chunk unless it is empty. Raises WORKER_LOST if the stream ends without one."""
    piece = None
    if response.data:
        piece = SpeechPiece(response.data, "" if attempt.has_content else response.media_type)
        if not attempt.has_content:
            attempt.note_content()
    if response.HasField("receipt"):
        if not attempt.has_content:
            raise ended_early()
        attempt.complete(response.receipt)
    return piece


def ended_early() -> WeftError:
    """Returns the error for a runner's stream that ended without a result."""
    return WeftError(Reason.WORKER_LOST, "the runner ended the stream without a result")


def _unary(operation: Operation, service: Any, method: str, field: str, check: Callable[..., Any], **more: Any) -> Any:
    """Returns the row of a unary operation whose result is `field` in the responses of both rpcs."""

    def fold(attempt: Attempt, response: Any) -> Any:
        attempt.complete(response.receipt)
        result = getattr(response, field)
        return result if isinstance(result, Message) else list(result)

    return OperationSpec(
        operation=operation,
        runner_rpc=_runner_rpc(service, method),
        router_rpc=_router_rpc(method),
        check=check,
        fold=fold,
        field=field,
        **more,
    )


def _generation(operation: Operation, method: str, payload_field: str, check: Callable[..., Any]) -> Any:
    return OperationSpec(
        operation=operation,
        runner_rpc=_runner_rpc(generation_service_pb2, "Generate"),
        router_rpc=_router_rpc(method),
        check=check,
        fold=_frame,
        field="events",
        payload_field=payload_field,
        streamed=True,
        waiting=lambda decision: [waiting_event(decision)],
    )


def _event_stream(operation: Operation, method: str, check: Callable[[Any], None], whole: WholeAnswer) -> Any:
    return OperationSpec(
        operation=operation,
        runner_rpc=_runner_rpc(_MODEL_CALLS, method),
        router_rpc=_router_rpc(method),
        check=_plain(check),
        fold=_frame,
        field="events",
        streamed=True,
        waiting=lambda decision: [waiting_event(decision)],
        whole=whole,
    )


def _plain(check: Callable[[Any], None]) -> Callable[[Any, SchemaLimits], None]:
    """Adapts the check of a payload without JSON schemas."""
    return lambda payload, _schemas: check(payload)


def _runner_rpc(module: Any, method: str) -> RpcMethod:
    (service,) = module.DESCRIPTOR.services_by_name.values()
    return RpcMethod(service.methods_by_name[method])


def _router_rpc(method: str) -> RpcMethod:
    return _runner_rpc(inference_service_pb2, method)


_EMBEDDINGS, _MODEL_CALLS = embedding_service_pb2, model_call_service_pb2

CHAT: OperationSpec[chat_pb2.ChatPayload, Frame] = _generation(
    Operation.CHAT, "Chat", "chat", payload_checks.check_chat
)
COMPLETION: OperationSpec[completion_pb2.CompletionPayload, Frame] = _generation(
    Operation.COMPLETION, "Complete", "completion", _plain(payload_checks.check_completion)
)
EMBEDDING: OperationSpec[embedding_pb2.EmbeddingPayload, list[embedding_pb2.Embedding]] = _unary(
    Operation.EMBEDDING, _EMBEDDINGS, "Embed", "embeddings", _plain(payload_checks.check_embedding)
)
RERANK: OperationSpec[rerank_pb2.RerankPayload, list[rerank_pb2.RerankScore]] = _unary(
    Operation.RERANK, _MODEL_CALLS, "Rerank", "scores", _plain(payload_checks.check_rerank)
)
TOKENIZE: OperationSpec[tokenize_pb2.TokenizePayload, tokenize_pb2.TokenizeResult] = _unary(
    Operation.TOKENIZE, _MODEL_CALLS, "Tokenize", "result", payload_checks.check_tokenize, takes_slot=False
)
IMAGE: OperationSpec[image_pb2.ImagePayload, Frame] = _event_stream(
    Operation.IMAGE,
    "StreamImages",
    payload_checks.check_images,
    whole=WholeAnswer(_router_rpc("GenerateImages"), "images", collected_images),
)
TRANSCRIPTION: OperationSpec[audio_pb2.TranscriptionPayload, Frame] = _event_stream(
    Operation.TRANSCRIPTION,
    "StreamTranscription",
    payload_checks.check_transcription,
    whole=WholeAnswer(_router_rpc("Transcribe"), "transcription", collected_transcription),
)
SPEECH: OperationSpec[audio_pb2.SpeechPayload, SpeechPiece] = OperationSpec(
    operation=Operation.SPEECH,
    runner_rpc=_runner_rpc(_MODEL_CALLS, "Speak"),
    router_rpc=_router_rpc("Speak"),
    check=_plain(payload_checks.check_speech),
    fold=_speech,
    streamed=True,
)

OPERATIONS: Mapping[Operation, OperationSpec[Any, Any]] = MappingProxyType(
    {spec.operation: spec for spec in (CHAT, COMPLETION, EMBEDDING, RERANK, TOKENIZE, IMAGE, TRANSCRIPTION, SPEECH)}
)


_BY_PAYLOAD = {
    spec.router_rpc.request.DESCRIPTOR.fields_by_name["payload"].message_type.full_name: spec
    for spec in OPERATIONS.values()
}


def operation_of(payload: Message) -> OperationSpec[Any, Any]:
    """Returns the operation of a payload. Raises KeyError for other messages."""
    return _BY_PAYLOAD[payload.DESCRIPTOR.full_name]


def generation_of(payload: GenerationPayload) -> OperationSpec[Any, Frame]:
    """Returns the operation of a generation payload."""
    return CHAT if isinstance(payload, chat_pb2.ChatPayload) else COMPLETION
