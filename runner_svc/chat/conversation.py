"""Conversations with an engine: a single turn, or the tool loop with tools and signals between turns."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from runner_svc.backend.port import CallInfo
from runner_svc.chat.history import needs_system_prompt, with_system_prompt
from runner_svc.chat.offer import make_offer, require_local
from runner_svc.chat.receipt import AnswerReceipt
from runner_svc.chat.repetition_watch import RepetitionWatch, repetition_watch
from runner_svc.chat.request import ChatEngine, ChatRequest, ChatSetup
from runner_svc.chat.tool_loop import ToolLoop
from runner_svc.chat.turn import TurnMonitor
from runner_svc.request_records import RequestRecord
from weft.api.common.v1 import chat_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors import WeftError


def converse(work: ChatEngine, request: ChatRequest, setup: ChatSetup) -> AsyncGenerator[Frame]:
    """Returns the frames of the answer to a request, as Backend.generate, with the events of tools and signals.

    Raises, beside the engine's own errors: INVALID_ARGUMENT and TOOL_UNAVAILABLE before anything is generated,
    TOOL_CALL_INVALID for a call that cannot be executed, REPEATED_LINE_LOOP where the policy is to kill.
    """
    request = _with_default_maximum(request, setup.settings.default_max_tokens)
    if not isinstance(request.payload, chat_pb2.ChatPayload):
        watch = repetition_watch(request.behaviour, setup.settings, request.payload)
        return _single_turn(work, request.payload, request.call, watch)
    offer = make_offer(request.payload, request.behaviour, setup.settings, setup.tools)
    if not request.allow_remote:
        require_local(offer, setup.tools)
    if not offer.is_plain:
        return ToolLoop(work, request, request.payload, setup, offer).frames()
    prompt = setup.prompt(request, offer, iterations_left=0, text_calls=False)
    joined = setup.settings.system_messages == "joined"
    payload = request.payload
    if needs_system_prompt(payload, prompt, joined=joined):
        payload = with_system_prompt(payload, prompt, joined=joined)
    watch = repetition_watch(request.behaviour, setup.settings, request.payload)
    return _single_turn(work, payload, request.call, watch)


def _with_default_maximum(request: ChatRequest, default_max_tokens: int | None) -> ChatRequest:
    """Returns the request with the model's default maximum of tokens, where it sets none itself."""
    if default_max_tokens is None or request.payload.sampling.HasField("max_tokens"):
        return request
    payload = type(request.payload)()
    payload.CopyFrom(request.payload)  # type: ignore[arg-type]  # the same type
    payload.sampling.max_tokens = default_max_tokens
    return replace(request, payload=payload)


async def _single_turn(
    work: ChatEngine, payload: GenerationPayload, call: CallInfo, watch: RepetitionWatch | None
) -> AsyncGenerator[Frame]:
    """Run a single turn, with its warnings on the receipt."""
    answer = AnswerReceipt(work.record)
    monitor = TurnMonitor(payload, answer, watch, whole=call.whole)
    async with aclosing(work.generate(payload, call)) as frames:
        async for frame in frames:
            try:
                warned = monitor.look(frame)
            except WeftError as loop:
                # The engine stops before the caller receives the error.
                await frames.aclose()
                yield monitor.usage_so_far()
                raise answer.with_usage(loop) from None
            if warned:
                yield warned
            if frame and frame[-1].WhichOneof("event") == "finished":
                frame[-1:] = [*monitor.late_warnings(frame[-1].finished.receipt.usage), frame[-1]]
            _note(frame, work.record, answer)
            yield frame


def _note(frame: Frame, record: RequestRecord, answer: AnswerReceipt) -> None:
    """Record the output and the warnings of a frame; fill in a receipt in it."""
    pieces: list[str] = []
    for event in frame:
        match event.WhichOneof("event"):
            case "delta":
                delta = event.delta
                pieces.append(delta.text or delta.reasoning)
            case "warning":
                answer.note_warning(event.warning)
            case "finished":
                answer.fill(event.finished.receipt)
    if text := "".join(pieces):
        record.note_output(text)
