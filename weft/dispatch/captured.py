"""The prompt and the answer of a request as text, for tenants whose declaration has `capture`, sent to the registry.

Nothing here is logged; the text leaves this process only to the registry, which encrypts it.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from typing_extensions import override

from weft.api.common.v1 import chat_pb2, completion_pb2, event_pb2, receipt_pb2
from weft.api.registry.v1 import capture_service_pb2 as pb
from weft.api.registry.v1.capture_service_pb2_grpc import CaptureServiceStub
from weft.dispatch.fleet import FleetView
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.request_receipt import RequestContext
from weft.dispatch.run_observer import ObservedRun, RunObserver
from weft.kernel.channels.rpc import calling
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import CacheMode
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.text.json_objects import plain_object
from weft.kernel.values.units import size_words

log = get_logger("weft.captures")

MAX_TEXT_BYTES = 262_144
"""Maximum bytes of a captured prompt, and of a captured answer; the rest is cut off."""
MAX_SENDING = 32
"""Maximum captures on their way to the registry: 16 MiB of text. Further ones are dropped."""
SEND_TIMEOUT_SECONDS = 5.0
STOP_SECONDS = 1.0


class _LabeledText:
    """Parts of text, each after a line with its label in brackets; cut off after MAX_TEXT_BYTES."""

    def __init__(self, label: str = "") -> None:
        """A first part with this label has no such line."""
        self.is_cut = False
        self._pieces: list[str] = []
        self._left = MAX_TEXT_BYTES
        self._label = label

    def begin(self, label: str) -> None:
        """Begins another part."""
        self._label = label
        self._append(f"\n\n[{label}]\n" if self._pieces else f"[{label}]\n")

    def add(self, label: str, text: str) -> None:
        """Continues the last part, or begins another if that has another label."""
        if label != self._label:
            self.begin(label)
        self._append(text)

    def _append(self, text: str) -> None:
        if self.is_cut:
            return
        data = text.encode()
        self.is_cut = len(data) > self._left
        self._pieces.append(data[: self._left].decode(errors="ignore"))
        self._left -= len(data)

    def __str__(self) -> str:
        return "".join(self._pieces)


class CapturedRequest(ObservedRun):
    """The prompt of a request, and its answer as far as it was sent."""

    stores_text = True

    def __init__(
        self,
        context: RequestContext,
        payload: GenerationPayload,
        send: Callable[["CapturedRequest"], None] = lambda _: None,
    ) -> None:
        """`send` gets it at its end."""
        self._request_id, self._tenant = context.request_id, context.tenant
        self._prompt = _prompt_of(payload)
        self._answer = _LabeledText("answer")
        self._send = send

    @override
    def add(self, frame: Frame) -> None:
        _add_answer(self._answer, frame)

    @override
    def end(self, receipt: receipt_pb2.Receipt) -> None:
        if receipt.captured:
            self._send(self)

    def message(self) -> pb.Capture:
        """Returns it for the registry."""
        return pb.Capture(
            request_id=self._request_id,
            tenant=self._tenant,
            prompt=str(self._prompt),
            answer=str(self._answer),
            prompt_cut=self._prompt.is_cut,
            answer_cut=self._answer.is_cut,
        )


def may_capture(view: FleetView, context: RequestContext, payload: Any) -> bool:
    """Whether prompt and answer may be kept: the tenant has `capture`, it is not marked, and it has a text answer."""
    tenant = view.tenants.get(context.tenant)
    if tenant is None or not tenant.manifest.capture or context.handling.cache_mode is CacheMode.NONE:
        return False
    return isinstance(payload, (chat_pb2.ChatPayload, completion_pb2.CompletionPayload))


def prompt_text(payload: GenerationPayload) -> str:
    """Returns the messages of a request as text, each after a line with its role in brackets."""
    return str(_prompt_of(payload))


def answer_text(events: Iterable[event_pb2.InferenceEvent]) -> str:
    """Returns an answer as text; reasoning and tool calls follow a line with their kind in brackets."""
    text = _LabeledText("answer")
    _add_answer(text, events)
    return str(text)


def _add_answer(text: _LabeledText, events: Iterable[event_pb2.InferenceEvent]) -> None:
    for event in events:
        for label, part in _answer_parts(event):
            text.add(label, part)


def _prompt_of(payload: GenerationPayload) -> _LabeledText:
    text = _LabeledText()
    if isinstance(payload, completion_pb2.CompletionPayload):
        for prompt in payload.prompts:
            text.begin("prompt")
            text.add("prompt", prompt.text or f"({len(prompt.tokens.ids):,} token ids)")
        return text
    for message in payload.messages:
        role = chat_pb2.Role.Name(message.role).removeprefix("ROLE_").lower()
        text.begin(role)
        for part in message.content:
            kind = part.WhichOneof("kind")
            medium = part.image if kind == "image" else part.audio
            text.add(role, part.text if kind == "text" else f"({medium.media_type}, {size_words(len(medium.data))})")
        for call in message.tool_calls:
            text.begin(f"tool call {call.name}")
            text.add(f"tool call {call.name}", call.arguments_text)
    return text


def _answer_parts(event: event_pb2.InferenceEvent) -> Iterator[tuple[str, str]]:
    """Yields the parts of an answer in an event, with their labels."""
    kind = event.WhichOneof("event")
    if kind == "delta":
        delta, choice = event.delta, f" {event.delta.index + 1}" if event.delta.index else ""
        for label, text in (("reasoning", delta.reasoning), ("answer", delta.text), ("refusal", delta.refusal)):
            if text:
                yield f"{label}{choice}", text
        for call in delta.tool_calls:
            yield f"tool call {call.index + 1}{choice}", f"{call.name}{' ' if call.name else ''}{call.arguments_text}"
    elif kind == "tool_call":
        ran = event.tool_call
        yield f"tool call {ran.id}", f"{ran.name} {json.dumps(plain_object(ran.arguments), ensure_ascii=False)}"
    elif kind == "tool_result":
        yield f"tool result {event.tool_result.id}", event.tool_result.content


class CaptureSender(RunObserver):
    """Sends captures to the registry, each once: one that the registry does not take is dropped, and logged."""

    def __init__(self, registry: Callable[[], Any]) -> None:
        """`registry` returns a channel, None while there is none."""
        self._registry = registry
        self._sending: set[asyncio.Task[None]] = set()

    @override
    def observe(self, view: FleetView, context: RequestContext, payload: Any) -> CapturedRequest | None:
        return CapturedRequest(context, payload, self.send) if may_capture(view, context, payload) else None

    def send(self, captured: CapturedRequest) -> None:
        """Sends a capture in the background. Returns immediately."""
        if len(self._sending) >= MAX_SENDING:
            log.warning("capture dropped", why=f"{MAX_SENDING} are being sent")
            return
        task = start_task(self._send(captured), name="capture")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def stop(self) -> None:
        """Waits a moment for those that are being sent, and drops the rest. Safe to call twice."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=STOP_SECONDS)
            await stop_tasks(list(self._sending))

    async def _send(self, captured: CapturedRequest) -> None:
        channel = self._registry()
        if channel is None:
            return
        stub: Any = CaptureServiceStub(channel)
        try:
            with calling(Reason.SERVICE_UNAVAILABLE):
                request = pb.StoreCaptureRequest(capture=captured.message())
                await stub.StoreCapture(request, timeout=SEND_TIMEOUT_SECONDS)
        except WeftError as error:
            log.warning("capture dropped", why=error.message)
