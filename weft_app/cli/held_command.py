"""A command that runs as long as its lease is good."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, TracebackType
from typing import Self

from weft.client.leases import MemoryLease
from weft.gpu.process import is_alive
from weft.gpu.sighting import ProcessId
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.cli.options import note

LOOK_SECONDS = 0.2
"""How often it is seen whether the lease is lost."""
TERM_SECONDS = 10.0
"""How long a command may take to end once its lease is lost, before it is killed."""
KILL_SECONDS = 5.0
"""After that the kernel only needs time to clean up."""
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
"""Becomes the command once the ledger knows its process id. Without it a command whose `weft` is killed in its first
moment would take memory that the ledger believes to be nobody's."""
_FROM_A_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT})
_PASSED_ON = (*_FROM_A_TERMINAL, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SIGNAL_STATUS = 128
"""Exit status of a command that a signal ended, as shells tell it: this and the signal's number."""


def require_command(command: Sequence[str]) -> None:
    """Raises INVALID_ARGUMENT when there is no such program: to be asked before anybody waits for memory."""
    if not command:
        raise invalid_field("COMMAND", "is needed: weft lease acquire --memory 8GiB -- python train.py")
    if shutil.which(command[0]) is None:
        raise invalid_field("COMMAND", f"there is no program {command[0]!r}")


def run_under(lease: MemoryLease, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end, signals passed on; its exit status. Raises LEASE_LOST after ending it for that."""
    with _PassedOn() as signals, _Gate() as gate:
        process = gate.start(command, {**environment, **lease.environment(), LEASE_VARIABLE: lease.id})
        try:
            signals.begin(process)
            lease.held_by(process.pid)
            gate.open()
            _wait(process, lease)
        finally:
            if process.poll() is None:
                gate.close()
                _end(lease.processes())
                with suppress(subprocess.TimeoutExpired):
                    process.wait(KILL_SECONDS)
    left = lease.processes()
    if left:
        note(f"{len(left)} processes that {command[0]} started still run; what they hold stays booked until they end")
    status = process.returncode
    return status if status >= 0 else _SIGNAL_STATUS - status


class _Gate:
    """Holds a command back until it is known; it never begins when we die before that."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start what becomes the command."""
        arguments = [sys.executable, "-I", "-S", "-c", _GATE, str(self._read_end), *command]
        process = subprocess.Popen(arguments, env=environment, pass_fds=(self._read_end,))  # noqa: S603 - asked for
        os.close(self._read_end)
        self._read_end = -1
        return process

    def open(self) -> None:
        """Let it begin."""
        with suppress(BrokenPipeError):
            os.write(self._write_end, b"1")
        self.close()

    def close(self) -> None:
        """Send it away unless it has begun. Idempotent."""
        for end in (self._read_end, self._write_end):
            if end >= 0:
                os.close(end)
        self._read_end = self._write_end = -1


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP unwind the block, as Ctrl-C does, so that nothing stays in line or booked."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(_SIGNAL_STATUS + number)

    with _handled((signal.SIGTERM, signal.SIGHUP), end):
        yield


def _wait(process: subprocess.Popen[bytes], lease: MemoryLease) -> None:
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
            return
        if lease.is_lost:
            note(f"the lease {lease.id} is lost: its memory counts as somebody else's; ending the command")
            _end(lease.processes())
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)
            raise WeftError(Reason.LEASE_LOST, "the command was ended because its lease was lost")


def _end(processes: Sequence[ProcessId]) -> None:
    """End processes: SIGTERM, then SIGKILL for those that are left."""
    _send(processes, signal.SIGTERM)
    if not _gone(processes, TERM_SECONDS):
        _send(processes, signal.SIGKILL)
        _gone(processes, KILL_SECONDS)


def _send(processes: Sequence[ProcessId], number: signal.Signals) -> None:
    for process in processes:
        if is_alive(process):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)


def _gone(processes: Sequence[ProcessId], seconds: float) -> bool:
    """Whether they have ended, after at most so long."""
    deadline = time.monotonic() + seconds
    while any(map(is_alive, processes)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_SECONDS / 4)
    return True


class _PassedOn:
    """Signals go to the command while the block runs; those that come before it has started, then."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._handlers = ExitStack()

    def __enter__(self) -> Self:
        self._handlers.enter_context(_handled(_PASSED_ON, self._pass_on))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handlers.close()

    def begin(self, process: subprocess.Popen[bytes]) -> None:
        """The command has started."""
        self._process = process
        for number in self._early:
            process.send_signal(number)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        # Ctrl-C reaches every program of the terminal's foreground: a second one would hurry a tidy end.
        if number in _FROM_A_TERMINAL and _has_the_terminal():
            return
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)


def _has_the_terminal() -> bool:
    """Whether we are in the foreground of our terminal, wherever input comes from."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


@contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: "signal._HANDLER") -> Iterator[None]:
    # What is ignored stays so: `nohup weft lease acquire ...` survives the end of its terminal.
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in caught}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
