"""Recipes carried out for real: a controller over HTTP, programs, a datagram."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from aiohttp import web
from kit.recipes import command_recipe, http_recipe, packet_recipe

from weft.api.registry.v1.wake_pb2 import WakeRecipe
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.wake.recipes import magic_packet
from weft.wake.run import run_recipe

SECRET = "very-secret-token"


@asynccontextmanager
async def controller(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """A wake controller on a free port; yields the URL of its only route."""
    app = web.Application()
    app.router.add_route("*", "/wake-the-box", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/wake-the-box"
    finally:
        await runner.cleanup()


async def _run(recipe: WakeRecipe, timeout_seconds: float = 10.0, environment: Mapping[str, str] | None = None) -> None:
    await run_recipe(recipe, timeout_seconds=timeout_seconds, environment=environment or dict(os.environ))


async def _failure(recipe: WakeRecipe, timeout_seconds: float = 10.0) -> str:
    with pytest.raises(WeftError) as failed:
        await _run(recipe, timeout_seconds)
    assert failed.value.reason is Reason.WAKE_FAILED
    hides = failed.value.__suppress_context__ or failed.value.__context__ is None
    assert hides, "aiohttp's message in the context holds the address"
    return failed.value.message


def _python(code: str) -> WakeRecipe:
    return command_recipe(argv=(sys.executable, "-I", "-S", "-c", code))


async def test_a_request_has_its_method_and_headers_with_the_variables_put_in() -> None:
    seen: list[tuple[str, str | None]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.method, request.headers.get("Authorization")))
        return web.Response(status=202)

    async with controller(answer) as url:
        recipe = http_recipe(url=url, method="PUT", headers={"Authorization": "Bearer ${WEFT_WAKE_TOKEN}"})
        await _run(recipe, environment={"WEFT_WAKE_TOKEN": SECRET})
    assert seen == [("PUT", f"Bearer {SECRET}")]


@pytest.mark.parametrize("status", [302, 404, 500])
async def test_any_answer_but_2xx_is_a_failure_with_its_status(status: int) -> None:
    hits = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal hits
        hits += 1
        return web.Response(status=status, headers={"Location": str(request.url)})

    async with controller(answer) as url:
        message = await _failure(http_recipe(url=url, headers={"X-Token": SECRET}))
    assert message == f"the recipe's request was answered with status {status}"
    assert hits == 1, "a redirect was followed"


async def test_a_controller_that_is_not_there_or_does_not_answer_is_named_without_its_address() -> None:
    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(30.0)
        return web.Response()

    async with controller(answer) as url:
        assert await _failure(http_recipe(url=url), 0.2) == "the recipe's request got no answer within 0.2 s"
    assert await _failure(http_recipe(url=url)) == "the recipe's request could not connect"


async def test_what_cannot_be_sent_says_so_and_repeats_nothing() -> None:
    async def answer(request: web.Request) -> web.Response:
        raise AssertionError(f"{request.path} was sent")

    async with controller(answer) as url:
        for recipe in (
            http_recipe(url="not a url"),
            http_recipe(url=url, headers={"X-Token": f"{SECRET}\r\nX-Other: 1"}),
        ):
            message = await _failure(recipe)
            assert "malformed" in message
            assert SECRET not in message


async def test_a_program_that_ends_with_zero_has_succeeded_and_saw_only_the_environment_it_was_given(
    tmp_path: Path,
) -> None:
    seen = tmp_path / "seen"
    code = f"import os; open({str(seen)!r}, 'w').write(os.environ.get('MARK', '') + os.environ.get('HOME', ''))"
    await _run(_python(code), environment={"MARK": "x"})
    assert seen.read_text() == "x"


async def test_a_program_that_fails_is_reported_with_its_exit_code_and_last_line() -> None:
    code = "import sys; print('first', file=sys.stderr); sys.exit('no power at http://10.0.0.5/x\\n\\n')"
    message = await _failure(_python(code))
    assert message == "the recipe's command ended with exit code 1: no power at [hidden]"


async def test_the_last_line_of_a_flood_is_kept_and_cut() -> None:
    code = "import sys; sys.stderr.write('x' * 10_000_000); sys.stderr.write('\\n' + 'y' * 100_000); sys.exit(3)"
    message = await _failure(_python(code))
    assert message.startswith("the recipe's command ended with exit code 3: yyy")
    assert len(message) < 400


async def test_a_program_that_dies_of_a_signal_without_a_name_is_a_failure_as_any_other() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)"
    assert await _failure(_python(code)) == "the recipe's command ended with signal 37"


@pytest.mark.parametrize("said", [f"bad token {SECRET}", "x" * 290 + f" {SECRET}"])
async def test_neither_the_value_of_an_option_nor_a_part_of_it_is_told(said: str) -> None:
    code = f"import sys; sys.exit({said.replace(SECRET, '')!r} + sys.argv[1].partition('=')[2])"
    message = await _failure(command_recipe(argv=(sys.executable, "-I", "-S", "-c", code, f"--token={SECRET}")))
    assert not any(SECRET[:length] in message for length in range(4, len(SECRET)))


async def test_arguments_are_not_repeated_and_are_not_for_a_shell(tmp_path: Path) -> None:
    code = "import sys; sys.exit('cannot use ' + sys.argv[1])"
    made = tmp_path / "made"
    argument = f"{SECRET}; touch {made}"
    message = await _failure(command_recipe(argv=(sys.executable, "-I", "-S", "-c", code, argument)))
    assert message == "the recipe's command ended with exit code 1: cannot use [hidden]"
    assert not made.exists()


async def test_a_program_that_does_not_exist_is_a_failure_without_its_name() -> None:
    message = await _failure(command_recipe(argv=(f"/nowhere/{SECRET}",)))
    assert message == "the recipe's command cannot be started: No such file or directory"


@pytest.mark.slow("waits for a program that does not end")
async def test_a_program_that_takes_too_long_is_ended_with_everything_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-I', '-S', '-c', {child!r}])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(60)"
    )
    assert await _failure(_python(code), 2.0) == "the recipe's command has not ended within 2 s"
    deadline = time.monotonic() + 5.0
    while any(psutil.pid_exists(int(pid)) and _runs(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < deadline, "a process survived"
        await asyncio.sleep(0.01)


async def test_a_program_may_leave_a_server_behind_that_holds_its_output(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(left.pid))\n"
        "left.returncode = 0"
    )
    async with asyncio.timeout(10.0):
        await _run(_python(code))
    left = psutil.Process(int(pid_file.read_text()))
    assert left.is_running()
    left.kill()


async def test_a_magic_packet_reaches_the_wire() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
        card.bind(("127.0.0.1", 0))
        card.settimeout(5.0)
        recipe = packet_recipe(
            mac_address="00:11:22:33:44:55", broadcast_address="127.0.0.1", port=card.getsockname()[1]
        )
        await _run(recipe)
        assert card.recv(1024) == magic_packet("00:11:22:33:44:55")


@pytest.mark.parametrize(
    "recipe",
    [
        packet_recipe(mac_address="x"),
        packet_recipe(mac_address="00:11:22:33:44:55", broadcast_address="host.example"),
    ],
)
async def test_a_malformed_address_is_refused_before_anything_is_sent(recipe: WakeRecipe) -> None:
    assert "malformed" in await _failure(recipe)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_recipe_of_a_newer_release_fails_and_says_why() -> None:
    assert await _failure(WakeRecipe()) == "the recipe is of a kind that is not known here"
