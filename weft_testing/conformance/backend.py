"""The conformance suite of backends, as tests to inherit.

    class TestMyBackend(BackendConformance):
        def make_backend(self, engine: Engine) -> Backend:
            if engine is Engine.NEVER_READY:
                raise SkipTest("cannot be made to hang while it loads")
            return MyBackend(...)

Tests of a class that only send requests share engines. A test that kills, stalls or stops an engine starts its own, and
checks that no process is left. Time limits are class attributes, which an implementation with slower grace periods can
raise.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar
from unittest import SkipTest

import psutil
import pytest
import pytest_asyncio

from runner_svc.backend.port import Backend, BackendFacts, LoadOrder
from weft.api.common.v1 import completion_pb2, embedding_pb2, event_pb2, tokenize_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft_testing.conformance.backend_steps import (
    ANSWER_TOKENS,
    MAX_LOG_BYTES,
    POLL_SECONDS,
    TRACEBACK,
    Engine,
    begun,
    beside,
    call,
    chat,
    collect,
    completion,
    distance,
    failure,
    flat,
    has_content,
    is_alive,
    no_process_left,
    read_first_content,
    read_on,
    run,
    until,
)

__all__ = ["Backend", "BackendConformance", "Engine"]


class BackendRuns:
    """Base of all checks: what an implementation provides, and its time limits."""

    start_seconds = 30.0
    """Time for an engine to become ready, or for the backend to give up on it."""
    stop_seconds = 15.0
    """Time for `stop`, including grace periods."""
    notice_seconds = 5.0
    """Time to detect a death, a cancellation or a first token."""
    offered = Operation.CHAT
    """The operation that a loaded model must offer."""
    shared: ClassVar[dict[Engine, tuple[Backend, BackendFacts]] | None] = None
    """The running engines of the class, in the class's event loop; None outside pytest."""
    pytestmark: ClassVar = [pytest.mark.asyncio(loop_scope="class")]

    @pytest_asyncio.fixture(scope="class", loop_scope="class", autouse=True)
    @classmethod
    async def _shared_engines(cls) -> AsyncGenerator[None]:
        """Stops the engines that the class's tests share."""
        cls.shared = {}
        yield
        running, cls.shared = cls.shared, None
        for backend, _ in running.values():
            async with asyncio.timeout(cls.stop_seconds):
                await backend.stop()

    def make_backend(self, engine: Engine) -> Backend:
        """Returns a new backend, not started. Raise unittest.SkipTest if there is no such engine."""
        raise NotImplementedError

    def make_variant(self) -> Path:
        """Returns another file that the NORMAL engine can load. Raise unittest.SkipTest if there is none."""
        raise SkipTest("no other file to load")

    @asynccontextmanager
    async def _running(self, engine: Engine) -> AsyncGenerator[tuple[Backend, BackendFacts]]:
        backend = self.make_backend(engine)
        facts = await self._start(backend)
        try:
            yield backend, facts
        finally:
            await self._stop(backend)

    @asynccontextmanager
    async def _serving(self, engine: Engine) -> AsyncGenerator[tuple[Backend, BackendFacts]]:
        """Yields the engine shared by the class's tests, for a check that only sends requests.

        A failed check ends it. A check that is called without pytest gets a separate engine.
        """
        if self.shared is None:
            async with self._running(engine) as running:
                yield running
            return
        if engine not in self.shared:
            backend = self.make_backend(engine)
            self.shared[engine] = backend, await self._start(backend)
        try:
            yield self.shared[engine]
        except BaseException:
            await self._stop(self.shared.pop(engine)[0])
            raise

    async def _start(self, backend: Backend, order: LoadOrder | None = None) -> BackendFacts:
        async with asyncio.timeout(self.start_seconds):
            return await backend.start(order)

    async def _stop(self, backend: Backend) -> None:
        async with asyncio.timeout(self.stop_seconds):
            await backend.stop()

    async def _start_failure(self, backend: Backend) -> tuple[Reason, str]:
        try:
            await self._start(backend)
        except WeftError as error:
            return error.reason, error.message
        await self._stop(backend)
        raise AssertionError("start was expected to fail")


ORDERED_CONTEXT_TOKENS = 512
"""Context of one slot that llama.cpp does not round, and that differs from every engine's configuration here."""


