"""Tools of real MCP servers over standard input and output: what they answer, and every way they can fail."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from kit.failures import fails
from kit.own_children import lives
from kit.waiting import until
from structlog.testing import capture_logs

from runner_svc.supervise.leftovers import Leftovers
from runner_svc.tools import mcp_connection, mcp_servers
from runner_svc.tools.port import ToolSettings
from runner_svc.tools.tool_box import ToolBox, build_tool_box
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

PROGRAM = (sys.executable, "-m", "weft_testing.fake_mcp_server")
MAX_WAIT_SECONDS = 20.0


@asynccontextmanager
async def running(
    *switches: str, argv: tuple[str, ...] = PROGRAM, allow: tuple[str, ...] = ()
) -> AsyncIterator[ToolBox]:
    config = ToolSettings(
        type="mcp_command",
        name="fake",
        argv=(*argv, *switches),
        environment={"PATH": os.environ["PATH"], "GIVEN": "yes"},
        allow=allow,
        max_output_bytes=1000,
    )
    box = build_tool_box([config])
    try:
        await box.start()
        yield box
    finally:
        await box.stop()


def has(box: ToolBox, name: str) -> bool:
    try:
        return bool(box.pick([name]))
    except WeftError:
        return False


@pytest.mark.slow("starts servers on the SDK")
async def test_sdk_server_answers_adds_tools_and_floods() -> None:
    async with running("--bad-schemas", "--many", "300") as box:
        (echo,) = box.pick(["fake.echo"])
        assert (echo.wire_name, echo.description) == ("fake_echo", "The echo tool.")
        assert echo.parameters["required"] == ["text"]
        assert box.check("fake.echo", '{"text": "hé"}') == {"text": "hé"}
        assert (await box.run("fake.echo", {"text": "hé"})).content == "hé"
        assert has(box, "fake.extra_240")
        with pytest.raises(WeftError, match="more than 256 tools"):
            box.pick(["fake.extra_299"])

        picture = await box.run("fake.picture", {})
        assert picture.content == "Here it is:\n[an image, image/png, that cannot be shown here]"
        failed = await box.run("fake.fail", {})
        assert (failed.failed, failed.content) == (True, "The disk is full.")
        assert (await box.run("fake.structured", {})).content == '{"answer": 42}'

        huge = await box.run("fake.huge", {"bytes": 100_000})
        assert huge.cut
        assert huge.content == "x" * 1000 + "\n[cut: 99000 bytes more]"
        flood = await box.run("fake.huge", {"bytes": 50_000_000})
        assert flood.failed
        assert "more than 4194304 bytes" in flood.content
        assert (await box.run("fake.echo", {"text": "back"})).content == "back"


@pytest.mark.slow("starts servers on the SDK")
async def test_rejected_tools_are_listed_with_the_reason_and_new_ones_appear() -> None:
    async with running("--bad-schemas") as box:
        for name, says in (
            ("fake.elsewhere", "never fetched"),
            ("fake.large", "more than 65536 bytes"),
            ("fake.not a name", "characters"),
            ("fake.grown", "has no tool grown"),
        ):
            with fails(Reason.TOOL_UNAVAILABLE, match=says):
                box.pick([name])
        assert (await box.run("fake.grow", {})).content == "grown"
        await until(lambda: has(box, "fake.grown"))
        assert not (await box.run("fake.grown", {})).failed


@pytest.mark.slow("starts servers on the SDK")
async def test_server_without_a_handshake_is_initialized_the_other_way() -> None:
    async with running("--modern-only") as box:
        assert (await box.run("fake.echo", {"text": "new"})).content == "new"
        await box.run("fake.grow", {})
        await until(lambda: has(box, "fake.grown"))


async def test_only_allowed_tools_can_be_selected_or_called() -> None:
    async with running("--bare", allow=("echo",)) as box:
        assert has(box, "fake.echo")
        with pytest.raises(WeftError, match="the configuration does not allow it"):
            box.pick(["fake.crash"])
        assert "does not allow it" in (await box.run("fake.crash", {})).content
        assert (await box.run("fake.echo", {"text": "alive"})).content == "alive"


async def test_server_receives_only_the_configured_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TOOL_SECRET", "hush")
    async with running("--bare") as box:
        seen = box._sources[0]
        content = (await seen.call("fake.environment", {})).content
        environment = json.loads(content)
    assert environment["GIVEN"] == "yes"
    assert "WEFT_TOOL_SECRET" not in environment
    assert set(environment) <= {"PATH", "GIVEN", "LC_CTYPE", "WEFT_SUPERVISOR_TAG"}


async def test_hanging_call_can_be_cancelled_while_others_continue() -> None:
    async with running("--bare") as box:
        hanging = asyncio.create_task(box.run("fake.hang", {}))
        assert (await box.run("fake.echo", {"text": "meanwhile"})).content == "meanwhile"
        hanging.cancel()
        await asyncio.wait([hanging])
        assert (await box.run("fake.echo", {"text": "after"})).content == "after"


@pytest.mark.parametrize(
    ("tool", "fault"),
    [
        ("fake.crash", "its server has ended (exit code 7)"),
        ("fake.endless", "its server sent a message of more than 4194304 bytes"),
        pytest.param("fake.asks", "without reading the answers", marks=pytest.mark.slow("floods the client")),
    ],
)
async def test_server_that_ends_or_floods_memory_in_a_call_is_restarted_for_the_next(tool: str, fault: str) -> None:
    async with running("--bare") as box:
        outcome = await box.run(tool, {})
        assert outcome.failed
        assert fault in outcome.content
        assert len(asyncio.all_tasks()) < 50
        assert (await box.run("fake.echo", {"text": "back"})).content == "back"


async def test_garbage_between_messages_is_skipped() -> None:
    async with running("--bare") as box:
        assert (await box.run("fake.garbage", {"text": "sense"})).content == "sense"


@pytest.mark.slow("waits for a server that stops")
async def test_server_that_stops_reading_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr(mcp_connection, "CLOSE_SECONDS", 0.1)
    async with running("--bare") as box:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.run("fake.deaf", {}), 0.1)
        await until(lambda: not has(box, "fake.echo"))
        with pytest.raises(WeftError, match="no longer responds"):
            box.pick(["fake.echo"])
        await until(lambda: has(box, "fake.echo"))
        assert (await box.run("fake.echo", {"text": "new"})).content == "new"


async def test_stop_does_not_wait_for_a_pending_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "CHECK_SECONDS", 600.0)
    monkeypatch.setattr(mcp_servers, "STOP_SECONDS", MAX_WAIT_SECONDS)
    monkeypatch.setattr(mcp_connection, "CLOSE_SECONDS", 0.1)
    async with running("--bare") as box:
        deaf = asyncio.create_task(box.run("fake.deaf", {}))
        await asyncio.sleep(0.05)
        deaf.cancel()
        await asyncio.wait([deaf])
        async with asyncio.timeout(MAX_WAIT_SECONDS / 2):
            await box.stop()


async def test_server_that_fails_to_start_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "EAGER_FAILURES", 1)
    async with running("--bare", "--fail-first", str(tmp_path / "marker")) as box:
        with fails(Reason.TOOL_UNAVAILABLE, match=r"exit code 3|cannot be used"):
            box.pick(["fake.echo"])
        await until(lambda: has(box, "fake.echo"))


@pytest.mark.parametrize("argv", [("/no/such/program",), ("true",)])
async def test_program_that_is_no_server_does_not_prevent_runner_startup(argv: tuple[str, ...]) -> None:
    async with running(argv=argv) as box:
        with pytest.raises(WeftError, match="its server has ended") as caught:
            box.pick(["fake.echo"])
        assert "/no/such" not in caught.value.message
        assert (await box.run("fake.echo", {})).failed


async def test_silent_server_delays_startup_briefly_and_stops_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "START_SECONDS", 0.1)
    monkeypatch.setattr(mcp_connection, "CLOSE_SECONDS", 0.1)
    async with running(argv=("sleep", "600")) as box:
        with pytest.raises(WeftError, match="is being started"):
            box.pick(["fake.echo"])
        (child,) = (child for child in psutil.Process().children() if "600" in child.cmdline())
    assert not child.is_running()


async def test_slow_start_attempt_is_ended_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(mcp_servers, "EAGER_FAILURES", 1)
    monkeypatch.setattr(mcp_connection, "CLOSE_SECONDS", 0.1)
    async with running(argv=("sleep", "601")) as box:
        with pytest.raises(WeftError, match="did not answer in time"):
            box.pick(["fake.echo"])
        await box.stop()
        assert [child for child in psutil.Process().children() if "601" in child.cmdline()] == []


async def test_stop_ends_the_server_and_its_detached_child_and_leaves_no_task() -> None:
    async with running("--bare", "--child") as box:
        pids = json.loads((await box.run("fake.pid", {})).content)
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    await until(lambda: not any(lives(pid) for pid in pids))


@pytest.mark.slow("starts servers on the SDK")
async def test_server_dies_with_a_killed_runner_and_its_processes_are_swept_at_the_next_start(tmp_path: Path) -> None:
    state = tmp_path / "processes.json"
    program = (
        "import asyncio, pathlib\n"
        "from runner_svc.supervise.leftovers import Leftovers\n"
        "from runner_svc.tools.tool_box import build_tool_box\n"
        "from runner_svc.tools.port import ToolSettings\n"
        "async def main():\n"
        f"    leftovers = Leftovers(pathlib.Path({str(state)!r}))\n"
        f"    argv = {(*PROGRAM, '--bare', '--child')!r}\n"
        f"    fake = ToolSettings(type='mcp_command', name='fake', argv=argv, environment={dict(os.environ)!r})\n"
        "    box = build_tool_box([fake], make_tag=leftovers.begin)\n"
        "    await box.start()\n"
        "    print((await box.run('fake.pid', {})).content, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    runner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert runner.stdout is not None
    try:
        while not (line := await runner.stdout.readline()).startswith(b"["):
            assert line, "the runner has ended"
        pid, child = json.loads(line)
        assert lives(pid)
    finally:
        runner.kill()
        await runner.wait()
    await until(lambda: not lives(pid))
    assert Leftovers(state).sweep() == [child]


async def test_tool_list_refresh_is_throttled_for_a_server_that_keeps_announcing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp_servers, "LIST_PAUSE_SECONDS", 600.0)
    async with running("--bare", "--restless") as box, asyncio.timeout(MAX_WAIT_SECONDS):
        while (await box.run("fake.lists", {})).content != "2":
            pass
        for _ in range(20):
            assert (await box.run("fake.echo", {"text": "x"})).content == "x"
        assert (await box.run("fake.lists", {})).content == "2"


async def test_server_output_is_logged_only_at_debug_level() -> None:
    with capture_logs() as logs:
        async with running("--bare", "--chatter") as box:
            assert (await box.run("fake.echo", {"text": "user content"})).content == "user content"
    printed = [entry for entry in logs if entry["event"] == "a tool server printed"]
    assert 0 < len(printed) <= mcp_connection.MAX_DEBUG_LINES
    assert {entry["log_level"] for entry in printed} == {"debug"}
    assert "user content" not in str(logs)
