"""The real llama.cpp server is killed, frozen, ended or out of memory; its runner names the fault, restarts it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from kit.demo_answers import sampling_without_end
from kit.engine_settings import engine_settings
from kit.presence import present
from runner_harness import POLL_SECONDS, WAIT_SECONDS, RunningRunner, events_of, ready_runner, refusal

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy import host_memory
from runner_svc.policy.load_options import LoadPlan
from runner_svc.policy.memory_estimate import MEBIBYTE
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.runtimes.llama_server import xllamacpp_launcher
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from weft.api.common.v1 import chat_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_objects import to_json_object
from weft_app.compose.demo import demo_model_path
from weft_app.compose.served_models import served_model
from weft_app.config.loader import parse_config

pytestmark = [pytest.mark.slow("a real engine"), pytest.mark.real]

IDLE_STREAM_SECONDS = 1.5
NOTICE_SECONDS = 5.0
"""A second is promised; the rest is for a machine that does something else besides."""
RECOVERY_SECONDS = 15.0
"""What loading the model takes and two seconds are promised; it takes about one on an idle machine."""


@asynccontextmanager
async def _real_runner(folder: Path) -> AsyncIterator[RunningRunner]:
    timeouts = TimeoutProfile(idle_stream_seconds=IDLE_STREAM_SECONDS, probe_interval_seconds=0.1)
    config = engine_settings(
        LlamaServerModel,
        command=(sys.executable, "-m", xllamacpp_launcher.__name__),
        path=demo_model_path(),
        name="m",
        slots=1,
        context_tokens=4096,
        timeouts=timeouts,
    )
    model = ServedModel(name="m", slots=1, make_backend=lambda: LlamaServerBackend(*config), timeouts=timeouts)
    async with ready_runner(folder, [model]) as runner:
        yield runner


async def _recovered(runner: RunningRunner) -> pb.Restart:
    """The one restart, once the model takes requests again."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            restarts = (await runner.described()).restarts
            if restarts and restarts[-1].HasField("recovery"):
                (restart,) = restarts
                return restart
            await asyncio.sleep(POLL_SECONDS)


@pytest.mark.parametrize(
    ("number", "request_reason", "restart_reason", "noticed_by"),
    [
        (signal.SIGKILL, Reason.SERVER_DIED, Reason.SERVER_DIED, NOTICE_SECONDS),
        (signal.SIGTERM, Reason.SERVER_DIED, Reason.SERVER_DIED, NOTICE_SECONDS),
        (signal.SIGSTOP, Reason.STALL_TIMEOUT, Reason.STALL_TIMEOUT, IDLE_STREAM_SECONDS + NOTICE_SECONDS),
    ],
)
async def test_llama_cpp_exit_mid_answer_is_reported_and_it_restarts_in_time(
    number: signal.Signals, request_reason: Reason, restart_reason: Reason, noticed_by: float, tmp_path: Path
) -> None:
    async with _real_runner(tmp_path) as runner:
        before = await runner.described()
        call = runner.generate(sampling=sampling_without_end(max_tokens=4000))
        while not any(event.HasField("delta") for event in (await call.read()).events):
            pass
        os.kill(before.process_id, number)
        error = await refusal(events_of(call))
        assert error.reason is request_reason
        restart = await _recovered(runner)
        assert Reason(restart.reason) is restart_reason
        assert restart.recovery.ToTimedelta().total_seconds() < RECOVERY_SECONDS
        record = (await runner.control.GetRequest(pb.GetRequestRequest(request_id="req-1"))).record
        assert Reason(record.reason) is request_reason
        assert (record.end_time.ToDatetime() - record.last_progress_time.ToDatetime()).total_seconds() < noticed_by
        assert not psutil.pid_exists(before.process_id)
        assert (await events_of(runner.generate()))[-1].HasField("finished")


LITTLE_MARGIN_BYTES = 512 * MEBIBYTE
ENDLESS_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 9, "maxLength": 2}},
    "required": ["a"],
}
"""llama.cpp expands it without end. The gateway rejects it; this test sends it to the runner directly."""


def _configured() -> ServedModel:
    """The demo model of a configuration, with the forecast of its file and no saved prompts."""
    model = {"name": "m", "path": str(demo_model_path()), "slots": 1, "threads": 1, "context_tokens": 1024}
    runner = {"name": "r1", "runtime": "llama_server", "models": [{**model, "kept_prompts_mb": 0}]}
    config = parse_config({"runners": [runner]})
    assert config.runners is not None
    (section,) = config.runners
    return served_model(section, section.models[0], 5.0)


async def test_endless_schema_stops_at_the_memory_limit_and_the_engine_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "MARGIN_BYTES", LITTLE_MARGIN_BYTES)
    model = _configured()
    expected = await model.forecast.expect(LoadPlan(parameters={"gpu_layers": -1}))
    limit_bytes = present(host_memory.host_memory_limit(expected, None, os.cpu_count() or 1))
    schema = chat_pb2.JsonSchemaFormat(name="x", schema=to_json_object(ENDLESS_SCHEMA, "schema"))
    async with ready_runner(tmp_path, [model]) as runner:
        process = psutil.Process((await runner.described()).process_id)
        assert process.rlimit(psutil.RLIMIT_DATA) == (limit_bytes, limit_bytes)
        # Its parser fails to allocate memory, and the server continues.
        refused = await refusal(events_of(runner.generate(response_format=chat_pb2.ResponseFormat(json_schema=schema))))
        assert "failed to parse grammar" in refused.message
        assert (await events_of(runner.generate()))[-1].HasField("finished")
        assert (await runner.described()).process_id == process.pid
