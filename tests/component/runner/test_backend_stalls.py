"""The watchdog over real engine processes that freeze, hang, or work for long."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from kit.demo_answers import sampling_without_end
from kit.engine_settings import engine_settings
from kit.engines import CALL, chat, fake_engine
from kit.fake_backend import run_fake_backend
from kit.running_record import running_record

from runner_svc.backend.port import Backend
from runner_svc.instance.admission import AdmittedRequest
from runner_svc.instance.watchdog import Watchdog
from runner_svc.policy.timeouts import StopGraces, TimeoutProfile
from runner_svc.request_records import RequestRecord, RequestRecords
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LAUNCHER, LlamaServerModel
from runner_svc.runtimes.openai_http.openai_http_backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import OpenAiHttpModel
from weft.dispatch.frames import Frame, has_content
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock
from weft_app.compose.demo import demo_model_path

pytestmark = pytest.mark.slow("waits for engines that stall")

PROFILE = TimeoutProfile(prefill_liveness_seconds=0.6, idle_stream_seconds=0.4, probe_interval_seconds=0.05)
NOTICE_SECONDS = 5.0


class Watched:
    def __init__(self, backend: Backend, profile: TimeoutProfile = PROFILE) -> None:
        self.backend = backend
        self.records = RequestRecords("m", SystemClock())
        self.watching = asyncio.create_task(Watchdog(self.records, backend, profile, SystemClock()).run())

    async def chat(
        self, record_made: "asyncio.Future[RequestRecord] | None" = None, *, text: str = "hi", max_tokens: int = 2000
    ) -> list[Frame]:
        payload = chat(text, sampling=sampling_without_end(max_tokens=max_tokens))
        frames = []
        with running_record(self.records, "r1") as record:
            work = AdmittedRequest(record, self.backend, lambda _: None)
            async with aclosing(work.generate(payload, CALL)) as stream:
                async for frame in stream:
                    frames.append(frame)
                    if record_made is not None and not record_made.done() and has_content(frame):
                        record_made.set_result(record)
        return frames

    async def restart_reason(self) -> str:
        error = await asyncio.wait_for(asyncio.shield(self.watching), NOTICE_SECONDS)
        assert error.reason is Reason.STALL_TIMEOUT
        return error.message

    def freeze(self) -> None:
        assert self.backend.process_id is not None
        os.kill(self.backend.process_id, signal.SIGSTOP)


@asynccontextmanager
async def _watched(profile: TimeoutProfile = PROFILE, **switches: Any) -> AsyncGenerator[Watched]:
    graces = StopGraces(first_term_seconds=0.1, second_term_seconds=0.1)
    backend = fake_engine(switches, timeouts=profile, graces=graces)
    async with _watching(backend, profile) as watched:
        yield watched


@asynccontextmanager
async def _watching(backend: Backend, profile: TimeoutProfile) -> AsyncGenerator[Watched]:
    await backend.start()
    watched = Watched(backend, profile)
    try:
        yield watched
    finally:
        watched.watching.cancel()
        await asyncio.gather(watched.watching, return_exceptions=True)
        await backend.stop()


async def _reason(work: Awaitable[object]) -> Reason:
    with pytest.raises(WeftError) as failed:
        await asyncio.wait_for(work, NOTICE_SECONDS)
    return failed.value.reason


async def test_engine_frozen_mid_answer_is_detected_and_must_be_restarted() -> None:
    async with _watched(tokens_per_second=50, answer_tokens=0) as w:
        flowing: asyncio.Future[RequestRecord] = asyncio.get_running_loop().create_future()
        chat = asyncio.create_task(w.chat(flowing))
        await flowing
        w.freeze()
        assert await _reason(chat) is Reason.STALL_TIMEOUT
        assert "idle_stream_timeout_seconds" in await w.restart_reason()


async def test_hung_prefill_is_detected_even_if_bytes_flow_and_health_checks_pass() -> None:
    """As llama-server in one of four runs after a SIGTERM: comments and health, but no token and no work."""
    async with _watched(prefill_seconds=60, prefill_idle=True, prefill_progress=1, keepalive_comments=True) as w:
        assert await _reason(w.chat()) is Reason.STALL_TIMEOUT
        assert await w.backend.responds(1.0)
        assert "prefill_liveness_timeout_seconds" in await w.restart_reason()


async def test_stalled_request_on_an_attached_server_fails_and_the_server_keeps_running() -> None:
    async with run_fake_backend(stall_after_tokens=3, keepalive_comments=True) as server:
        config = engine_settings(OpenAiHttpModel, url=server.base_url, upstream_model="fake", timeouts=PROFILE)
        async with _watching(AttachedServer(*config), PROFILE) as w:
            assert await _reason(w.chat()) is Reason.STALL_TIMEOUT
            await server.set_behaviour(stall_after_tokens=None, prefill_seconds=1.0, prefill_idle=True)
            frames = await asyncio.wait_for(w.chat(), NOTICE_SECONDS)
            assert frames[-1][-1].HasField("finished"), "a prefill that nobody can see is not judged"
            assert not w.watching.done()


@pytest.mark.parametrize("reports", [0, 2])
async def test_prefill_that_uses_cpu_time_is_not_a_stall(reports: int) -> None:
    async with _watched(prefill_seconds=1.5, prefill_progress=reports) as w:
        frames = await asyncio.wait_for(w.chat(), NOTICE_SECONDS)
        assert frames[-1][-1].HasField("finished")
        assert not w.watching.done()


async def test_frozen_idle_engine_is_detected() -> None:
    async with _watched() as w:
        await w.chat()
        w.freeze()
        assert "answered none of 3 probes" in await w.restart_reason()


async def test_slow_reader_is_not_mistaken_for_a_stalled_engine() -> None:
    async with _watched(tokens_per_second=50, answer_tokens=0) as w:
        with running_record(w.records, "r1") as record:
            work = AdmittedRequest(record, w.backend, lambda _: None)
            async with aclosing(work.generate(chat(), CALL)) as stream:
                await anext(stream)
                await asyncio.sleep(3 * PROFILE.idle_stream_seconds)
                await anext(stream)
        assert not w.watching.done()


@asynccontextmanager
async def _real_engine(profile: TimeoutProfile = PROFILE) -> AsyncGenerator[Watched]:
    config = engine_settings(
        LlamaServerModel, command=(sys.executable, "-m", LAUNCHER), path=demo_model_path(), name="smollm2", slots=1
    )
    async with _watching(LlamaServerBackend(*config), profile) as watched:
        yield watched


@pytest.mark.real
async def test_llama_cpp_prompt_longer_than_the_timeout_is_not_a_stall() -> None:
    """One batch without reports: only its processor time shows progress."""
    # On a busy machine an engine may get no processor time for half a second.
    async with _real_engine(replace(PROFILE, prefill_liveness_seconds=2.0)) as w:
        frames = await w.chat(text="word " * 1_200, max_tokens=2)
        assert frames[-1][-1].HasField("finished")
        assert not w.watching.done()
