"""Recipes carried out for real: a controller over HTTP, programs, a datagram."""

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from aiohttp import web
from kit.failures import fails
from kit.http_server import http_server
from kit.own_children import lives
from kit.recipes import command_recipe, http_recipe, packet_recipe
from kit.waiting import until

from weft.api.registry.v1.wake_pb2 import WakeRecipe
from weft.kernel.errors.reasons import Reason
from weft.wake.recipes import magic_packet
from weft.wake.run import MAX_OUTPUT_BYTES, _ErrorTail, run_recipe

SECRET = "very-secret-token"


async def _run(recipe: WakeRecipe, timeout_seconds: float = 10.0, environment: Mapping[str, str] | None = None) -> None:
    await run_recipe(recipe, timeout_seconds=timeout_seconds, environment=environment or dict(os.environ))


async def _failure(recipe: WakeRecipe, timeout_seconds: float = 10.0) -> str:
    with fails(Reason.WAKE_FAILED) as failed:
        await _run(recipe, timeout_seconds)
    hides = failed.value.__suppress_context__ or failed.value.__context__ is None
    assert hides, "aiohttp's message in the context holds the address"
    return failed.value.message


def _python(code: str) -> WakeRecipe:
    return command_recipe(argv=(sys.executable, "-I", "-S", "-c", code))


async def test_http_recipe_sends_its_method_and_headers_with_variables_expanded() -> None:
    seen: list[tuple[str, str | None]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.method, request.headers.get("Authorization")))
        return web.Response(status=202)

    async with http_server(answer) as url:
        recipe = http_recipe(url=url, method="PUT", headers={"Authorization": "Bearer ${WEFT_WAKE_TOKEN}"})
        await _run(recipe, environment={"WEFT_WAKE_TOKEN": SECRET})
    assert seen == [("PUT", f"Bearer {SECRET}")]


@pytest.mark.parametrize("status", [302, 404, 500])
async def test_non_2xx_response_is_a_failure_with_its_status(status: int) -> None:
    hits = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal hits
        hits += 1
        return web.Response(status=status, headers={"Location": str(request.url)})

    async with http_server(answer) as url:
        message = await _failure(http_recipe(url=url, headers={"X-Token": SECRET}))
    assert message == f"the recipe's request was answered with status {status}"
    assert hits == 1, "a redirect was followed"


async def test_unreachable_controller_is_reported_without_its_address() -> None:
    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(30.0)
        return web.Response()

    async with http_server(answer) as url:
        assert await _failure(http_recipe(url=url), 0.2) == "the recipe's request got no answer within 0.2 s"
    assert await _failure(http_recipe(url=url)) == "the recipe's request could not connect"


async def test_missing_variable_is_reported_by_its_name() -> None:
    message = await _failure(http_recipe(url="http://127.0.0.1:1/wake", headers={"X": "${WEFT_WAKE_NOT_SET}"}))
    assert message == "the environment variable WEFT_WAKE_NOT_SET is not set where the recipe runs"


async def test_malformed_recipe_is_reported_without_quoting_it() -> None:
    async def answer(request: web.Request) -> web.Response:
        raise AssertionError(f"{request.path} was sent")

    async with http_server(answer) as url:
        for recipe in (
            http_recipe(url="not a url"),
            http_recipe(url=url, headers={"X-Token": f"{SECRET}\r\nX-Other: 1"}),
        ):
            message = await _failure(recipe)
            assert "malformed" in message
            assert SECRET not in message


