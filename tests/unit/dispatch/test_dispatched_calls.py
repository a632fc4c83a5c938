"""Requests that are answered whole, and speech, against a scripted scheduler and a real runner stub over gRPC."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from test_dispatcher import DIED, ScriptedScheduler

from weft.api.common.v1 import audio_pb2, event_pb2, image_pb2, receipt_pb2, rerank_pb2, tokenize_pb2
from weft.api.runner.v1 import model_call_service_pb2 as pb
from weft.api.runner.v1 import model_call_service_pb2_grpc
from weft.dispatch.call import Call
from weft.dispatch.dispatcher import Dispatcher
from weft.dispatch.operation_table import IMAGE, RERANK, SPEECH, TOKENIZE, SpeechPiece
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.channels.rpc import ChannelPool, answering, new_server
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft.link.carried_calls import CallStreams
from weft_testing.carried import carry

QUERY = rerank_pb2.RerankPayload(query="a cat", documents=["a dog", "a much longer document about some cats"])
WORDS = audio_pb2.SpeechPayload(input="Hello", voice="alloy")
SOUND = pb.SpeakResponse(data=b"some", media_type="audio/mpeg")
END = pb.SpeakResponse(receipt=receipt_pb2.Receipt(host="titan"))

LIGHTHOUSE = image_pb2.ImagePayload(prompt="a lighthouse")
STEP = pb.StreamImagesResponse(
    events=[
        event_pb2.InferenceEvent(work_progress=event_pb2.WorkProgress(unit=event_pb2.WORK_UNIT_STEPS, done=3, total=20))
    ]
)


def _image_frame(index: int) -> pb.StreamImagesResponse:
    return pb.StreamImagesResponse(events=[event_pb2.InferenceEvent(image=image_pb2.GeneratedImage(index=index))])


def _images_end(steps: int) -> pb.StreamImagesResponse:
    receipt = receipt_pb2.Receipt(host="titan")
    receipt.usage.image_steps = steps
    return pb.StreamImagesResponse(events=[event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt))])


class ScriptedRunner(model_call_service_pb2_grpc.ModelCallServiceServicer):
    """Plays one script per call."""

    def __init__(self, *scripts: Any) -> None:
        self._scripts = list(scripts)
        self.whole: list[bool] = []

    async def Rerank(self, request: pb.RerankRequest, context: Any) -> pb.RerankResponse:  # noqa: N802
        async with answering(context):
            step = self._scripts.pop(0)
            if isinstance(step, Exception):
                raise step
            return step  # type: ignore[no-any-return]
        raise AssertionError("abort raises")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        async with answering(context):
            return pb.TokenizeResponse(result=tokenize_pb2.TokenizeResult(count=len(request.payload.text)))
        raise AssertionError("abort raises")

    async def StreamImages(  # noqa: N802
        self, request: pb.StreamImagesRequest, context: Any
    ) -> AsyncIterator[pb.StreamImagesResponse]:
        async with answering(context):
            self.whole.append(request.options.whole)
            for step in self._scripts.pop(0):
                if isinstance(step, Exception):
                    raise step
                yield step

    async def StreamTranscription(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        raise NotImplementedError

    async def Speak(self, request: pb.SpeakRequest, context: Any) -> AsyncIterator[pb.SpeakResponse]:  # noqa: N802
        async with answering(context):
            for step in self._scripts.pop(0):
                if isinstance(step, Exception):
                    raise step
                yield step


@asynccontextmanager
async def _dispatching(folder: Path, *scripts: Any) -> AsyncGenerator[tuple[Dispatcher, ScriptedScheduler]]:
    server, channels = new_server(), ChannelPool()
    carry(server, ScriptedRunner(*scripts), pb)
    address = f"unix:{folder / 'runner.sock'}"
    server.add_insecure_port(address)
    await server.start()
    scheduler = ScriptedScheduler(address)
    try:
        yield Dispatcher(scheduler, CallStreams(channels)), scheduler
    finally:
        await channels.close()
        await server.stop(grace=0.5)


def _context(operation: Operation, model: str = "m") -> RequestContext:
    return RequestContext(request_id="r1", tenant="t", model=model, operation=operation, traceparent=new_traceparent())


async def test_scores_are_retried_and_the_receipt_has_both_attempts(tmp_path: Path) -> None:
    answer = pb.RerankResponse(scores=[rerank_pb2.RerankScore(index=1, score=0.5)])
    answer.receipt.usage.prompt_tokens = 9
    async with _dispatching(tmp_path, DIED, answer) as (dispatcher, scheduler):
        call = dispatcher.call(RERANK, _context(Operation.RERANK), QUERY)
        scores = await call.result()
    assert [score.index for score in scores] == [1]
    assert scheduler.failed == [(1, Reason.SERVER_DIED)]
    assert scheduler.finished == [Reason.UNSPECIFIED]
    assert call.receipt is not None
    assert (len(call.receipt.attempts), call.receipt.usage.prompt_tokens) == (2, 9)
    assert scheduler.asked is not None
    # The query with its longest document, at four characters a token: each is read with the query by itself.
    assert (scheduler.asked.operation, scheduler.asked.prompt_tokens) == (Operation.RERANK, 10)


async def test_token_count_reserves_no_capacity_for_any_text_length(tmp_path: Path) -> None:
    async with _dispatching(tmp_path) as (dispatcher, scheduler):
        payload = tokenize_pb2.TokenizePayload(text="a" * 10_000)
        assert (await dispatcher.call(TOKENIZE, _context(Operation.TOKENIZE), payload).result()).count == 10_000
    assert scheduler.asked is not None
    assert (scheduler.asked.prompt_tokens, scheduler.asked.max_output_tokens) == (0, 0)
    assert scheduler.asked.prefix_digests == ()


async def test_speech_is_streamed_in_chunks_and_the_first_has_its_format(tmp_path: Path) -> None:
    async with _dispatching(tmp_path, [SOUND, pb.SpeakResponse(data=b"more"), END]) as (dispatcher, scheduler):
        call = dispatcher.call(SPEECH, _context(Operation.SPEECH), WORDS)
        pieces = [piece async for piece in call.chunks()]
    assert [(piece.data, piece.media_type) for piece in pieces] == [(b"some", "audio/mpeg"), (b"more", "")]
    assert scheduler.first_content == [1]
    assert call.receipt is not None
    assert (call.receipt.outcome, call.receipt.host) == (receipt_pb2.OUTCOME_COMPLETED, "titan")


async def test_speech_that_fails_before_its_first_byte_is_retried(tmp_path: Path) -> None:
    async with _dispatching(tmp_path, [DIED], [SOUND, END]) as (dispatcher, scheduler):
        pieces = [piece.data async for piece in dispatcher.call(SPEECH, _context(Operation.SPEECH), WORDS).chunks()]
    assert pieces == [b"some"]
    assert scheduler.failed == [(1, Reason.SERVER_DIED)]


@pytest.mark.parametrize("script", [[SOUND, DIED], [SOUND]], ids=["an error", "an end without a receipt"])
async def test_speech_that_breaks_off_is_not_restarted(tmp_path: Path, script: list[Any]) -> None:
    pieces: list[bytes] = []

    async def listen(call: Call[SpeechPiece]) -> None:
        async for piece in call.chunks():
            pieces.append(piece.data)  # noqa: PERF401 - what came before the error counts

    async with _dispatching(tmp_path, script, [SOUND, END]) as (dispatcher, scheduler):
        call = dispatcher.call(SPEECH, _context(Operation.SPEECH), WORDS)
        with pytest.raises(WeftError) as failed:
            await listen(call)
    assert pieces == [b"some"]
    assert failed.value.metadata["content_started"] == "true"
    assert scheduler.failed == []
    assert call.receipt is not None
    assert call.receipt.outcome == receipt_pb2.OUTCOME_FAILED


async def test_runner_without_any_event_counts_as_not_started(tmp_path: Path) -> None:
    async with _dispatching(tmp_path, [END], [SOUND, END]) as (dispatcher, scheduler):
        pieces = [piece.data async for piece in dispatcher.call(SPEECH, _context(Operation.SPEECH), WORDS).chunks()]
    assert pieces == [b"some"]
    assert scheduler.failed == [(1, Reason.WORKER_LOST)]


async def test_agent_supports_neither_ranking_nor_speech(tmp_path: Path) -> None:
    async with _dispatching(tmp_path) as (dispatcher, scheduler):
        with pytest.raises(WeftError) as refused:
            await dispatcher.call(RERANK, _context(Operation.RERANK, "agent/someone"), QUERY).result()
        with pytest.raises(WeftError) as unheard:
            async for _ in dispatcher.call(SPEECH, _context(Operation.SPEECH, "agent/someone"), WORDS).chunks():
                pass
    assert refused.value.reason is unheard.value.reason is Reason.UNSUPPORTED_OPERATION
    assert scheduler.asked is None


async def test_images_are_one_result_ordered_by_index(tmp_path: Path) -> None:
    script = [STEP, _image_frame(1), _image_frame(0), _images_end(40)]
    async with _dispatching(tmp_path, script) as (dispatcher, scheduler):
        call = dispatcher.call(IMAGE, _context(Operation.IMAGE), LIGHTHOUSE)
        images = await call.whole_result()
    assert [image.index for image in images] == [0, 1]
    assert scheduler.first_content == [1]
    assert call.receipt is not None
    assert (call.receipt.outcome, call.receipt.usage.image_steps) == (receipt_pb2.OUTCOME_COMPLETED, 40)


async def test_images_are_retried_elsewhere_if_the_runner_is_lost_after_some_steps(tmp_path: Path) -> None:
    async with _dispatching(tmp_path, [STEP, DIED], [STEP, _image_frame(0), _images_end(20)]) as (
        dispatcher,
        scheduler,
    ):
        call = dispatcher.call(IMAGE, _context(Operation.IMAGE), LIGHTHOUSE)
        assert len(await call.whole_result()) == 1
    assert scheduler.failed == [(1, Reason.SERVER_DIED)]


async def test_delivered_images_are_not_generated_again(tmp_path: Path) -> None:
    async with _dispatching(tmp_path, [_image_frame(0), DIED]) as (dispatcher, _):
        with pytest.raises(WeftError) as failed:
            await dispatcher.call(IMAGE, _context(Operation.IMAGE), LIGHTHOUSE).whole_result()
    assert failed.value.reason is Reason.SERVER_DIED
