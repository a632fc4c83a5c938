"""Engines that never become ready, and servers of others that refuse, break or are not there."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from kit.engine_settings import engine_settings
from kit.engines import failure_of, fake_engine
from kit.failures import fails
from kit.fake_backend import run_fake_backend
from kit.own_children import own_children
from restart_stage import living

from runner_svc.backend import engine_process
from runner_svc.policy.backoff import RestartLimits
from runner_svc.policy.lifecycle import Phase
from runner_svc.runtimes.openai_http import openai_http_backend as backend
from runner_svc.runtimes.openai_http.openai_http_backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import OpenAiHttpModel
from weft.kernel.errors.error_tree import UNSENT
from weft.kernel.errors.reasons import Reason
from weft_testing.free_port import free_port

STALL_SECONDS = 0.25


async def test_engine_that_never_becomes_ready_times_out_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "LOAD_CHECK_SECONDS", 0.05)
    hangs = {"never_healthy": True, "fork_grandchild": True, "grandchild_setsid": True}
    engine = fake_engine(hangs, load_stall_seconds=STALL_SECONDS)
    limits = RestartLimits(max_deaths=2, first_pause_seconds=60.0)
    async with living(engine, slots=1, restart=limits) as stage:
        await stage.until_phase(Phase.CRASH_LOOP)
        assert [Reason(restart.reason) for restart in stage.instance.restart_log.all] == [Reason.LOAD_STALLED] * 2
        assert "loading made no progress" in stage.instance.detail
        assert not own_children()
        with fails(Reason.WAKE_FAILED):
            await stage.instance.wake()


def _server_at(url: str) -> AttachedServer:
    return AttachedServer(*engine_settings(OpenAiHttpModel, url=url, upstream_model="m", load_stall_seconds=1.0))


@asynccontextmanager
async def _upstream(**switches: Any) -> AsyncIterator[AttachedServer]:
    async with run_fake_backend(**switches) as fake:
        server = _server_at(fake.base_url)
        await server.start()
        try:
            yield server
        finally:
            await server.stop()


@pytest.mark.parametrize(
    ("status", "reason", "later"),
    [
        (429, Reason.RATE_LIMIT_EXCEEDED, Reason.RATE_LIMIT_EXCEEDED),
        (503, Reason.BACKEND_NOT_READY, Reason.NO_SLOT_AVAILABLE),
    ],
)
async def test_busy_upstream_retry_after_is_honored(status: int, reason: Reason, later: Reason) -> None:
    async with _upstream(status=status, retry_after_seconds=17) as server:
        error = await failure_of(server)
        assert error.reason is reason
        assert error.retry_after_seconds == pytest.approx(17.0)
        again = await failure_of(server)
        assert again.reason is later
        assert error.log_message in again.message, "its words may quote the prompt of the earlier request"
        assert error.message not in again.message
        assert again.metadata == {UNSENT: "true"}
        assert again.retry_after_seconds is not None
        assert 15.0 < again.retry_after_seconds <= 17.0


@pytest.mark.parametrize(
    "place", ["http://no-such-host.invalid:{free}", "https://127.0.0.1:{plain}", "http://127.0.0.1:{free}"]
)
async def test_unreachable_upstream_fails_to_connect_without_revealing_its_address(place: str) -> None:
    async with run_fake_backend() as fake:
        plain, free = fake.base_url.rpartition(":")[2], free_port()
        server = _server_at(place.format(free=free, plain=plain))
        async with asyncio.timeout(15.0):
            with fails(Reason.CONNECT_FAILED) as failed:
                await server.start()
    for secret in ("no-such-host", plain, str(free)):
        assert secret not in failed.value.message


async def test_rate_limiting_upstream_counts_as_reachable() -> None:
    async def too_often(request: web.BaseRequest) -> web.Response:
        del request
        return web.Response(status=429)

    async with RawTestServer(too_often) as listening:
        config = engine_settings(
            OpenAiHttpModel,
            url=str(listening.make_url("")),
            upstream_model="m",
            probe_interval_seconds=0.01,
            probe_failures=2,
        )
        server = AttachedServer(*config)
        await server.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await server.wait_exit()
        await server.stop()


async def test_silent_upstream_counts_as_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "PROBE_TIMEOUT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = silent.getsockname()
        server = _server_at(f"http://127.0.0.1:{address[1]}")
        async with asyncio.timeout(20.0):
            with fails(Reason.CONNECT_FAILED):
                await server.start()
    # Connections of earlier tests in this process may not have ended yet.
    assert address not in [tuple(each.raddr) for each in psutil.Process().net_connections(kind="tcp")]
