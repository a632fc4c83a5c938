"""The backend of vLLM against a fake of `vllm serve`: its socket, sleep, cache, aborts, figures and faults."""

import asyncio
import stat
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
from kit.engine_settings import engine_settings
from kit.engines import GRACES, chat, started_process
from kit.failures import fails
from kit.own_children import own_children
from kit.presence import present
from kit.waiting import until

from runner_svc.backend.port import BackendFacts, CallInfo, LoadOrder
from runner_svc.runner_metrics import add_runner_metrics
from runner_svc.runtimes import engine_figures
from runner_svc.runtimes.vllm import vllm_backend as module
from runner_svc.runtimes.vllm.runtime import VllmModel
from runner_svc.runtimes.vllm.vllm_backend import VllmBackend
from weft.api.common.v1 import sampling_pb2
from weft.api.registry.v1.lease_pb2 import DeviceBytes
from weft.api.runner.v1 import runner_service_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.metrics_page import MetricsPage
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft_testing.fake_backend.process import fake_backend_command
from weft_testing.fake_backend.state import FakeState

ON_A_DEVICE = LoadOrder(shares=(DeviceBytes(device_index=0, bytes=2**30),), hides_devices=True)


def _backend(switches: dict[str, Any] | None = None, **settings: Any) -> VllmBackend:
    settings = {"name": "smol", "model": "org/model", "load_stall_seconds": 10.0, "graces": GRACES, **settings}
    command = tuple(fake_backend_command(**(switches or {})))
    return VllmBackend(*engine_settings(VllmModel, command=command, **settings))


def _call(request_id: str = "r1", **given: Any) -> CallInfo:
    return CallInfo(request_id=request_id, traceparent=new_traceparent(), **given)


async def _frames(backend: VllmBackend, **given: Any) -> list[Frame]:
    async with asyncio.timeout(10.0):
        return [frame async for frame in backend.generate(chat(), _call(**given))]


def _socket(backend: VllmBackend) -> Path:
    arguments = psutil.Process(backend.process_id).cmdline()
    return Path(arguments[arguments.index("--uds") + 1])


async def _state(backend: VllmBackend) -> FakeState:
    connector = aiohttp.UnixConnector(str(_socket(backend)))
    async with aiohttp.ClientSession(connector=connector) as session, session.get("http://fake/fake/state") as answer:
        return msgspec.json.decode(await answer.read(), type=FakeState)


async def test_vllm_listens_only_on_a_private_socket() -> None:
    backend = _backend()
    async with started_process(backend) as (facts, process):
        folder = _socket(backend).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        assert facts == BackendFacts(
            operations=frozenset({Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE}),
            context_tokens=2048,
            slots=4,
        )
        assert await _frames(backend)
    assert not folder.exists()


async def test_load_progress_is_parsed_from_the_output() -> None:
    backend = _backend({"load_seconds": 0.5})
    assert backend.load_progress() is None
    starting = asyncio.create_task(backend.start())
    try:

        async def serves() -> bool:
            return (backend.load_progress() or 0.0) >= 0.95

        await until(serves)
        assert not starting.done()
        await starting
        assert backend.load_progress() is None
    finally:
        await backend.stop()


async def test_closed_answer_is_aborted_by_its_own_id() -> None:
    backend = _backend({"answer_tokens": 0, "tokens_per_second": 20})
    async with started_process(backend):
        async with aclosing(backend.generate(chat(), _call("abc"))) as frames:
            await anext(frames)

        async def aborted() -> bool:
            state = await _state(backend)
            return state.aborted_request_ids == ["chatcmpl-abc"] and state.requests_cancelled == 1

        await until(aborted)


async def test_complete_answer_is_not_aborted() -> None:
    backend = _backend({"answer_tokens": 4})
    async with started_process(backend):
        await _frames(backend)
        assert (await _state(backend)).aborted_request_ids == []


async def test_max_tokens_is_capped_at_the_context_length() -> None:
    backend = _backend({"answer_tokens": 4})
    order = LoadOrder(parameters={"context_tokens": 512})
    async with started_process(backend, order):
        for asked, sent in ((100_000, 512), (64, 64)):
            payload = chat(sampling=sampling_pb2.SamplingParams(max_tokens=asked, repeat_penalty=1.5))
            _ = [frame async for frame in backend.generate(payload, _call())]
            body = (await _state(backend)).last_request_body
            assert (body["max_tokens"], body["repetition_penalty"]) == (sent, 1.5)


