"""CTranslate2 itself, in the server program under its own environment, with the demo model."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import SkipTest

import psutil
import pytest
from kit.demo_answers import CERTAIN_ANSWER, certain_chat
from kit.engine_settings import engine_settings
from kit.failures import fails
from kit.one_model import OneModelCache
from native_builds import built_ctranslate2

from runner_svc.backend.port import Backend, BackendFacts, CallInfo, LoadOrder
from weft.api.common.v1 import chat_pb2, event_pb2, sampling_pb2, tokenize_pb2
from weft.dispatch.frames import Frame, GenerationPayload, has_content
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft_extensions.engines.ctranslate2.ctranslate2_backend import CTranslate2Backend
from weft_extensions.engines.ctranslate2.runtime import CTranslate2Model
from weft_extensions.engines.library_server import program_command
from weft_testing.conformance.backend import BackendConformance, Engine

SERVER_PROGRAM = "weft_extensions.engines.ctranslate2.server"

pytestmark = [pytest.mark.runtimes, pytest.mark.timeout(3700)]

CALL = CallInfo(request_id="r1", traceparent=new_traceparent())
GREEDY = {"temperature": 0.0}
NOTICE_SECONDS = 30.0


def _backend(**settings: Any) -> CTranslate2Backend:
    python, model = built_ctranslate2()
    # Nothing of the repository is on the path of this interpreter, but for what the bootstrap puts there.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = program_command(SERVER_PROGRAM, str(python))
    given = {"path": model, "command": command, "environment": environment, **settings}
    return CTranslate2Backend(*engine_settings(CTranslate2Model, **given))


class TestCTranslate2(BackendConformance):
    notice_seconds = NOTICE_SECONDS

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path

    def make_variant(self) -> Path:
        variant = self._tmp_path / "variant"
        variant.symlink_to(built_ctranslate2()[1])
        return variant

    def make_backend(self, engine: Engine) -> CTranslate2Backend:
        if engine not in (Engine.NORMAL, Engine.SLOW):
            raise SkipTest("the real library has no such fault switch")
        return _backend(context_tokens=4096 if engine is Engine.SLOW else 1024)


class TestCTranslate2KeepsTenantsApart(OneModelCache):
    slots = 1
    embeds = False

    def make_backend(self) -> CTranslate2Backend:
        return _backend(context_tokens=512, extra_arguments=("--prefix-cache-tokens", "2048"))


@asynccontextmanager
async def _running(**settings: Any) -> AsyncGenerator[tuple[CTranslate2Backend, BackendFacts]]:
    backend = _backend(**settings)
    async with asyncio.timeout(60):
        facts = await backend.start()
    try:
        yield backend, facts
    finally:
        await backend.stop()


def _chat(text: str, max_tokens: int = 40, sampling: dict[str, Any] | None = None, **fields: Any) -> GenerationPayload:
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text=text)])
    wanted = sampling_pb2.SamplingParams(max_tokens=max_tokens, **(GREEDY if sampling is None else sampling))
    return chat_pb2.ChatPayload(messages=[message], sampling=wanted, **fields)


def _with_extra(payload: GenerationPayload, **numbers: float) -> GenerationPayload:
    for name, number in numbers.items():
        payload.extra_parameters.fields.add(name=name).value.integer_value = int(number)
    return payload


async def _frames(backend: Backend, payload: GenerationPayload, call: CallInfo = CALL) -> list[Frame]:
    async with asyncio.timeout(120):
        return [frame async for frame in backend.generate(payload, call)]


async def _answer(backend: Backend, payload: GenerationPayload) -> tuple[str, event_pb2.InferenceEvent]:
    events = [event for frame in await _frames(backend, payload) for event in frame]
    return "".join(event.delta.text for event in events), events[-1]


async def test_chat_streams_token_by_token_to_its_last_token() -> None:
    async with _running() as (backend, facts):
        assert (facts.context_tokens, facts.slots) == (2048, 1)
        frames = await _frames(backend, certain_chat())
    events = [event for frame in frames for event in frame]
    assert "".join(event.delta.text for event in events) == CERTAIN_ANSWER
    assert sum(has_content(frame) for frame in frames) > 1
    reasons = [event.delta.finish_reason for event in events if event.HasField("delta")]
    assert reasons[-1] == event_pb2.FINISH_REASON_STOP
    receipt = events[-1].finished.receipt
    assert receipt.tokens_per_second > 0


async def test_stop_strings_and_request_parameters_are_applied() -> None:
    async with _running() as (backend, _):
        until_of = certain_chat()
        until_of.sampling.stop.append(" of")
        stopped, _ = await _answer(backend, until_of)
        assert stopped == "The capital"
        frames = await _frames(backend, _chat("Hi.", sampling={"seed": 1, "min_p": 0.1, "top_k": 5, "top_p": 0.0}))
        warned = sorted(event.warning.field for event in frames[0])
        assert warned == ["min_p", "seed"]


async def test_beam_search_answers_in_one_piece_with_a_warning() -> None:
    async with _running() as (backend, _):
        payload = _with_extra(certain_chat(), beam_size=2)
        payload.choice_count = 2
        frames = await _frames(backend, payload)
        assert [event.warning.field for event in frames[0]] == ["temperature", "beam_size"]
        deltas = [event.delta for frame in frames for event in frame if event.HasField("delta")]
        assert [delta.index for delta in deltas] == [0, 1, 0, 1]
        assert all("Paris" in delta.text for delta in deltas[:2])
        assert all(delta.finish_reason for delta in deltas[2:])
        with fails(match="at most the number of beams"):
            await _frames(backend, _with_extra(_chat("Hi.", choice_count=3), beam_size=2))
    async with _running(beam_size=2) as (backend, _):
        frames = await _frames(backend, _chat("Hi.", sampling={}))
        assert [event.warning.field for event in frames[0]] == ["beam_size"]
        whole = CallInfo(request_id="r", traceparent=new_traceparent(), whole=True)
        frames = await _frames(backend, _chat("Hi.", sampling={}), whole)
        assert not any(event.HasField("warning") for frame in frames for event in frame), "it is not streamed anyway"


async def test_tokens_are_counted_while_the_engine_generates() -> None:
    async with _running() as (backend, _), aclosing(backend.generate(_chat("Tell a story.", 2000), CALL)) as frames:
        await anext(frames)
        text = "Grüße, \u2603 and \U0001f600!"
        async with asyncio.timeout(30):
            counted = await backend.tokenize(tokenize_pb2.TokenizePayload(text=text, with_pieces=True), CALL)
    assert b"".join(counted.pieces).decode() == text
    assert counted.count == len(counted.ids) > 5


async def test_requests_run_in_parallel_in_a_model_with_several_slots() -> None:
    async with _running(slots=2) as (backend, facts):
        assert facts.slots == 2
        async with aclosing(backend.generate(_chat("Tell a long story.", 1500), CALL)) as long:
            while not has_content(await anext(long)):
                pass
            text, end = await _answer(backend, certain_chat())
            assert text == CERTAIN_ANSWER
            assert has_content(await anext(long)), "the other request goes on"
        again = await _answer(backend, certain_chat())
        assert [answered.finished.receipt.usage.cached_prompt_tokens for answered in (end, again[1])] == [0, 0]


async def test_flush_frees_cached_prompts_and_a_budget_limits_them() -> None:
    async with _running(extra_arguments=("--prefix-cache-tokens", "1500")) as (backend, _):
        assert backend.process_id is not None
        memory = psutil.Process(backend.process_id).memory_info
        await _answer(backend, _chat("Hi.", 1))
        # Gives back what the load of the weights left in the heap: on some processors it is more than a cache needs.
        await backend.erase_cache()
        before = memory().rss
        for number in (1, 1, 2, 2, 3, 3):
            # What is asked again is kept as a whole; before that only what all chats have in common.
            await _answer(backend, _chat(f"{number} " + "word " * 400, 1))
        kept = memory().rss
        erased = await backend.erase_cache()
        assert 400 <= (erased.token_count or 0) <= 1500
        # 138 KB of keys and values per token of this model.
        assert kept - before > (erased.token_count or 0) * 100_000
        assert memory().rss < kept - (erased.token_count or 0) * 100_000
        assert (await _answer(backend, certain_chat()))[0] == CERTAIN_ANSWER


async def test_library_accepts_every_declared_load_parameter() -> None:
    backend = _backend()
    values: dict[str, Any] = {"context_tokens": 256, "compute_type": "float32"}
    assert {parameter.name for parameter in backend.load_parameters} == set(values)
    facts = await backend.start(LoadOrder(parameters=values, shares=()))
    try:
        assert facts.context_tokens == 256
        assert (await _answer(backend, certain_chat()))[0] == CERTAIN_ANSWER
    finally:
        await backend.stop()


async def test_sleeping_model_frees_its_memory_and_wakes_in_its_process() -> None:
    async with _running(sleeps_in_place=True) as (backend, facts):
        assert backend.process_id is not None
        process = psutil.Process(backend.process_id)
        await _answer(backend, _chat("word " * 300, 1))
        before = process.memory_info().rss
        assert await backend.sleep()
        # 135 MB of weights, and 138 KB of keys and values for each of 300 kept tokens.
        assert process.memory_info().rss < before - 120_000_000
        assert await backend.start() == facts
        assert backend.process_id == process.pid
        assert (await _answer(backend, certain_chat()))[0] == CERTAIN_ANSWER
    assert not process.is_running()
