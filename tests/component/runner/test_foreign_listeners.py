"""Another program on the port of an engine, which lives or has just died, receives no prompt and no key."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from kit.comfyui import COMMAND, HILL, LIMITS, call, workflow
from kit.engine_settings import engine_settings
from kit.engines import GRACES, events_of, fake_engine, started
from kit.waiting import until
from server_dialects import TOLD, fake_command, server_settings

from runner_svc.backend.engine_process import ProcessBackend
from runner_svc.runtimes.server.server_backend import ServerBackend
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_extensions.comfyui.comfyui_backend import ComfyUiBackend
from weft_extensions.comfyui.runtime import ComfyUiModel

pytestmark = pytest.mark.slow("starts engine processes and other programs")

PROGRAM = str(Path(__file__).with_name("foreign_listener.py"))
CALLERS = 24
"""Concurrent requests, each on its own connection, of which the kernel gives about half to either listener."""


class Foreign:
    def __init__(self, output: asyncio.StreamReader, record: Path) -> None:
        self._output, self._record = output, record

    async def accepted(self) -> None:
        async with asyncio.timeout(10.0):
            assert await self._output.readline() == b"accepted\n"

    def received(self) -> bytes:
        return self._record.read_bytes()


@asynccontextmanager
async def _foreign(port: int, folder: Path) -> AsyncGenerator[Foreign]:
    record = folder / "record"
    process = await asyncio.create_subprocess_exec(sys.executable, "-SE", PROGRAM, str(port), str(record), stdout=PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(10.0):
            assert await process.stdout.readline() == b"listening\n"
        yield Foreign(process.stdout, record)
    finally:
        process.kill()
        await process.communicate()


def _port_of(backend: ProcessBackend) -> int:
    """The port that one of the engine's processes listens on."""
    for process in backend.processes():
        for connection in psutil.Process(process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                return int(connection.laddr.port)
    raise AssertionError("it listens nowhere")


async def _killed(backend: ProcessBackend) -> int:
    """Kills the engine, and returns its port before weft has noticed the death."""
    port = _port_of(backend)
    assert backend.process_id is not None
    os.kill(backend.process_id, signal.SIGKILL)
    return port


async def test_second_listener_on_the_port_of_a_live_engine_receives_nothing(tmp_path: Path) -> None:
    engine = started(fake_engine({"reuse_port": True}))
    async with engine as (backend, _), _foreign(_port_of(backend), tmp_path) as foreign:
        asked = (events_of(backend) for _ in range(CALLERS))
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        await foreign.accepted()
        assert foreign.received() == b""
    answers = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    reasons = {outcome.reason for outcome in outcomes if isinstance(outcome, WeftError)}
    assert answers, "the engine answers what it accepted"
    assert reasons == {Reason.CONNECT_FAILED}
    assert len(answers) + sum(isinstance(outcome, WeftError) for outcome in outcomes) == CALLERS


@pytest.mark.parametrize("kind", ["printed", "told"])
async def test_program_on_the_port_of_a_dead_engine_receives_no_prompt_and_no_key(tmp_path: Path, kind: str) -> None:
    engine = fake_engine() if kind == "printed" else ServerBackend(*server_settings(command=fake_command(*TOLD)))
    async with started(engine) as (backend, _), _foreign(await _killed(backend), tmp_path) as foreign:
        with pytest.raises(WeftError) as failed:
            await events_of(backend)
        assert foreign.received() == b""
    assert failed.value.reason is Reason.SERVER_DIED


async def test_program_on_the_port_of_a_dead_comfyui_receives_no_prompt(tmp_path: Path) -> None:
    model, context = engine_settings(ComfyUiModel, graces=GRACES)
    engine = started(ComfyUiBackend(model, context, COMMAND, workflow(), limits=LIMITS))
    async with engine as (backend, _), _foreign(await _killed(backend), tmp_path) as foreign:
        with pytest.raises(WeftError):
            async with asyncio.timeout(20.0):
                [frame async for frame in backend.generate_images(HILL, call())]
        await foreign.accepted()
        assert foreign.received() == b""


def _is_connected_to(port: int) -> bool:
    """Whether this process has a connection to the port that nothing was received on."""
    found = psutil.Process().net_connections("tcp")
    return any(each.raddr and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in found)


async def test_engine_that_accepts_late_is_not_taken_for_another_program() -> None:
    async with started(fake_engine()) as (backend, _):
        assert backend.process_id is not None
        port = _port_of(backend)
        await until(lambda: not _is_connected_to(port))  # its start left an idle connection
        os.kill(backend.process_id, signal.SIGSTOP)
        answer = asyncio.create_task(events_of(backend))
        await until(lambda: _is_connected_to(port))
        os.kill(backend.process_id, signal.SIGCONT)
        assert (await answer)[-1].HasField("finished")