async def test_cache_is_flushed_once_no_request_uses_it() -> None:
    backend = _backend({"answer_tokens": 0, "tokens_per_second": 20})
    async with started_process(backend):
        frames = backend.generate(chat(), _call())
        await anext(frames)
        erasing = asyncio.create_task(backend.erase_cache())
        await asyncio.sleep(module.RESET_PAUSE_SECONDS)
        assert not erasing.done()
        await frames.aclose()
        async with asyncio.timeout(10.0):
            await erasing


@pytest.mark.slow("waits for a cache in use")
async def test_flush_of_a_cache_in_use_times_out() -> None:
    backend = _backend({"answer_tokens": 0, "tokens_per_second": 20})
    async with started_process(backend), aclosing(backend.generate(chat(), _call())) as frames:
        await anext(frames)
        with fails(Reason.BACKEND_ERROR):
            await backend.erase_cache()


async def test_metrics_are_sampled_and_forwarded_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_figures, "SAMPLE_SECONDS", 0.05)
    backend = _backend({"answer_tokens": 0, "tokens_per_second": 20})
    async with started_process(backend), aclosing(backend.generate(chat(), _call())) as frames:
        await anext(frames)

        async def is_seen() -> bool:
            return backend.engine_load is not None and backend.engine_load.running_count == 1

        await until(is_seen)
        found = present(backend.engine_load)
        assert found.kv_cache_tokens == 4 * 2048
        assert found.prefix_query_tokens > 0
        assert found.HasField("sample_time"), "it has a request"
        page = MetricsPage()
        pages = {"smol": backend.engine_page}
        add_runner_metrics(page, "titan", runner_service_pb2.DescribeResponse, lambda: pages)
        text = (await page.render()).body.decode()
        assert 'vllm:num_requests_running{engine="0",model="smol",model_name="smol",runner="titan"} 1.0' in text
    assert backend.engine_load is None


async def test_model_sleeps_and_wakes_in_its_process() -> None:
    backend = _backend({"answer_tokens": 4}, sleep_level=1)
    async with started_process(backend, ON_A_DEVICE) as (facts, process):
        assert await backend.sleep()
        assert process.is_running()
        assert await backend.start(ON_A_DEVICE) == facts
        assert backend.process_id == process.pid
        assert await _frames(backend)


async def test_weights_dropped_by_sleep_are_reloaded() -> None:
    backend = _backend({"answer_tokens": 4}, sleep_level=2)
    async with started_process(backend, ON_A_DEVICE) as (_, process):
        assert await backend.sleep()
        await backend.start(ON_A_DEVICE)
        assert backend.process_id == process.pid
        assert (await _state(backend)).remote_calls == ["reload_weights"]


@pytest.mark.parametrize(
    ("settings", "order"),
    [({"sleep_level": 1}, LoadOrder()), ({"sleep_level": 1}, LoadOrder(shares=())), ({}, ON_A_DEVICE)],
    ids=["no ledger", "no device", "not configured"],
)
async def test_process_is_stopped_instead_of_sleeping(settings: dict[str, Any], order: LoadOrder) -> None:
    async with started_process(backend := _backend(**settings), order):
        assert not await backend.sleep()


async def test_sleeping_process_is_replaced_for_a_different_load() -> None:
    backend = _backend(sleep_level=1)
    async with started_process(backend, ON_A_DEVICE) as (_, process):
        assert await backend.sleep()
        other = LoadOrder(shares=ON_A_DEVICE.shares, hides_devices=True, parameters={"slots": 2})
        facts = await backend.start(other)
        assert facts.slots == 2
        assert not process.is_running()


async def test_stop_ends_a_sleeping_process() -> None:
    backend = _backend(sleep_level=1)
    async with started_process(backend, ON_A_DEVICE) as (_, process):
        assert await backend.sleep()
        await backend.stop()
        assert not process.is_running()
        assert backend.process_id is None


async def test_sleeping_process_that_died_is_restarted() -> None:
    children = own_children()
    backend = _backend({"answer_tokens": 4}, sleep_level=1)
    async with started_process(backend, ON_A_DEVICE) as (_, process):
        assert await backend.sleep()
        process.kill()
        await backend.start(ON_A_DEVICE)
        assert backend.process_id != process.pid
        assert await _frames(backend)
    assert own_children() == children


async def test_socket_folder_path_that_is_too_long_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with fails(Reason.CONNECT_FAILED) as failed:
        await _backend().start()
    assert "too long a path" in failed.value.message
    assert list(deep.iterdir()) == []


async def test_socket_folder_that_cannot_be_made_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full or removed folder for temporary files was an internal error of the model."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with fails(Reason.CONNECT_FAILED) as failed:
        await _backend().start()
    assert failed.value.message == "no folder for its files could be made: No such file or directory"
