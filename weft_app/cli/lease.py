"""`weft mesh lease`: accelerator memory for programs that are no runners, and the leases of all hosts."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from weft.client._home import mesh_address
from weft.client._lease_renewal import ProcessTree
from weft.client.leases import LeaseOptions, MemoryLease, acquired_lease, program_name
from weft.gpu.process import is_alive
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import MAX_NAME_CHARS, require_token
from weft.kernel.values.units import parse_size, size_words
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.options import (
    DEFAULT_HOME,
    SIGNAL_STATUS,
    HomeOption,
    OutputFormat,
    OutputOption,
    ended_by_signals,
    handled,
    naming_fields,
    parameter_of,
)
from weft_app.cli.output import print_document
from weft_app.cli.records import hosts_of, lease_rows, leased_bytes, print_hosts
from weft_app.cli.terminal import is_err_terminal, note, rewrite, safe_text, say, tell
from weft_app.cli.wait import parse_duration

LOOK_SECONDS = 0.2
"""Interval between checks whether the lease is lost."""
TERM_SECONDS = 10.0
"""Time between SIGTERM and SIGKILL for a command whose lease is lost."""
KILL_SECONDS = 5.0
"""Time for the kernel to clean up after SIGKILL."""
LEASE_VARIABLE = "WEFT_LEASE_ID"
_GATE = """
import os, signal, sys
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
gate = int(sys.argv[1])
if not os.read(gate, 1):
    os._exit(125)
os.close(gate)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    os.write(2, f"weft: {sys.argv[2]} cannot be started: {error.strerror}\\n".encode())
    os._exit(127)
"""
"""Becomes the command once the ledger knows its process id. Otherwise, if `weft` were killed early, the command would
use memory that the ledger counts as free."""
_FROM_A_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT})
_PASSED_ON = (*_FROM_A_TERMINAL, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def require_command(command: Sequence[str]) -> None:
    """Raises INVALID_ARGUMENT if the program does not exist, before any wait for memory."""
    if not command:
        raise invalid_field("COMMAND", "is required, such as: weft mesh lease acquire --memory 8GiB -- python train.py")
    if shutil.which(command[0]) is None:
        raise invalid_field("COMMAND", f"there is no program {command[0]!r}")


def run_under(lease: MemoryLease, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a command, forwards signals, returns its exit status. If the lease is lost, ends it and raises LEASE_LOST.

    The command starts only once the ledger knows its process id, and never if weft dies before that.
    """
    with closing(_PassedOn()) as signals, ExitStack() as gate:
        read_end, write_end = os.pipe()
        gate.callback(os.close, write_end)
        try:
            process = subprocess.Popen(  # noqa: S603 - asked for
                [sys.executable, "-I", "-S", "-c", _GATE, str(read_end), *command],
                env={**environment, **lease.environment(), LEASE_VARIABLE: lease.id},
                pass_fds=(read_end,),
            )
        finally:
            os.close(read_end)
        try:
            signals.begin(process)
            lease.held_by(process.pid)
            with suppress(BrokenPipeError):
                os.write(write_end, b"1")
            gate.close()
            _wait(process, lease)
        finally:
            if process.poll() is None:
                gate.close()
                _end(process, lease)
    left = lease.processes()
    if left:
        note(f"{len(left)} processes that {command[0]} started still run; their memory stays reserved until they end")
    status = process.returncode
    return status if status >= 0 else SIGNAL_STATUS - status


def _wait(process: subprocess.Popen[bytes], lease: MemoryLease) -> None:
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
            return
        if lease.is_lost:
            note(f"the lease {lease.id} is lost: its memory may be given to others; ending the command")
            _end(process, lease)
            raise WeftError(Reason.LEASE_LOST, "the command was ended because its lease was lost")


def _end(process: subprocess.Popen[bytes], lease: MemoryLease) -> None:
    """Ends the processes of a lease: SIGTERM, then SIGKILL for those that remain."""
    processes = lease.processes()
    for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        for each in filter(is_alive, processes):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each.pid, number)
        deadline = time.monotonic() + seconds
        while any(map(is_alive, processes)) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS / 4)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)