class LoadOrderChecks(BackendRuns):
    """Checks of load parameters, variants and processes."""

    async def test_a_load_parameter_holds_for_one_load(self) -> None:
        backend = self.make_backend(Engine.NORMAL)
        order = LoadOrder(parameters={"context_tokens": ORDERED_CONTEXT_TOKENS})
        if "context_tokens" not in {parameter.name for parameter in backend.load_parameters}:
            assert await failure(backend.start(order)) is Reason.INVALID_ARGUMENT
            return
        usual = (await self._start(backend)).context_tokens
        await self._stop(backend)
        ordered = await self._start(backend, order)
        await self._stop(backend)
        assert usual != ORDERED_CONTEXT_TOKENS, "this load parameter changes nothing"
        assert ordered.context_tokens == ORDERED_CONTEXT_TOKENS
        assert (await self._start(backend)).context_tokens == usual, "the next load is as configured again"
        await self._stop(backend)

    async def test_a_parameter_that_is_not_declared_starts_nothing(self) -> None:
        backend = self.make_backend(Engine.NORMAL)
        async with no_process_left(self.notice_seconds) as new_processes:
            for name in ("no_such_parameter", "--port", ""):
                assert await failure(backend.start(LoadOrder(parameters={name: 1}))) is Reason.INVALID_ARGUMENT
                assert not new_processes()

    async def test_a_parameter_beyond_its_range_starts_nothing(self) -> None:
        backend = self.make_backend(Engine.NORMAL)
        async with no_process_left(self.notice_seconds) as new_processes:
            for parameter in backend.load_parameters:
                if parameter.maximum is not None:
                    order = LoadOrder(parameters={parameter.name: parameter.maximum + 1})
                    assert await failure(backend.start(order)) is Reason.INVALID_ARGUMENT, parameter.name
                    assert not new_processes()

    async def test_an_order_loads_the_variant_that_it_names(self) -> None:
        variant = self.make_variant()
        backend = self.make_backend(Engine.NORMAL)
        facts = await self._start(backend, LoadOrder(model_path=variant))
        assert self.offered in facts.operations
        assert str(variant) in _command_line(backend)
        await self._stop(backend)
        await self._start(backend)
        assert str(variant) not in _command_line(backend), "the next load is as configured again"
        await self._stop(backend)

    async def test_processes_lists_every_process_of_the_engine(self) -> None:
        async with self._running(Engine.WITH_DESCENDANT) as (backend, _):
            assert backend.process_id is not None
            engine = psutil.Process(backend.process_id)
            seen = {process.pid: process.start_ticks for process in backend.processes()}
            assert set(seen) == {engine.pid, *(child.pid for child in engine.children(recursive=True))}
            assert len(seen) > 1, "this engine must have a child process"
            assert all(ticks > 0 for ticks in seen.values())
            assert seen == {process.pid: process.start_ticks for process in backend.processes()}
            await self._stop(backend)
            assert not backend.processes()


def _command_line(backend: Backend) -> str:
    assert backend.process_id is not None
    return " ".join(psutil.Process(backend.process_id).cmdline())


