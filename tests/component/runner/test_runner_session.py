"""The calls of a runner's session to the registry, on a fake clock."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from grpc import ChannelConnectivity
from kit.waiting import until
from runner_harness import NotingRegistry, noting_registry
from structlog.testing import capture_logs

from runner_svc.runner_config import RunnerConfig
from runner_svc.session.report import RunnerReport
from runner_svc.session.session import LEFT_OUT_RETRY_SECONDS, RunnerSession
from weft.api.registry.v1 import agent_pb2
from weft.dispatch.tickets import TicketGate
from weft.kernel.channels.rpc import open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock


class Stage:
    def __init__(
        self, session: RunnerSession, report: RunnerReport, registry: NotingRegistry, clock: FakeClock
    ) -> None:
        self.session = session
        self.report = report
        self.registry = registry
        self.clock = clock
        self.began = clock.monotonic()

    async def until_beats(self, count: int) -> None:
        await until(lambda: len(self.registry.beats) >= count)

    async def pass_time(self, seconds: int) -> None:
        """Let time go by in steps; after each, the session has done its work and sleeps again."""
        for _ in range(seconds):
            await self.clock.advance(1.0, sleepers=1)

    @property
    def beat_seconds(self) -> list[float]:
        return [at - self.began for at in self.registry.beat_times]


@asynccontextmanager
async def _session(folder: Path, *, answers: bool = True) -> AsyncIterator[Stage]:
    """A session that has reported once, if its registry answers."""
    clock = FakeClock()
    async with noting_registry(folder, clock) as (registry, address):
        if not answers:
            registry.answers.clear()
        config = RunnerConfig(
            name="r1",
            host="h",
            address="unix:/r1",
            registry_address=address,
            session_file=folder / "r1.session",
            models=(),
            agents=(agent_pb2.AgentManifest(name="coder", pool="p"),),
        )
        report = RunnerReport(config, "life-1", [])
        channel = open_channel(address)
        session = RunnerSession(
            registry=channel,
            report=report,
            gates=(TicketGate(runner="r1", incarnation="life-1"),),
            incarnation="life-1",
            session_file=config.session_file,
            clock=clock,
            jitter=lambda: 1.0,
        )
        stage = Stage(session, report, registry, clock)
        await session.start()
        try:
            if answers:
                await stage.until_beats(1)
                await clock.wait_for_sleepers(1)
            yield stage
        finally:
            await session.stop()
            await channel.close(grace=None)


async def test_idle_runner_reports_only_at_heartbeat_intervals(tmp_path: Path) -> None:
    async with _session(tmp_path) as stage:
        await stage.pass_time(65)
        assert stage.beat_seconds == [0.0, 30.0, 60.0]
        assert [beat.sequence for beat in stage.registry.beats] == [1, 2, 3]
        assert [agent.name for agent in stage.registry.opened[0].agents] == ["coder"]


async def test_changed_capability_is_reported_at_the_next_report_interval(tmp_path: Path) -> None:
    async with _session(tmp_path) as stage:
        await stage.pass_time(7)
        stage.report.draining = True
        await stage.pass_time(2)
        assert stage.beat_seconds == [0.0]
        await stage.pass_time(1)
        assert stage.beat_seconds == [0.0, 10.0]
        assert stage.registry.capability.draining
        await stage.pass_time(29)
        assert stage.beat_seconds == [0.0, 10.0], "the report was a heartbeat too"
        await stage.pass_time(1)
        assert stage.beat_seconds == [0.0, 10.0, 40.0]


async def test_noted_change_is_reported_immediately_and_an_unchanged_state_is_not(tmp_path: Path) -> None:
    async with _session(tmp_path) as stage:
        stage.report.draining = True
        stage.session.note_change()
        await stage.until_beats(2)
        stage.session.note_change()
        await stage.pass_time(20)
        assert stage.beat_seconds == [0.0, 0.0]


async def test_new_registry_gets_a_report_immediately_and_a_retry_after_its_rejection(tmp_path: Path) -> None:
    async with _session(tmp_path) as stage:
        stage.registry.failures = [WeftError(Reason.REGISTRY_STANDBY, "not yet")]
        stage.session.note_other_registry()
        await stage.until_beats(2)
        await stage.clock.wait_for_sleepers(1)
        await stage.clock.advance(0.1)
        await stage.until_beats(3)
        await stage.pass_time(20)
        assert [round(at, 3) for at in stage.beat_seconds] == [0.0, 0.0, 0.1]


async def test_left_out_items_are_published_again_at_intervals_without_a_gap_in_the_heartbeats(tmp_path: Path) -> None:
    async with _session(tmp_path) as stage:
        stage.registry.taken = {"coder"}
        stage.session.note_models()
        await stage.until_beats(2)
        await stage.pass_time(int(LEFT_OUT_RETRY_SECONDS))
        assert len(stage.registry.opened) == 3
        stage.registry.taken = set()
        await stage.pass_time(int(LEFT_OUT_RETRY_SECONDS))
        assert len(stage.registry.opened) == 4
        await stage.pass_time(2 * int(LEFT_OUT_RETRY_SECONDS))
        assert len(stage.registry.opened) == 4


async def test_left_out_item_is_logged_once(tmp_path: Path) -> None:
    async with _session(tmp_path) as stage:
        stage.registry.taken = {"coder"}
        stage.session.note_models()
        with capture_logs() as lines:
            await stage.until_beats(2)
            await stage.pass_time(2 * int(LEFT_OUT_RETRY_SECONDS))
        assert len(stage.registry.opened) == 4
        assert [line["name"] for line in lines if line["event"] == "not served by the mesh"] == ["coder"]


async def test_refused_change_of_the_models_does_not_end_the_heartbeats(tmp_path: Path) -> None:
    async with _session(tmp_path) as stage:
        stage.registry.failures = [WeftError(Reason.INVALID_ARGUMENT, "runner.host: no")]
        stage.report.draining = True
        stage.session.note_models()
        await stage.until_beats(2)
        assert len(stage.registry.opened) == 2
        assert stage.registry.capability.draining


async def test_unacknowledged_report_is_retried_after_a_backoff(tmp_path: Path) -> None:
    async with _session(tmp_path) as stage:
        stage.registry.failures = [WeftError(Reason.INTERNAL, "oops")] * 2
        stage.report.draining = True
        stage.session.note_change()
        await stage.until_beats(2)
        await stage.clock.wait_for_sleepers(1)
        await stage.clock.advance(0.1)
        await stage.until_beats(3)
        await stage.clock.wait_for_sleepers(1)
        await stage.clock.advance(0.2)
        await stage.until_beats(4)
        assert [round(at, 3) for at in stage.beat_seconds] == [0.0, 0.0, 0.1, 0.3]
        assert all(beat.capability.draining for beat in stage.registry.beats[1:])


async def test_unknown_session_is_reopened_with_its_id(tmp_path: Path) -> None:
    async with _session(tmp_path) as stage:
        stage.registry.failures = [WeftError(Reason.SESSION_UNKNOWN, "who?")]
        await stage.session.report_now()
        stage.registry.failures = [WeftError(Reason.SESSION_UNKNOWN, "who?")]
        stage.report.draining = True
        stage.session.note_change()
        await stage.until_beats(3)
        await stage.clock.wait_for_sleepers(1)
        await stage.clock.advance(0.1)
        await stage.until_beats(4)
        assert [request.session_id for request in stage.registry.opened] == ["", "session-1"]


async def test_restarted_registry_gets_a_report_at_the_next_report_interval(tmp_path: Path) -> None:
    async with _session(tmp_path) as stage:
        await stage.pass_time(6)
        await stage.registry.end()
        # Real time, not the clock's: that the connection is lost must have arrived before the runner looks.
        await until(lambda: stage.session._registry.get_state() is not ChannelConnectivity.READY)
        await stage.registry.serve(f"unix:{tmp_path}/registry.sock")
        await stage.pass_time(4)
        await stage.until_beats(2)
        assert stage.beat_seconds == [0.0, 10.0]


async def test_reopen_aborts_a_hanging_report_and_opens_the_same_session_immediately(tmp_path: Path) -> None:
    async with _session(tmp_path) as stage:
        stage.registry.answers.clear()
        stage.report.draining = True
        stage.session.note_change()
        await stage.until_beats(2)
        stage.session.reopen()
        await until(lambda: len(stage.registry.opened) == 2)
        stage.registry.answers.set()
        await stage.until_beats(3)
        assert stage.registry.opened[1].session_id == "session-1"
        assert stage.clock.monotonic() == stage.began, "it waited"


async def test_reopen_does_not_wait_for_a_retry(tmp_path: Path) -> None:
    async with _session(tmp_path) as stage:
        stage.registry.failures = [WeftError(Reason.SERVICE_UNAVAILABLE, "away")]
        stage.report.draining = True
        stage.session.note_change()
        await stage.until_beats(2)
        await stage.clock.wait_for_sleepers(1)
        stage.session.reopen()
        await stage.until_beats(3)
        assert len(stage.registry.opened) == 2


async def test_lost_open_response_is_retried_under_the_same_request_id(tmp_path: Path) -> None:
    async with _session(tmp_path, answers=False) as stage:
        await until(lambda: len(stage.registry.opened) == 1)
        stage.session.reopen()
        await until(lambda: len(stage.registry.opened) == 2)
        stage.registry.answers.set()
        await stage.until_beats(1)
        first, second = stage.registry.opened
        assert first.request_id == second.request_id
        stage.session.reopen()
        await until(lambda: len(stage.registry.opened) == 3)
        assert stage.registry.opened[2].request_id != first.request_id


async def test_agents_that_change_while_the_session_opens_are_published_too(tmp_path: Path) -> None:
    async with _session(tmp_path, answers=False) as stage:
        await until(lambda: len(stage.registry.opened) == 1)
        stage.report.published_agents = (agent_pb2.AgentManifest(name="writer", pool="p"),)
        stage.session.note_models()
        stage.registry.answers.set()
        await stage.until_beats(1)
        await stage.pass_time(10)
        assert [[agent.name for agent in each.agents] for each in stage.registry.opened] == [["coder"], ["writer"]]


async def test_stop_closes_the_session_once(tmp_path: Path) -> None:
    async with _session(tmp_path) as stage:
        stage.session.reopen()
        await stage.until_beats(2)
        await stage.session.stop()
        await stage.session.stop()
        assert stage.registry.closed == 1