class _PassedOn:
    """Forwards signals to the command until it is closed; early ones are sent once it has started."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._handlers = ExitStack()
        self._handlers.enter_context(handled(_PASSED_ON, self._pass_on))

    def close(self) -> None:
        """Restores the handlers."""
        self._handlers.close()

    def begin(self, process: subprocess.Popen[bytes]) -> None:
        """Records that the command has started, and forwards earlier signals."""
        self._process = process
        for number in self._early:
            process.send_signal(number)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        # Ctrl-C reaches every foreground program of the terminal: forwarding it would deliver it twice.
        if number in _FROM_A_TERMINAL and _has_the_terminal():
            return
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)


def _has_the_terminal() -> bool:
    """Whether this process is in the foreground of its terminal, even if its input is redirected."""
    with suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False


app = typer.Typer()


@app.command("acquire", context_settings={"allow_interspersed_args": False})
def acquire(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The program and its arguments.")],
    *,
    memory: Annotated[
        str,
        typer.Option("--memory", "-m", help="Memory over all devices, such as 8GiB, 8GB or 8192MiB.", metavar="SIZE"),
    ],
    devices: Annotated[
        str, typer.Option("--devices", help="Only on these devices, by number, such as 0,1.", metavar="LIST")
    ] = "",
    max_devices: Annotated[
        int, typer.Option("--max-devices", help="Maximum number of devices to split over; 0: no limit.", metavar="N")
    ] = 0,
    priority: Annotated[
        str,
        typer.Option(
            "--priority", help="low, normal or high: idle models of a higher priority are not evicted.", metavar="CLASS"
        ),
    ] = "normal",
    wait: Annotated[
        str,
        typer.Option(
            "--wait", help="Longest wait for the memory, such as 30s, 10m or 2h; 0: do not wait.", metavar="TIME"
        ),
    ] = "5m",
    purpose: Annotated[
        str, typer.Option("--purpose", help="Purpose, shown to waiting callers. Default: the program.", metavar="TEXT")
    ] = "",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Wait for accelerator memory of this host, and run a command with it. Exits with the command's status.

    The command sees only its devices (CUDA_VISIBLE_DEVICES). If the lease is lost, the command is ended: SIGTERM, then
    SIGKILL.

    Example: weft mesh lease acquire --memory 20GiB --purpose "nightly training" --wait 2h -- python train.py
    """
    with naming_fields(parameter_of):
        require_command(command)
        waiting = _Waiting()
        options = LeaseOptions(
            purpose=purpose or Path(command[0]).name,
            devices=_device_numbers(devices),
            max_devices=max_devices,
            priority=priority,
            wait_seconds=parse_duration(wait, "--wait"),
            on_waiting=waiting.show,
            name=program_name(command[0]),
        )
        amount = parse_size(memory, "--memory")
        with (
            ended_by_signals(),
            closing(waiting),
            acquired_lease(amount, ProcessTree(), mesh_address(home, "registry"), options) as lease,
        ):
            waiting.close()
            note(_held(lease))
            status = run_under(lease, command, os.environ)
    raise typer.Exit(status)


@app.command("list")
def list_leases(home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show the devices of every host, and the leases on their memory.

    FOREIGN is memory used by programs without a lease; FREE is what a new lease could get. USE is the share of time in
    which the device computed lately. "?" means unknown.

    Example: weft mesh lease list
    """
    hosts = hosts_of(home)
    if output is not OutputFormat.TABLE:
        print_document({"kind": "HostMemoryList", "items": hosts}, output)
    elif hosts:
        print_hosts(hosts)
    else:
        say("no host with accelerators is known\n")


@app.command("release")
def release_lease(
    lease_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the lease, from `weft mesh lease list`.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Release the memory lease of a program, such as a forgotten `weft mesh lease acquire`.

    The program is told that its lease is lost: `weft mesh lease acquire` ends its command, SIGTERM first. The memory is
    reserved until it is observed to be free. A model's lease cannot be released so: use weft unload.

    Example: weft mesh lease release lease-3f9a --yes
    """
    require_token(lease_id, "ID", MAX_NAME_CHARS)
    lease = next((lease for lease in lease_rows(hosts_of(home)) if lease["leaseId"] == lease_id), None)
    if not yes and lease is not None and lease["holderKind"] == "program":
        _confirm(lease)
    with connect(home) as api:
        released = api.delete(f"/v1/admin/leases/{lease_id}")
    place = f"{size_words(leased_bytes(released))} of {safe_text((lease or {}).get('host', 'its host'))}"
    say(f"lease/{lease_id} is released: {place} are free once its processes have ended\n")


def _confirm(lease: Document) -> None:
    """Asks whether to release a lease. Raises INVALID_ARGUMENT without a terminal."""
    if not sys.stdin.isatty():
        raise invalid_field("--yes", "is required without a terminal: the program that holds the lease may be ended")
    held = f"{size_words(leased_bytes(lease))} of {safe_text(lease['host'])}"
    holder, purpose = safe_text(lease["holder"]), safe_text(lease["purpose"])
    note(
        f"{holder} holds {held} for {purpose}; a command of weft mesh lease acquire is ended when its lease is released"
    )
    typer.confirm("weft: release it?", abort=True, err=True)


class _Waiting:
    """Shows what the lease waits for: one changing line on a terminal, a line per change elsewhere."""

    def __init__(self) -> None:
        self._is_open = False

    def show(self, words: str) -> None:
        """Shows the current state of the wait."""
        if is_err_terminal():
            rewrite(f"weft: waiting: {words}")
            self._is_open = True
        else:
            note(f"waiting: {safe_text(words)}")

    def close(self) -> None:
        """Ends an open line on the terminal."""
        if self._is_open:
            tell("\n")
            self._is_open = False


def _held(lease: MemoryLease) -> str:
    shares = ", ".join(f"{size_words(amount)} on device {index}" for index, amount in sorted(lease.shares.items()))
    return f"holds {shares} of {safe_text(lease.host)} (lease {lease.id}, number {lease.fencing_number})"


def _device_numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise invalid_field("--devices", "must be numbers of devices such as 0,1; see `weft mesh lease list`")
    return [int(part) for part in parts]