class ProcessChecks(BackendRuns):
    """Checks of an engine's start, death, signs of life, stop and output."""

    async def test_start_returns_what_the_model_can_do(self) -> None:
        async with self._running(Engine.NORMAL) as (backend, facts):
            assert self.offered in facts.operations
            assert facts.context_tokens >= 0
            assert backend.process_id is not None
            assert psutil.pid_exists(backend.process_id)

    async def test_an_engine_that_never_becomes_ready_is_a_stalled_load(self) -> None:
        backend = self.make_backend(Engine.NEVER_READY)
        async with no_process_left(self.notice_seconds):
            reason, _ = await self._start_failure(backend)
        assert reason is Reason.LOAD_STALLED
        assert backend.process_id is None

    async def test_an_engine_that_exits_at_start_is_reported_and_its_output_kept(self) -> None:
        backend = self.make_backend(Engine.EXITS_AT_START)
        async with no_process_left(self.notice_seconds):
            reason, message = await self._start_failure(backend)
        assert reason is Reason.SERVER_DIED
        assert any(line.strip() for line in backend.log_lines(10)), "the engine's output is lost"
        assert TRACEBACK.search(message) is None, "a caller gets a traceback"

    async def test_a_cancelled_start_leaves_no_process(self) -> None:
        backend = self.make_backend(Engine.NEVER_READY)
        async with no_process_left(self.notice_seconds) as new_processes, beside(backend.start()) as starting:
            await until(lambda: bool(new_processes()), self.notice_seconds, "the engine was never started")
            starting.cancel()
            await asyncio.wait({starting}, timeout=self.stop_seconds)
            assert starting.cancelled(), "start did not end when it was cancelled"

    async def test_a_killed_engine_is_reported_by_wait_exit_and_to_the_running_stream(self) -> None:
        async with self._running(Engine.SLOW) as (backend, _), beside(backend.wait_exit()) as watch:
            stream = backend.generate(chat(max_tokens=2000), call())
            await read_first_content(stream)
            assert not watch.done()
            assert backend.process_id is not None
            os.kill(backend.process_id, signal.SIGKILL)
            async with asyncio.timeout(self.notice_seconds):
                assert await failure(collect(stream)) is Reason.SERVER_DIED
                report = await watch
                assert report.reason is Reason.SERVER_DIED
                assert "SIGKILL" in report.how

    async def test_a_backend_starts_again_after_its_engine_died(self) -> None:
        async with self._running(Engine.NORMAL) as (backend, _):
            assert backend.process_id is not None
            os.kill(backend.process_id, signal.SIGKILL)
            async with asyncio.timeout(self.notice_seconds):
                await backend.wait_exit()
            await backend.stop()
            await self._start(backend)
            assert await run(backend, chat())

    async def test_the_processor_time_of_a_working_engine_increases(self) -> None:
        async with self._running(Engine.NORMAL) as (backend, _):
            before = backend.signs()
            if backend.process_id is None:
                assert before is None, "an engine without a process has no signs"
                return
            assert before is not None
            # The system counts in steps of 10 ms: a quick start may have used none. It may also still be starting, so
            # activity without a request proves nothing.
            assert await run(backend, chat())
            async with asyncio.timeout(self.notice_seconds):
                while (after := backend.signs()) is not None and after.cpu_seconds <= before.cpu_seconds:
                    await run(backend, chat())
            assert after is not None
            assert after.gpu_seconds is None or after.gpu_seconds >= 0.0
            await self._stop(backend)
            assert backend.signs() is None

    async def test_an_engine_that_is_ready_responds_and_one_that_stopped_does_not(self) -> None:
        async with self._running(Engine.NORMAL) as (backend, _):
            assert await backend.responds(self.notice_seconds)
            assert (backend.process_id is None) == (backend.containment == "")
            await self._stop(backend)
            assert not await backend.responds(self.notice_seconds)

    async def test_the_progress_of_a_load_is_a_share_or_unknown(self) -> None:
        backend = self.make_backend(Engine.NORMAL)
        assert backend.load_progress() is None
        seen: list[float | None] = []
        async with beside(self._start(backend)) as starting:
            while not starting.done():
                seen.append(backend.load_progress())
                await asyncio.sleep(POLL_SECONDS)
            await starting
        assert backend.load_progress() is None, "it has loaded"
        await self._stop(backend)
        shares = [share for share in seen if share is not None]
        assert all(0.0 <= share <= 1.0 for share in shares)
        assert shares == sorted(shares)

    async def test_stop_leaves_no_process_and_may_be_repeated(self) -> None:
        backend = self.make_backend(Engine.NORMAL)
        await backend.stop()
        async with no_process_left(self.notice_seconds):
            await self._start(backend)
            await self._stop(backend)
            assert backend.process_id is None
            await self._stop(backend)

    async def test_wait_exit_is_silent_about_a_stop(self) -> None:
        async with self._running(Engine.NORMAL) as (backend, _), beside(backend.wait_exit()) as watch:
            await asyncio.sleep(0)
            await self._stop(backend)
            done, _ = await asyncio.wait({watch}, timeout=10 * POLL_SECONDS)
            assert not done, "wait_exit returned for a stop"

    async def test_a_stopped_backend_starts_again(self) -> None:
        async with self._running(Engine.NORMAL) as (backend, _):
            first = backend.process_id
            await self._stop(backend)
            await self._start(backend)
            assert backend.process_id not in {None, first}
            assert await run(backend, chat())

    async def test_a_stopped_backend_refuses_work_with_a_reason(self) -> None:
        async with self._running(Engine.NORMAL) as (backend, _):
            await self._stop(backend)
            reason = await failure(run(backend, chat()))
        assert reason in {Reason.CONNECT_FAILED, Reason.SERVER_DIED, Reason.BACKEND_NOT_READY}

    async def test_stop_ends_a_running_stream(self) -> None:
        async with self._running(Engine.SLOW) as (backend, _):
            stream = backend.generate(chat(max_tokens=2000), call())
            await read_first_content(stream)
            await self._stop(backend)
            async with asyncio.timeout(self.notice_seconds):
                assert await failure(collect(stream)) in {
                    Reason.SERVER_DIED,
                    Reason.CONNECT_FAILED,
                    Reason.WORKER_RESTARTED,
                }

    async def test_stop_ends_an_engine_that_ignores_sigterm(self) -> None:
        async with no_process_left(self.notice_seconds), self._running(Engine.IGNORES_SIGTERM):
            pass

    async def test_stop_ends_processes_that_the_engine_started(self) -> None:
        async with self._running(Engine.WITH_DESCENDANT) as (backend, _):
            engine = psutil.Process(backend.process_id)
            descendants = engine.children(recursive=True)
            assert descendants, "this engine must have a child process"
            await self._stop(backend)
            await until(lambda: not any(map(is_alive, descendants)), self.notice_seconds, "a descendant survived")

    async def test_log_lines_are_the_last_ones_and_survive_a_stop(self) -> None:
        async with self._running(Engine.NORMAL) as (backend, _):
            await self._stop(backend)
            lines = backend.log_lines(1000)
            assert lines, "the engine's output is lost"
            assert backend.log_lines(1) == lines[-1:]
            assert backend.log_lines(0) == []
            await self._start(backend)
            assert lines[-1] in backend.log_lines(1000), "a restart loses the lines before it"

    async def test_excessive_output_neither_blocks_the_engine_nor_fills_the_memory(self) -> None:
        async with self._running(Engine.NOISY) as (backend, _):
            assert await run(backend, chat())
            kept = backend.log_lines(10**9)
        assert sum(map(len, kept)) < MAX_LOG_BYTES


