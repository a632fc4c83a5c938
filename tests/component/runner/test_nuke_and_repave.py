"""A backend that fails is ended and started again: every way it can fail, with real processes."""

import asyncio
import shlex
import socket

import psutil
import pytest
from kit.presence import present
from restart_stage import LONG, repaving

from runner_svc.policy.backoff import RestartLimits
from runner_svc.policy.lifecycle import Phase
from runner_svc.request_records import RequestState
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_backend.process import fake_backend_command

NOTICE_SECONDS = 1.0
"""Time within which a fault is noticed, its requests have failed, and its slots are free."""


async def test_backend_killed_mid_stream_ends_its_requests_frees_slots_and_replays_nothing() -> None:
    async with repaving(**LONG) as stage:
        await stage.until_phase(Phase.READY)
        streams = [await stage.stream(name) for name in ("r1", "r2")]
        refused = present(await stage.ask("r3"))
        assert refused.reason is Reason.NO_SLOT_AVAILABLE
        stage.kill()
        async with asyncio.timeout(NOTICE_SECONDS):
            errors = await asyncio.gather(*streams)
        assert [error.reason for error in errors if error] == [Reason.SERVER_DIED] * 2
        assert not stage.instance.slots.holders
        records = {record.request_id: record for record in stage.instance.records.all}
        assert (records["r1"].state, records["r1"].reason) == (RequestState.FAILED, Reason.SERVER_DIED)
        assert records["r1"].output_chars > 0
        await stage.until_restarted()
        async with stage.control() as control:
            assert (await control.state()).requests_started == 0, "a request was run again"
        assert await stage.ask() is None


def _takes_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow("waits for a process to be restarted")
async def test_live_process_that_accepts_no_connections_is_restarted() -> None:
    """The server is a child of a script that outlives it: the process is there, its port is not."""
    script = f'{shlex.join(fake_backend_command())} "$@" & wait; exec sleep 60'
    async with repaving(("/bin/sh", "-c", script, "sh")) as stage:
        await stage.until_phase(Phase.READY)
        (server,) = psutil.Process(stage.backend.process_id).children()
        (port,) = {each.laddr.port for each in server.net_connections() if each.status == psutil.CONN_LISTEN}
        server.kill()
        # Its first thread may have ended while others still hold its sockets.
        await stage.until(lambda: not _takes_connections(port), "its port is still there")
        error = present(await stage.ask())
        assert error.reason is Reason.CONNECT_FAILED
        await stage.until_restarted()
        assert [Reason(restart.reason) for restart in stage.instance.restart_log.all] == [Reason.CONNECT_FAILED]
        assert await stage.ask() is None


async def test_crash_loop_stops_after_five_failures_with_a_reason_and_does_not_affect_others() -> None:
    limits = RestartLimits(first_pause_seconds=60.0)
    script = "echo starting; echo cannot read the model: bad magic; exit 1"
    async with repaving() as other, repaving(("/bin/sh", "-c", script), limits=limits) as stage:
        await stage.until_phase(Phase.CRASH_LOOP)
        assert stage.instance.restart_count == 5
        assert "exit code 1" in stage.instance.detail
        assert "it cannot read the model's file" in stage.instance.detail
        assert "starting" not in stage.instance.detail, "the output of an engine may quote prompts"
        assert stage.instance.restart_log.crash_lines == ("starting", "cannot read the model: bad magic")
        assert stage.backend.process_id is None
        await other.until_phase(Phase.READY)
        assert await other.ask() is None
        assert (other.instance.restart_count, stage.instance.restart_count) == (0, 5)
