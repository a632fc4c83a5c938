"""Reports of a runner's requests, restarts and limits, over gRPC."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from kit.engines import fake_model
from restart_stage import LONG
from runner_harness import RunningRunner, events_of, ready_runner, refusal, running_runner

from runner_svc.chat.tool_loop import converse
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.servicers import inference
from weft.api.common.v1 import error_reason_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.dispatch.frames import Frame
from weft.kernel.errors.reasons import Reason

TIMEOUTS = TimeoutProfile(headers_seconds=30.0, absolute_seconds=600.0)


def _model(context_tokens: int = 2048, **switches: Any) -> ServedModel:
    engine = {"context_tokens": context_tokens, "timeouts": TIMEOUTS}
    return fake_model("m", switches, engine, timeouts=TIMEOUTS)


async def _record(runner: RunningRunner, request_id: str) -> pb.RequestRecord:
    return (await runner.control.GetRequest(pb.GetRequestRequest(request_id=request_id))).record


async def test_request_record_is_readable_while_it_runs_and_after_its_backend_died(tmp_path: Path) -> None:
    async with ready_runner(tmp_path, [_model(**LONG)]) as runner:
        call = runner.generate(max_tokens=1500)
        while not any(event.HasField("delta") for event in (await call.read()).events):
            pass
        answer = await runner.control.GetRequest(pb.GetRequestRequest(request_id="req-1"))
        assert answer.output.startswith("tok0")
        running = answer.record
        assert (running.model, running.state) == ("m", pb.RequestRecord.STATE_GENERATING)
        assert running.start_time.ToNanoseconds() <= running.first_content_time.ToNanoseconds()
        assert not running.HasField("end_time")
        described = await runner.described()
        assert [request.request_id for request in described.requests] == ["req-1"]
        os.kill(described.process_id, signal.SIGKILL)
        assert (await refusal(events_of(call))).reason is Reason.SERVER_DIED
        ended = await runner.control.GetRequest(pb.GetRequestRequest(request_id="req-1"))
        assert ended.record.state == pb.RequestRecord.STATE_FAILED
        assert ended.record.reason == error_reason_pb2.ERROR_REASON_SERVER_DIED
        assert ended.record.end_time.ToNanoseconds() >= running.first_content_time.ToNanoseconds()
        assert not ended.output


@pytest.mark.slow("fills the buffers of a connection")
async def test_slow_reader_receives_the_error_and_its_slot_is_freed_immediately(tmp_path: Path) -> None:
    """The runner waits for the caller to read a frame when the backend dies."""
    async with ready_runner(tmp_path, [_model(500_000, answer_tokens=0)]) as runner:
        call = runner.generate(max_tokens=499_000)
        await call.read()
        sent = -1
        while sent != (now := (await _record(runner, "req-1")).output_chars):
            sent = now
            await asyncio.sleep(0.15)
        described = await runner.described()
        assert described.requests[0].state == pb.RequestRecord.STATE_GENERATING, "the caller was not slow enough"
        os.kill(described.process_id, signal.SIGKILL)
        async with asyncio.timeout(1.0):
            while (await runner.described()).active_request_ids:
                pass
        assert (await refusal(events_of(call))).reason is Reason.SERVER_DIED


async def test_disconnect_after_a_complete_answer_is_not_a_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every dispatcher does: it has the answer before the runner's rpc has ended."""

    async def slow_to_end(*arguments: Any) -> AsyncGenerator[Frame]:
        async with aclosing(converse(*arguments)) as frames:
            async for frame in frames:
                yield frame
        await asyncio.sleep(600)

    monkeypatch.setattr(inference, "converse", slow_to_end)
    async with ready_runner(tmp_path, [_model()]) as runner:
        call = runner.generate(max_tokens=2)
        while not any(event.HasField("finished") for event in (await call.read()).events):
            pass
        call.cancel()
        async with asyncio.timeout(5):
            while (await runner.described()).active_request_ids:
                pass
        assert (await _record(runner, "req-1")).state == pb.RequestRecord.STATE_COMPLETED


async def test_unknown_request_record_is_not_found(tmp_path: Path) -> None:
    async with running_runner(tmp_path, [_model()]) as runner:
        error = await refusal(runner.control.GetRequest(pb.GetRequestRequest(request_id="nobody")))
        assert error.reason is Reason.NOT_FOUND


async def test_description_includes_restarts_last_crash_and_timeouts(tmp_path: Path) -> None:
    async with ready_runner(tmp_path, [_model()]) as runner:
        fresh = await runner.described()
        assert (list(fresh.restarts), list(fresh.last_crash_lines)) == ([], [])
        assert fresh.HasField("last_ready_time")
        assert fresh.containment
        assert fresh.timeouts.headers.seconds == 30
        assert fresh.timeouts.absolute.seconds == 600
        assert not fresh.timeouts.HasField("first_token")
        os.kill(fresh.process_id, signal.SIGKILL)
        async with asyncio.timeout(10.0):
            while True:
                after = await runner.described(line_count=1000)
                if after.restarts and after.restarts[0].HasField("recovery"):
                    break
                await asyncio.sleep(0.02)
        (restart,) = after.restarts
        assert restart.reason == error_reason_pb2.ERROR_REASON_SERVER_DIED
        assert restart.detail == after.last_restart_reason == "signal SIGKILL"
        assert restart.recovery.ToNanoseconds() > 0
        assert after.last_ready_time.ToNanoseconds() > restart.time.ToNanoseconds()
        assert any("listening on" in line for line in after.last_crash_lines)