class RequestChecks(BackendRuns):
    """Checks of generations, embeddings and token counts: their events, cancellation and errors."""

    async def test_the_first_content_comes_alone_in_its_frame(self) -> None:
        async with self._serving(Engine.NORMAL) as (backend, _):
            frames = await run(backend, chat())
        first = next(frame for frame in frames if any(map(has_content, frame)))
        assert len([event for event in first if event.HasField("delta")]) == 1

    async def test_a_stream_ends_with_exactly_one_finished_that_has_usage(self) -> None:
        async with self._serving(Engine.NORMAL) as (backend, _):
            events = flat(await run(backend, chat()))
        assert [event.WhichOneof("event") for event in events].count("finished") == 1
        assert events[-1].HasField("finished")
        usage = events[-1].finished.receipt.usage
        assert usage.prompt_tokens > 0
        assert usage.completion_tokens == ANSWER_TOKENS
        assert {event.WhichOneof("event") for event in events} <= {"delta", "progress", "usage", "finished"}

    async def test_every_choice_gets_one_finish_reason_and_nothing_after_it(self) -> None:
        async with self._serving(Engine.NORMAL) as (backend, _):
            events = flat(await run(backend, chat(choice_count=2)))
        deltas = [event.delta for event in events if event.HasField("delta")]
        assert {delta.index for delta in deltas} == {0, 1}
        for index in (0, 1):
            reasons = [delta.finish_reason for delta in deltas if delta.index == index]
            assert [bool(reason) for reason in reasons] == [False] * (len(reasons) - 1) + [True]
        assert events[-1].finished.receipt.usage.completion_tokens == 2 * ANSWER_TOKENS, "usage counts every choice"

    async def test_the_token_limit_is_enforced_and_is_the_finish_reason(self) -> None:
        async with self._serving(Engine.NORMAL) as (backend, _):
            events = flat(await run(backend, chat(max_tokens=3)))
        reasons = [event.delta.finish_reason for event in events if event.HasField("delta")]
        assert reasons[-1] == event_pb2.FINISH_REASON_LENGTH
        assert events[-1].finished.receipt.usage.completion_tokens == 3

    async def test_a_completion_of_two_prompts_is_generated_where_the_model_offers_it(self) -> None:
        async with self._serving(Engine.NORMAL) as (backend, facts):
            if Operation.COMPLETION not in facts.operations:
                reason = await failure(run(backend, completion()))
                assert reason is Reason.UNSUPPORTED_OPERATION
                return
            events = flat(await run(backend, completion()))
        assert {event.delta.index for event in events if event.HasField("delta")} == {0, 1}
        assert "".join(event.delta.text for event in events)
        assert events[-1].finished.receipt.usage.completion_tokens == 2 * ANSWER_TOKENS

    async def test_generations_run_concurrently(self) -> None:
        async with self._serving(Engine.NORMAL) as (backend, _):
            both = await asyncio.gather(*(run(backend, chat()) for _ in range(2)))
        assert all(flat(frames)[-1].HasField("finished") for frames in both)

    async def test_a_prompt_beyond_the_context_is_reported_as_such(self) -> None:
        async with self._serving(Engine.NORMAL) as (backend, facts):
            if not facts.context_tokens:
                return
            too_long = chat(text="word " * (2 * facts.context_tokens))
            assert await failure(run(backend, too_long)) is Reason.CONTEXT_LENGTH_EXCEEDED
            assert await run(backend, chat()), "the backend must serve on"

    async def test_closing_the_generator_frees_the_engine(self) -> None:
        async with self._serving(Engine.SLOW) as (backend, _):
            for _ in range(3):
                # There is one slot: the next round gets a token only if the previous generation has ended.
                stream = backend.generate(chat(max_tokens=2000), call())
                async with asyncio.timeout(self.notice_seconds):
                    await read_first_content(stream)
                    await stream.aclose()

    async def test_a_cancelled_reader_frees_the_engine(self) -> None:
        async with self._serving(Engine.SLOW) as (backend, _):
            started = asyncio.Event()
            async with beside(read_on(backend.generate(chat(max_tokens=2000), call()), started)) as reader:
                async with asyncio.timeout(self.notice_seconds):
                    await begun(reader, started)
                reader.cancel()
                await asyncio.wait({reader}, timeout=self.notice_seconds)
                assert reader.cancelled()
            async with (
                asyncio.timeout(self.notice_seconds),
                contextlib.aclosing(backend.generate(chat(), call())) as s,
            ):
                await read_first_content(s)

    async def test_embeddings_are_in_input_order_or_refused(self) -> None:
        inputs = [completion_pb2.PromptInput(text=text) for text in ("a cat", "the stock market", "a cat")]
        payload = embedding_pb2.EmbeddingPayload(inputs=inputs)
        async with self._serving(Engine.NORMAL) as (backend, facts):
            if Operation.EMBEDDING not in facts.operations:
                assert await failure(backend.embed(payload, call())) is Reason.UNSUPPORTED_OPERATION
                return
            result = await backend.embed(payload, call())
        assert [embedding.index for embedding in result.embeddings] == [0, 1, 2]
        cat, stocks, same_cat = (list(embedding.values) for embedding in result.embeddings)
        assert len(cat) == len(stocks) > 0
        assert distance(cat, same_cat) < 0.01 < distance(cat, stocks)
        assert result.usage.prompt_tokens > 0

    async def test_tokenize_counts_as_many_tokens_of_a_chat_as_its_answer_reports(self) -> None:
        async with self._serving(Engine.NORMAL) as (backend, facts):
            asked = tokenize_pb2.TokenizePayload(chat=chat())
            if Operation.TOKENIZE not in facts.operations:
                assert await failure(backend.tokenize(asked, call())) is Reason.UNSUPPORTED_OPERATION
                return
            found = await backend.tokenize(asked, call())
            answer = flat(await collect(backend.generate(chat(), call())))
            text = await backend.tokenize(tokenize_pb2.TokenizePayload(text="One two.", with_pieces=True), call())
        assert found.count == len(found.ids) == answer[-1].finished.receipt.usage.prompt_tokens > 0
        assert text.count == len(text.ids) > 0
        assert b"".join(text.pieces) == b"One two."

    async def test_tokens_are_reported_before_their_frame_and_comments_are_not(self) -> None:
        async with self._serving(Engine.SLOW) as (backend, _):
            tokens: list[int] = []
            frames = 0
            stream = backend.generate(chat(max_tokens=2000), call(on_token=lambda: tokens.append(1)))
            async with asyncio.timeout(self.notice_seconds), contextlib.aclosing(stream):
                async for frame in stream:
                    frames += any(map(has_content, frame))
                    assert len(tokens) >= frames, "a frame came before `on_token` was called"
                    if frames == 3:
                        break
            assert len(tokens) <= frames + 1, "`on_token` was called for something other than a token"

    async def test_tokens_that_arrive_together_are_reported_before_each_of_their_frames(self) -> None:
        async with self._serving(Engine.NORMAL) as (backend, _):
            tokens: list[int] = []
            frames = 0
            stream = backend.generate(chat(), call(on_token=lambda: tokens.append(1)))
            async with asyncio.timeout(self.notice_seconds), contextlib.aclosing(stream):
                async for frame in stream:
                    frames += any(map(has_content, frame))
                    assert len(tokens) >= frames, "a frame came before `on_token` was called"
            assert frames, "it answers"


class BackendConformance(LoadOrderChecks, ProcessChecks, RequestChecks):
    """Inherit, override `make_backend`, and let pytest collect the subclass."""
