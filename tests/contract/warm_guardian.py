"""Fake backends, also those behind a guardian, forked from a process that has imported them already.

A guardian that this module starts is a child of the tests like any other, and its engine a child of the guardian; they
only lack the second of imports. What differs is that of `kit.warm_python`: `/proc/PID/environ` is the server's. A test
about how engines start, or about the processes that a dead runner leaves, needs ordinary ones: `cold_engines`.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any, Never

import pytest
from kit import warm_python
from kit.warm_python import IS_POSSIBLE
from kit.warm_server import (
    MAX_DESCRIPTORS,
    MAX_ORDER_BYTES,
    NAME,
    PADDING,
    Fork,
    become,
    load,
    run,
    send_order,
    set_command_line,
    set_name,
    start_variables,
)

from runner_svc.supervise import guarded_engine
from runner_svc.supervise.guardian import Guardian
from runner_svc.supervise.leftovers import TAG_VARIABLE

ENGINE = "weft_testing.fake_backend"
FIRST = [sys.executable, "-m", ENGINE]
START_SECONDS = 60.0
_STANDARD = 3
_LIFELINE = 3
spawn_cold = guarded_engine._spawn_guardian


class _Popen(subprocess.Popen[bytes]):
    """A guardian that the warm server forks."""

    def __init__(self, orders: socket.socket, order: dict[str, Any], descriptors: list[int]) -> None:
        self._orders, self._order, self._descriptors = orders, order, descriptors
        super().__init__(order["argv"])

    def _execute_child(self, *_: Any) -> None:
        self.pid = send_order(self._orders, self._order, self._descriptors)
        self._child_created = True


class WarmGuardians:
    """Starts guardians from a server that is started on first use."""

    def __init__(self) -> None:
        self._orders: socket.socket | None = None
        self.start_variables = start_variables(os.environ)

    def start(self, order: dict[str, Any], descriptors: list[int]) -> int:
        """As `kit.warm_python.WarmServer.start`, for the fake backend."""
        assert order["module"] == ENGINE, order
        return send_order(self._orders_of_server(), order, descriptors)

    def server(self) -> "WarmGuardians":
        """Returns itself, with its server started."""
        self._orders_of_server()
        return self

    def spawn(self, system: Any, start: guarded_engine.EngineStart, lifeline: int) -> "subprocess.Popen[bytes]":
        """As `guarded_engine._spawn_guardian`."""
        if list(start.argv[:3]) != FIRST or any(name.startswith("LD_") for name in start.env):
            return spawn_cold(system, start, lifeline)
        leaf = "" if start.leaf is None else str(start.leaf.path)
        order = {
            "argv": [
                *(sys.executable, "guardian", str(_LIFELINE), str(os.getpid()), leaf, system.guardian_mode),
                *(str(start.limits.memory_bytes or 0), str(start.limits.oom_score)),
            ],
            "cwd": str(start.folder or Path.cwd()),
            "env": {**start.env, TAG_VARIABLE: start.tag},
        }
        orders = self._orders_of_server()
        with Path(os.devnull).open("rb") as nothing:
            return _Popen(orders, order, [nothing.fileno(), start.output, start.output, lifeline])

    def _orders_of_server(self) -> socket.socket:
        if self._orders is None:
            self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            paths = (str(Path(__file__).parent), *(path for path in sys.path if path))
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno()), PADDING],
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0", "PYTHONPATH": os.pathsep.join(paths)},
                    stdin=subprocess.DEVNULL,
                )
            self._orders.settimeout(START_SECONDS)
            assert self._orders.recv(5) == b"ready", "the warm server did not start"
            atexit.register(process.wait)
            atexit.register(self._orders.close)
        return self._orders


_guardians = WarmGuardians()


@contextlib.contextmanager
def warm_guardians() -> Iterator[None]:
    """Forks fake engines and their guardians, where that is possible, during the block."""
    with pytest.MonkeyPatch.context() as patch:
        if IS_POSSIBLE:
            _guardians.server()
            patch.setattr(guarded_engine, "_spawn_guardian", _guardians.spawn)
            patch.setattr(warm_python, "_warm_start", _guardians)
        yield


class _WarmGuardian(Guardian):
    """A guardian whose engine runs in the fork instead of being executed there."""

    def __init__(self, arguments: list[str], engine: tuple[str, CodeType]) -> None:
        lifeline, runner, leaf, mode, memory_bytes, oom_score = arguments
        super().__init__(int(lifeline), int(runner), leaf, mode, int(memory_bytes), int(oom_score))
        self._engine_program = engine

    def _become(self, command: list[bytes], guardian: int, says: int) -> None:
        def run_here(_: bytes, argv: list[bytes]) -> None:
            # As Python does at its start: a write to a caller that has gone away is an error, and not the end.
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.closerange(_STANDARD, MAX_DESCRIPTORS)
            sys.argv = ["", *(os.fsdecode(each) for each in argv[3:])]
            set_command_line([os.fsdecode(each) for each in argv])
            _run_engine(*self._engine_program)

        os.execvp = run_here  # type: ignore[assignment]
        super()._become(command, guardian, says)


def _run_engine(file: str, code: CodeType) -> Never:
    sys.argv[0] = file
    program = type(sys)("__main__")
    program.__dict__.update(__file__=file, __package__=ENGINE, __builtins__=__builtins__)
    sys.modules["__main__"] = program
    run(code, program.__dict__)


def main() -> None:
    """`python -m warm_guardian SOCKET PADDING`."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    engine = load([ENGINE])[ENGINE]
    set_name(NAME)
    fork = Fork()
    orders.sendall(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, _LIFELINE + 1)
        if not message:
            return
        pid = fork()
        if pid == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
        orders.sendall(pid.to_bytes(4, "little"))
    order = json.loads(message)
    if len(descriptors) == _STANDARD:
        become(order, descriptors)
        _run_engine(*engine)
    for index, descriptor in enumerate(descriptors):
        os.dup2(descriptor, index)
    os.closerange(_LIFELINE + 1, MAX_DESCRIPTORS)
    set_name(Path(sys.executable).name)
    set_command_line(order["argv"])
    os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    _WarmGuardian(order["argv"][2:], engine).run()
    os._exit(0)


if __name__ == "__main__":
    main()
