"""The catalogue of wrong answers: each fails one request with the reason in its row, and nothing else."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from kit.engine_settings import engine_settings
from kit.engines import chat
from kit.hostile_engine.catalogue import MALFORMED, ROWS, Ask, Row
from kit.hostile_engine.server import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    Connection,
    HostileServer,
    Request,
    chunked,
    end,
    hostile_server,
    piece,
    tidy,
)
from restart_stage import Repaving, living

from runner_svc.backend.port import CallInfo
from runner_svc.instance.admission import AdmittedRequest
from runner_svc.instance.instance_settings import HibernationSettings
from runner_svc.policy.lifecycle import Phase
from runner_svc.runtimes.openai_http.openai_http_backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import OpenAiHttpModel
from weft.api.common.v1 import audio_pb2, chat_pb2, completion_pb2, embedding_pb2, image_pb2, rerank_pb2, tokenize_pb2
from weft.kernel.channels.rpc import error_to_status
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.structured_logs import new_traceparent

ALL_OPERATIONS = tuple(each.name.lower() for each in Operation)
NEIGHBOUR, GOOD, BAD = "neighbour", "good", "bad"
MEBIBYTE = 1024 * 1024
MAX_GROWTH_BYTES = 64 * MEBIBYTE
REQUEST_SECONDS = 10.0
MAX_SLICE_BYTES = 1_400
"""Of an answer that comes in parts, as over a network."""


def _by_size(row: Row) -> Any:
    marks = (pytest.mark.slow("a large answer"),) if len(row.answer) > MEBIBYTE else ()
    return pytest.param(row, id=row.name, marks=marks)


@dataclass
class Engine:
    """The hostile server: it answers one request well but slowly, one as in the row, others well."""

    row: Row | None = None
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    slice_bytes: int = 0
    """Bytes that are written at once; 0: all."""

    async def handle(self, connection: Connection, request: Request) -> None:
        if self.row is None or request.words == GOOD:
            await connection.send(tidy("well"))
        elif request.words == NEIGHBOUR:
            await connection.send(STREAM_HEAD + chunked(piece("from ")))
            await self.goes_on.wait()
            await connection.send(chunked(piece("end to end") + end() + DONE) + LAST_CHUNK)
        elif not self.row.answer:
            connection.reset()
        else:
            step = self.slice_bytes or len(self.row.answer)
            for start in range(0, len(self.row.answer), step):
                await connection.send(self.row.answer[start : start + step])
                await asyncio.sleep(0)
            await connection.close()


@dataclass
class Outcome:
    text: str = ""
    finish_reasons: int = 0
    finished: int = 0
    error: WeftError | None = None
    unforeseen: BaseException | None = None


async def _generate(work: AdmittedRequest, payload: Any, call: CallInfo, outcome: Outcome) -> None:
    async for frame in work.generate(payload, call):
        for event in frame:
            outcome.text += event.delta.text
            outcome.finish_reasons += bool(event.delta.finish_reason)
            outcome.finished += event.HasField("finished")
            event.SerializeToString()


async def _stream(work: AdmittedRequest, operation: Operation, payload: Any, call: CallInfo) -> None:
    async for frame in work.stream(operation, payload, call):
        for event in frame:
            event.SerializeToString()


async def _work(work: AdmittedRequest, ask: Ask, words: str, call: CallInfo, outcome: Outcome) -> None:
    prompts = [completion_pb2.PromptInput(text=text) for text in (words, "b")]
    generations = {
        Ask.CHAT: chat(words),
        Ask.TWO_CHOICES: chat(words, choice_count=2),
        Ask.COMPLETION: completion_pb2.CompletionPayload(prompts=prompts[:1]),
    }
    if ask in generations:
        await _generate(work, generations[ask], call, outcome)
        return
    match ask:
        case Ask.EMBEDDING:
            await work.run(Operation.EMBEDDING, embedding_pb2.EmbeddingPayload(inputs=prompts), call)
        case Ask.RERANK:
            await work.run(Operation.RERANK, rerank_pb2.RerankPayload(query=words, documents=["a", "b"]), call)
        case Ask.TOKENIZE:
            await work.run(Operation.TOKENIZE, tokenize_pb2.TokenizePayload(text=words), call)
        case Ask.IMAGE:
            await _stream(work, Operation.IMAGE, image_pb2.ImagePayload(prompt=words), call)
        case Ask.TRANSCRIPTION:
            audio = chat_pb2.MediaPart(data=b"sound", media_type="audio/wav")
            await _stream(work, Operation.TRANSCRIPTION, audio_pb2.TranscriptionPayload(audio=audio), call)
        case Ask.SPEECH:
            async for _ in work.speak(audio_pb2.SpeechPayload(input=words, voice="a"), call):
                pass


async def _ask(stage: Repaving, words: str, ask: Ask = Ask.CHAT, *, whole: bool = False) -> Outcome:
    outcome = Outcome()
    call = CallInfo(request_id=words, traceparent=new_traceparent(), whole=whole)
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            with stage.instance.admit(words) as work:
                await _work(work, ask, words, call, outcome)
    except WeftError as error:
        outcome.error = error
    except Exception as error:  # noqa: BLE001 - whatever it is, the checker says it
        outcome.unforeseen = error
    return outcome


def faults(row: Row, seen: Outcome) -> list[str]:
    """Returns the differences between the caller's answer and the row."""
    found: list[str] = []
    if seen.unforeseen is not None:
        found.append(f"an error without a reason: {seen.unforeseen!r:.200}")
    got = None if seen.error is None else seen.error.reason
    if got is not row.sees and seen.unforeseen is None:
        found.append(f"{got!r}, not {row.sees!r}: {seen.error}")
    if seen.error is not None:
        error_to_status(seen.error).SerializeToString()
        if "Traceback" in seen.error.message.replace("<html>Traceback", "") or len(seen.error.message) > 1_000:
            found.append(f"an error of too many words: {seen.error.message[:200]}")
    is_stream = row.ask in (Ask.CHAT, Ask.TWO_CHOICES, Ask.COMPLETION)
    ends = 1 if row.sees is None and is_stream else 0
    choices = 2 * ends if row.ask is Ask.TWO_CHOICES else ends
    if (seen.finish_reasons, seen.finished) != (choices, ends):
        found.append(f"{seen.finish_reasons} finish reasons and {seen.finished} ends, not {ends}")
    if row.sees is None and seen.text != row.text:
        found.append(f"the text {seen.text!r:.100}, not {row.text!r}")
    if row.sees is not None and "more" in seen.text:
        found.append("content after the end")
    return found