async def test_program_with_exit_code_zero_succeeds_and_sees_only_the_given_environment(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    code = f"import os; open({str(seen)!r}, 'w').write(os.environ.get('MARK', '') + os.environ.get('HOME', ''))"
    await _run(_python(code), environment={"MARK": "x"})
    assert seen.read_text() == "x"


async def test_failing_program_is_reported_with_its_exit_code_and_last_line() -> None:
    code = "import sys; print('first', file=sys.stderr); sys.exit('no power at http://10.0.0.5/x\\n\\n')"
    message = await _failure(_python(code))
    assert message == "the recipe's command ended with exit code 1: no power at [hidden]"


async def test_last_line_of_flooding_output_is_kept_and_truncated() -> None:
    code = "import sys; sys.stderr.write('x' * 10_000_000); sys.stderr.write('\\n' + 'y' * 100_000); sys.exit(3)"
    message = await _failure(_python(code))
    assert message.startswith("the recipe's command ended with exit code 3: yyy")
    assert len(message) < 400


async def test_last_line_is_found_behind_output_that_was_not_read_yet() -> None:
    tail = _ErrorTail()
    os.write(tail.write_end, b"starting\n" * 3_000 + b"no power\n")
    assert tail.last_line() == "no power"
    tail.close()


async def test_whole_last_line_of_a_program_with_a_long_argument_is_reported() -> None:
    code = "import sys; sys.stderr.write('x' * 10_000); sys.exit('\\nno power')" + "#" * MAX_OUTPUT_BYTES
    assert (await _failure(_python(code))).endswith("exit code 1: no power")


async def test_program_killed_by_an_unnamed_signal_is_a_failure() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)"
    assert await _failure(_python(code)) == "the recipe's command ended with signal 37"


@pytest.mark.parametrize("said", [f"bad token {SECRET}", "x" * 290 + f" {SECRET}"])
async def test_option_value_is_never_revealed_even_partially(said: str) -> None:
    code = f"import sys; sys.exit({said.replace(SECRET, '')!r} + sys.argv[1].partition('=')[2])"
    message = await _failure(command_recipe(argv=(sys.executable, "-I", "-S", "-c", code, f"--token={SECRET}")))
    assert not any(SECRET[:length] in message for length in range(4, len(SECRET)))


async def test_secret_whose_beginning_was_cut_off_is_not_revealed() -> None:
    """Regression: of a line of more than 4 KiB, a secret's end was no longer recognized."""
    for rest in range(MAX_OUTPUT_BYTES - len(SECRET), MAX_OUTPUT_BYTES, 4):
        code = f"import sys; sys.exit(sys.argv[1].partition('=')[2] + 'x' * {rest - 1})"
        message = await _failure(command_recipe(argv=(sys.executable, "-I", "-S", "-c", code, f"--token={SECRET}")))
        assert message.startswith("the recipe's command ended with exit code 1: xxx")


async def test_arguments_are_not_quoted_in_errors_and_not_interpreted_by_a_shell(tmp_path: Path) -> None:
    code = "import sys; sys.exit('cannot use ' + sys.argv[1])"
    made = tmp_path / "made"
    argument = f"{SECRET}; touch {made}"
    message = await _failure(command_recipe(argv=(sys.executable, "-I", "-S", "-c", code, argument)))
    assert message == "the recipe's command ended with exit code 1: cannot use [hidden]"
    assert not made.exists()


async def test_missing_program_is_a_failure_that_hides_its_name() -> None:
    message = await _failure(command_recipe(argv=(f"/nowhere/{SECRET}",)))
    assert message == "the recipe's command cannot be started: No such file or directory"


@pytest.mark.slow("waits for a program that does not end")
async def test_program_that_times_out_is_killed_with_all_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-I', '-S', '-c', {child!r}])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(60)"
    )
    assert await _failure(_python(code), 2.0) == "the recipe's command has not ended within 2 s"
    await until(lambda: not any(lives(int(pid)) for pid in pids.read_text().split()))


async def test_program_can_leave_a_server_that_holds_its_output(tmp_path: Path) -> None:
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


async def test_magic_packet_is_sent() -> None:
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
async def test_malformed_address_is_rejected_before_sending(recipe: WakeRecipe) -> None:
    assert "malformed" in await _failure(recipe)


async def test_unknown_recipe_kind_of_a_newer_release_fails_with_a_reason() -> None:
    assert await _failure(WakeRecipe()) == "the recipe is of a kind that is not known here"
