"""The llama-server adapter against a fake that fails on demand: each fault has its own reason."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.engines import control_of, failure_of, fake_engine, frames_of, started
from kit.failures import fails

from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from weft.api.common.v1 import completion_pb2
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason


@asynccontextmanager
async def _running(timeouts: TimeoutProfile | None = None, **switches: Any) -> AsyncGenerator[LlamaServerBackend]:
    async with started(fake_engine(switches, timeouts=timeouts or TimeoutProfile())) as (backend, _):
        yield backend


@pytest.mark.parametrize(
    ("switches", "reason"),
    [
        ({"status": 503}, Reason.BACKEND_NOT_READY),
        ({"status": 429}, Reason.RATE_LIMIT_EXCEEDED),
        ({"status": 501}, Reason.UNSUPPORTED_OPERATION),
        ({"html_200": True}, Reason.BACKEND_PROTOCOL_ERROR),
        ({"close_after_tokens": 2}, Reason.BACKEND_PROTOCOL_ERROR),
        ({"crash_after_tokens": 0}, Reason.SERVER_DIED),
        ({"crash_after_tokens": 2}, Reason.SERVER_DIED),
        ({"out_of_memory_after_tokens": 0}, Reason.OUT_OF_MEMORY),
        ({"out_of_memory_after_tokens": 2}, Reason.OUT_OF_MEMORY),
    ],
)
async def test_every_fault_has_its_own_reason(switches: dict[str, Any], reason: Reason) -> None:
    async with _running(**switches) as backend:
        assert (await failure_of(backend)).reason is reason


async def test_missing_response_headers_time_out_if_configured() -> None:
    async with _running(TimeoutProfile(headers_seconds=0.3), slow_headers_seconds=5.0) as backend:
        assert (await failure_of(backend)).reason is Reason.HEADERS_TIMEOUT


async def test_engine_out_of_memory_during_a_request_is_reported_with_advice() -> None:
    async with _running(out_of_memory_after_tokens=2) as backend:
        assert "fewer slots" in (await failure_of(backend)).message
        report = await asyncio.wait_for(backend.wait_exit(), 5.0)
    assert report.reason is Reason.OUT_OF_MEMORY
    assert "SIGABRT" in report.how
    assert "CUDA error" not in report.how, "the engine's own words may quote a prompt"


async def test_model_that_does_not_fit_is_reported_as_such_instead_of_a_death() -> None:
    backend = fake_engine({"out_of_memory_at_start": True})
    with fails(Reason.OUT_OF_MEMORY, "exit code 1", "smaller context_tokens"):
        await backend.start()


@pytest.mark.parametrize("number", ["SIGSEGV", "SIGILL"])
async def test_engine_built_for_another_cpu_is_reported_to_its_first_caller(number: str) -> None:
    async with _running(crash_after_tokens=0, crash_signal=number) as backend:
        told = (await failure_of(backend)).message
        report = await asyncio.wait_for(backend.wait_exit(), 5.0)
    assert f"signal {number} before its first answer: weft_testing.fake_backend was probably built for" in told
    assert "-DGGML_NATIVE=OFF" in told
    assert report.reason is Reason.SERVER_DIED
    assert report.how in told


async def test_engine_built_for_another_cpu_is_reported_during_load() -> None:
    backend = fake_engine({"crash_at_start": True, "crash_signal": "SIGILL"})
    with fails(Reason.SERVER_DIED, "died while it loaded (signal SIGILL before its first answer"):
        await backend.start()


async def test_engine_that_answered_before_is_not_blamed_on_the_cpu() -> None:
    async with _running(crash_signal="SIGSEGV") as backend:
        assert await frames_of(backend)
        assert backend.process_id is not None
        os.kill(backend.process_id, signal.SIGSEGV)
        report = await asyncio.wait_for(backend.wait_exit(), 5.0)
    assert report.how == "signal SIGSEGV"


async def test_output_of_an_earlier_start_does_not_explain_a_later_death() -> None:
    backend = fake_engine({"out_of_memory_after_tokens": 0})
    await backend.start()
    await failure_of(backend)
    await backend.stop()
    await backend.start()
    try:
        assert backend.process_id is not None
        os.kill(backend.process_id, signal.SIGABRT)
        report = await asyncio.wait_for(backend.wait_exit(), 5.0)
    finally:
        await backend.stop()
    assert report.reason is Reason.SERVER_DIED


async def test_death_while_loading_is_reported_with_the_cause_of_that_start_only(tmp_path: Path) -> None:
    counter, words = (
        tmp_path / "starts",
        'n=$(cat "$0" 2>/dev/null || echo 0); echo $((n + 1)) >"$0"; [ $n = 0 ] && echo "unknown argument: -x"',
    )
    command = ("/bin/sh", "-c", f"{words}; exit 1", str(counter))
    backend = fake_engine(command=command)
    for cause in (": it does not accept one of its arguments", ""):
        with pytest.raises(WeftError) as failed:
            await backend.start()
        assert failed.value.message == f"the engine died while it loaded (exit code 1{cause})"


async def test_server_closing_kept_alive_connections_fails_no_request() -> None:
    """llama-server closes after each stream while promising to keep; the next POST meets a dead connection."""
    async with _running(close_after_stream=True) as backend:
        for _ in range(10):
            assert (await frames_of(backend))[-1][-1].HasField("finished")


@pytest.mark.slow("starts an ordinary program")
@pytest.mark.usefixtures("cold_engines")
async def test_api_key_is_in_the_environment_and_not_in_the_arguments() -> None:
    async with _running() as backend:
        process = psutil.Process(backend.process_id)
        key = process.environ()["LLAMA_API_KEY"]
        assert len(key) >= 32
        assert key not in " ".join(process.cmdline())
        async with control_of(backend) as control, control._session.get(f"{control.base_url}/v1/models") as answer:
            assert answer.status == 401, "the port is open to everybody"


async def test_echo_which_the_server_would_silently_ignore_is_rejected_by_name() -> None:
    payload = completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text="x")], echo=True)
    async with _running() as backend:
        failure = await failure_of(backend, payload)
    assert isinstance(failure, FieldError)
    assert failure.field == "echo"
