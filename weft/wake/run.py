"""Execution of wake recipes. Every failure is WAKE_FAILED with its cause, without URL, headers or arguments."""

import asyncio
import ipaddress
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from weft.api.registry.v1 import wake_pb2
from weft.kernel.channels.outbound import Outbound
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.wake.recipes import DEFAULT_BROADCAST_ADDRESS, DEFAULT_WAKE_PORT, magic_packet, redacted

OUTBOUND = Outbound()
PACKET_COPIES = 3
"""Copies of the magic packet, since datagrams get lost."""


async def run_recipe(
    recipe: wake_pb2.WakeRecipe,
    *,
    timeout_seconds: float,
    environment: Mapping[str, str],
    outbound: Outbound = OUTBOUND,
) -> None:
    """Runs a recipe within `timeout_seconds`. Raises WAKE_FAILED if it does not succeed.

    `environment` has the variables for header values, and is the whole environment of a command.
    """
    match recipe.WhichOneof("action"):
        case "http":
            from weft.wake.http_request import send_request  # noqa: PLC0415 - see that module

            await send_request(recipe.http, timeout_seconds, environment, outbound)
        case "command":
            await run_command(recipe.command.argv, timeout_seconds=timeout_seconds, environment=environment)
        case "wake_on_lan":
            _send_packet(recipe.wake_on_lan)
        case None:
            raise _failed("the recipe is of a kind that is not known here")


def _send_packet(action: wake_pb2.WakeOnLanAction) -> None:
    try:
        packet = magic_packet(action.mac_address)
        address = str(ipaddress.IPv4Address(action.broadcast_address or DEFAULT_BROADCAST_ADDRESS))
    except ValueError:
        raise _failed("the Wake-on-LAN packet cannot be sent: its MAC or broadcast address is malformed") from None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            for _ in range(PACKET_COPIES):
                sender.sendto(packet, (address, action.port or DEFAULT_WAKE_PORT))
    except OSError as error:
        raise _failed(f"the Wake-on-LAN packet could not be sent: {error.strerror or 'network error'}") from None


def _failed(message: str) -> WeftError:
    return WeftError(Reason.WAKE_FAILED, message)


TERM_GRACE_SECONDS = 2.0
READ_BYTES = 64 * 1024
"""What a pipe holds at most, so that one read empties it."""
MAX_OUTPUT_BYTES = 4 * 1024
"""Kept part of a program's standard error: enough for its last line."""
MAX_LAST_LINE_CHARS = 300

_SIGNAL_NAMES = MappingProxyType({number.value: number.name for number in signal.Signals})
"""Signal names by number; real-time signals have none."""


async def run_command(argv: Sequence[str], *, timeout_seconds: float, environment: Mapping[str, str]) -> None:
    """Runs `argv` without a shell, with exactly `environment`. Returns after exit code 0.

    Raises WAKE_FAILED with the exit code and the last line of standard error, with arguments and URLs redacted.
    Processes left behind by a successful program continue, but their standard error is closed: a server that is
    started this way needs a separate output. A program that times out is ended with its process group.
    """
    tail = _open_tail()
    try:
        process = await _start(argv, environment, tail)
        try:
            async with asyncio.timeout(timeout_seconds):
                return_code = await process.wait()
        except TimeoutError:
            raise _failed(f"the recipe's command has not ended within {timeout_seconds:g} s") from None
        finally:
            await _end(process)
        # Redact before cutting: half a secret is a secret, too.
        secrets = [*argv, *(argument.partition("=")[2] for argument in argv)]
        last_line = redacted(tail.last_line(max(map(len, secrets))), secrets)[:MAX_LAST_LINE_CHARS]
    finally:
        tail.close()
    if return_code != 0:
        raise _failed(f"the recipe's command ended with {_how(return_code)}" + (f": {last_line}" if last_line else ""))


def _open_tail() -> "_ErrorTail":
    try:
        return _ErrorTail()
    except OSError as error:
        raise _failed(f"the recipe's command cannot be started: {error.strerror}") from None


async def _start(argv: Sequence[str], environment: Mapping[str, str], tail: "_ErrorTail") -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *argv,
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=tail.write_end,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "it is malformed"
        raise _failed(f"the recipe's command cannot be started: {why}") from None
    finally:
        tail.close_write_end()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a running program and its group: TERM, then KILL. Leaves the children of an ended program alone."""
    if process.returncode is not None:
        return
    try:
        _signal_group(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), TERM_GRACE_SECONDS)
    finally:
        _signal_group(process.pid, signal.SIGKILL)
    await process.wait()


class _ErrorTail:
    """The tail of a program's standard error.

    With asyncio's pipe, `wait` would block as long as a child of the program holds the pipe.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._kept = b""
        self._has_write_end = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._read)

    def last_line(self, longest_secret: int = 0) -> str:
        """Returns the last line that is not blank, or "", without what may be the end of a secret that was cut."""
        self._read()
        lines = self._kept.decode("utf-8", "replace").splitlines()
        if len(self._kept) == MAX_OUTPUT_BYTES:
            lines[0] = lines[0][longest_secret:]
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close_write_end(self) -> None:
        """Closes this process's copy of the write end."""
        if self._has_write_end:
            self._has_write_end = False
            os.close(self.write_end)

    def close(self) -> None:
        """Closes both ends."""
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        self.close_write_end()

    def _read(self) -> None:
        with suppress(BlockingIOError):
            chunk = os.read(self._read_end, READ_BYTES)
            self._kept = (self._kept + chunk)[-MAX_OUTPUT_BYTES:]
            if not chunk:  # every holder has closed it; a closed pipe would stay readable
                self._loop.remove_reader(self._read_end)


def _how(return_code: int) -> str:
    return f"exit code {return_code}" if return_code >= 0 else f"signal {_SIGNAL_NAMES.get(-return_code, -return_code)}"


def _signal_group(leader: int, signal_number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal_number)