@asynccontextmanager
async def _attached(engine: Engine) -> AsyncIterator[tuple[Repaving, HostileServer]]:
    async with hostile_server(engine.handle) as server:
        backend = AttachedServer(
            *engine_settings(
                OpenAiHttpModel,
                url=server.url,
                upstream_model="m",
                operations=ALL_OPERATIONS,
            )
        )
        settings = HibernationSettings(attached=True, attach_retry_seconds=0.1)
        async with living(backend, slots=4, hibernation=settings) as stage:
            await stage.until_phase(Phase.READY)
            yield stage, server


@pytest.mark.parametrize("row", [_by_size(row) for row in ROWS])
async def test_malformed_answer_fails_only_its_request_with_its_reason(
    row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    for whole, slice_bytes in ((False, 0), (True, MAX_SLICE_BYTES)):
        engine = Engine(row=row, slice_bytes=slice_bytes)
        async with _attached(engine) as (stage, server):
            neighbour = asyncio.create_task(_ask(stage, NEIGHBOUR))
            await server.asked.wait()
            seen = await _ask(stage, BAD, row.ask, whole=whole)
            after = await _ask(stage, GOOD)
            engine.goes_on.set()
            beside = await neighbour
            assert faults(row, seen) == []
            assert (after.text, after.error) == ("well", None), "the next request"
            assert (beside.text, beside.error, beside.finished) == ("from end to end", None, 1), "the neighbour"
            assert stage.phases.count(Phase.READY) == 1, "let go of"
            assert not stage.instance.slots.holders
            asked = [request for request in server.requests if BAD.encode() in request.body]
            # A connection that ends without a byte may have been dead in the pool, so that is tried twice. A missing
            # choice is requested again.
            has_missing = row.ask is Ask.TWO_CHOICES and row.sees is None
            assert len(asked) <= (1 if row.answer and not has_missing else 2)
    assert not [record for record in caplog.records if record.exc_info], "a traceback"


@pytest.mark.nightly("sends the largest answers many times")
async def test_malformed_answers_do_not_leak_memory() -> None:
    """The largest of them, again and again."""
    large = sorted(MALFORMED, key=lambda row: len(row.answer))[-6:]
    engine = Engine(row=large[0])
    engine.goes_on.set()
    async with _attached(engine) as (stage, _):
        for row in large:
            engine.row = row
            await _ask(stage, BAD, row.ask)
        gc.collect()
        before = psutil.Process().memory_info().rss
        for row in large * 3:
            engine.row = row
            assert (await _ask(stage, BAD, row.ask)).error is not None
        gc.collect()
        assert psutil.Process().memory_info().rss - before < MAX_GROWTH_BYTES
