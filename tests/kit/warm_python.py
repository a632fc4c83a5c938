"""Starts weft's Python programs as forks of a process that has already imported everything.

`subprocess.Popen([*warm("weft_app.cli.main"), "ps"])` starts a normal child of this process, with its own arguments,
environment, folder, standard streams, session, signals and exit code, but without the second of imports. Within another
command (`["nsenter", *command]`) it is an ordinary Python.

Only `/proc/PID/environ` and `sys.flags` are those of the server. Tests of how a process starts use `sys.executable`. An
ordinary Python is also used for variables that the loader or interpreter reads, such as LD_LIBRARY_PATH, and for
anything else that a fork cannot support.
"""

import atexit
import inspect
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from kit.warm_server import PADDING, SYS_CLONE, send_order, start_variables

PROGRAMS = (
    "weft_app.cli.main",
    "kit.torture_router",
    "weft_testing.fake_backend",
    "kit.clock_off",
    "kit.patient_weft",
    "kit.quick_pings",
    "kit.quick_weft",
    "kit.in_mounts",
    "kit.with_site",
)
IMPORTED = (
    "weft_app.compose.up",
    "weft_app.compose.runner",
    "weft_app.compose.router",
    "weft_app.compose.registry",
    "weft_app.compose.gateway",
    "weft_app.compose.join",
)
"""Modules that the programs import lazily, depending on their arguments."""
START_SECONDS = 60.0
_OF_THE_SERVER = {"GRPC_ENABLE_FORK_SUPPORT": "0"}
"""Otherwise gRPC would restart its threads in every fork."""
_ARGUMENTS = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_LEAST = 3
IS_POSSIBLE = sys.platform == "linux" and platform.machine() in SYS_CLONE


class WarmPython(str):
    """The path of the interpreter; a command that starts with it is forked from the warm server."""

    __slots__ = ()


def warm(module: str) -> tuple[str, str, str]:
    """Returns the start of a program's command line."""
    assert module in PROGRAMS, f"{module} is not among the programs of the warm server"
    return (WarmPython(sys.executable), "-m", module)


class WarmServer:
    """The warm server of this process."""

    def __init__(self) -> None:
        self.start_variables = start_variables(os.environ)
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            folder = Path(__file__).parents[1]
            self._process = _Popen(
                [
                    *(sys.executable, "-m", "kit.warm_server"),
                    *(str(theirs.fileno()), ",".join(PROGRAMS), ",".join(IMPORTED), PADDING),
                ],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **_OF_THE_SERVER, "PYTHONPATH": os.pathsep.join((str(folder), str(folder.parent)))},
                stdin=subprocess.DEVNULL,
            )
        self._orders.settimeout(START_SECONDS)
        assert self._orders.recv(5) == b"ready", "the warm server did not start"

    def start(self, order: dict[str, Any], descriptors: list[int]) -> int:
        """Forks a program; returns its pid."""
        return send_order(self._orders, order, descriptors)

    def stop(self) -> None:
        """Stops the server; programs that it has forked continue."""
        self._orders.close()
        self._process.wait()


class WarmStart:
    """Holds the server of this process."""

    def __init__(self) -> None:
        self._server: WarmServer | None = None

    def server(self) -> WarmServer:
        """Returns the server, started on first use."""
        if self._server is None:
            self._server = WarmServer()
            atexit.register(self._server.stop)
        return self._server


_Popen = subprocess.Popen
_warm_start = WarmStart()


class WarmPopen(_Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` that forks from the warm server if the command starts with a `WarmPython`."""

    def _execute_child(self, *given: Any) -> None:
        asked = _ARGUMENTS.bind(self, *given).arguments
        args = asked["args"]
        environment = asked["env"] or os.environ
        if (
            isinstance(args, (str, bytes, os.PathLike))
            or not isinstance(args[0], WarmPython)
            or not _is_plain(asked)
            or start_variables(environment) != _warm_start.server().start_variables
        ):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        order = {
            "argv": [os.fsdecode(each) for each in args],
            "module": args[2],
            "file": "",
            "cwd": os.fsdecode(asked["cwd"] or Path.cwd()),
            "env": {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
            "new_session": asked["start_new_session"],
            "process_group": None if asked["process_group"] == -1 else asked["process_group"],
            "dies_with": None,
        }
        wanted = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        descriptors = [index if fd == -1 else fd for index, fd in enumerate(wanted)]
        try:
            self.pid = _warm_start.server().start(order, descriptors)
            self._child_created = True
        finally:
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]


def _is_plain(asked: dict[str, Any]) -> bool:
    """Whether the server has this program and a fork supports its options."""
    args = asked["args"]
    if len(args) < _LEAST or args[1] != "-m" or args[2] not in PROGRAMS:
        return False
    plain = (asked["preexec_fn"] is None, not asked["pass_fds"], not asked["shell"], asked["umask"] == -1)
    return IS_POSSIBLE and all(plain) and all(asked[name] is None for name in ("uid", "gid", "gids", "executable"))


subprocess.Popen = WarmPopen  # type: ignore[misc]
