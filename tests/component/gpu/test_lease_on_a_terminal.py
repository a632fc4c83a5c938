"""`weft mesh lease acquire` in the foreground of a terminal."""

import asyncio
import sys
from contextlib import suppress

import pytest
from fake_cards_stage import Stage, needs_the_fake
from ledger_home import acquire_command
from scripted_ledger import Script

pytestmark = [pytest.mark.slow("starts registries and commands on a device"), needs_the_fake]

CTRL_C = b"\x03"
_ON_A_TERMINAL = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
_COUNTS = (
    "import signal, sys, time\n"
    "times = []\n"
    "signal.signal(signal.SIGINT, lambda *_: times.append(1))\n"
    "print('ready', flush=True)\n"
    "while not times: time.sleep(0.01)\n"
    "time.sleep(1.0)\n"
    "print('interrupted', len(times), flush=True)\n"
    "sys.exit(5)\n"
)


async def _typed(stage: Stage, *command: str, ready: bytes, keys: bytes) -> tuple[int, bytes]:
    """Run a command on a terminal, type `keys` once it has written `ready`; its exit status and all it wrote."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _ON_A_TERMINAL,
        *command,
        env=stage.environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    written = b""
    try:
        async with asyncio.timeout(30.0):
            while ready not in written and (some := await process.stdout.read(1000)):
                written += some
            process.stdin.write(keys)
            written += await process.stdout.read()
            return await process.wait(), written
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.stdin.close()
        await process.wait()


@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", 'exec "$0" "$@" < /dev/null']])
async def test_ctrl_c_reaches_the_command_exactly_once(stage: Stage, ledger: Script, wrapper: list[str]) -> None:
    command = wrapper + acquire_command("1GiB", sys.executable, "-c", _COUNTS)
    status, written = await _typed(stage, *command, ready=b"ready", keys=CTRL_C)
    assert b"interrupted 1" in written
    assert status == 5
    assert len(ledger.released) == 1


async def test_wait_reason_updates_in_place_on_one_line(stage: Stage, ledger: Script) -> None:
    ledger.waits = ["held by qwen (busy)", "held by qwen (unloading)"]
    command = acquire_command("1GiB", sys.executable, "-c", _COUNTS)
    _, written = await _typed(stage, *command, ready=b"ready", keys=CTRL_C)
    line = b"\r\x1b[Kweft: waiting: held by qwen (busy)\r\x1b[Kweft: waiting: held by qwen (unloading)\r\nweft: holds "
    assert line in written
