"""A Python process that has imported the modules of many programs, and forks one per request.

A forked program is a child of the requesting process (CLONE_PARENT) with its own pid, signals and exit code;
`kit.warm_python` is the client. No imported module may start a thread, because a fork only keeps the calling one.

A program that starts runners (`weft up`) gets a separate server, forked before the program runs. It is a child of the
program, so that the programs it forks are too.
"""

import array
import asyncio
import atexit
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import os
import platform
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import IO, Any, Never

from runner_svc.supervise import parent_death

CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
MAX_ORDER_BYTES = 1 << 20
MAX_DESCRIPTORS = 4096
NAME = "warm-python"
"""Name of the server's process; programs have the interpreter's."""
WEFT = "weft_app.cli.main"
STARTS_RUNNERS = "up"
"""The command with runners as child processes."""
PADDING = "." * 4096
"""Last argument of the server, which reserves space for the command line of a program."""
_PR_SET_NAME = 15
_PR_SET_PDEATHSIG = 1
_STANDARD = 3
_READ_AT_START = ("LD_", "PYTHON", "MALLOC_", "GLIBC_")
"""Prefixes of environment variables that only affect the start of a process."""
_HEEDED_BY_A_FORK = "PYTHONUNBUFFERED"


class Fork:
    """`os.fork`, but the child's parent is this process's parent."""

    def __init__(self) -> None:
        self._number = SYS_CLONE[platform.machine()]
        self._libc = ctypes.PyDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long
        self._libc.pthread_self.restype = ctypes.c_void_p
        self._thread_id = self._find_thread_id()

    def __call__(self) -> int:
        """Returns the child's pid, and 0 in the child."""
        python = ctypes.pythonapi
        python.PyOS_BeforeFork()
        pid = int(self._libc.syscall(self._number, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
        if pid == 0:
            # glibc caches the thread id, and only its own `fork` updates it.
            self._thread_id.value = os.getpid()
            python.PyOS_AfterFork_Child()
        else:
            python.PyOS_AfterFork_Parent()
        if pid < 0:
            raise OSError(ctypes.get_errno(), "clone")
        return pid

    def _find_thread_id(self) -> ctypes.c_int:
        """Returns the location of glibc's thread id: the first field of the thread's record with this value."""
        record = int(self._libc.pthread_self())
        for offset in range(0, 1024, 4):
            field = ctypes.c_int.from_address(record + offset)
            if field.value == os.getpid():
                return field
        raise OSError("this C library keeps the thread id elsewhere")


def start_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that have no effect in a fork."""
    named = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    return {
        name: value for name, value in named.items() if name.startswith(_READ_AT_START) and name != _HEEDED_BY_A_FORK
    }


def send_order(orders: socket.socket, order: dict[str, Any], descriptors: list[int]) -> int:
    """Requests a fork from the server; returns the program's pid."""
    message = json.dumps(order).encode()
    assert len(message) <= MAX_ORDER_BYTES
    orders.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
    pid = orders.recv(4)
    if not pid:
        raise ConnectionResetError("the warm server has ended")
    return int.from_bytes(pid, "little")


def next_order(fork: Fork, orders: socket.socket) -> dict[str, Any] | None:
    """Serves requests. Returns None in the parent after the client disconnected; in each child, the program to run."""
    while True:
        message, descriptors = _receive(orders)
        if not message:
            return None
        order: dict[str, Any] = json.loads(message)
        pid = fork()
        if pid == 0:
            become(order, descriptors)
            return order
        for descriptor in descriptors:
            os.close(descriptor)
        orders.sendall(pid.to_bytes(4, "little"))


def _receive(orders: socket.socket) -> tuple[bytes, list[int]]:
    space = socket.CMSG_SPACE(_STANDARD * array.array("i").itemsize)
    message, ancillary, _, _ = orders.recvmsg(MAX_ORDER_BYTES, space)
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    return message, list(descriptors)


def set_name(name: str) -> None:
    """Sets the name of this process in `ps` and psutil."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def set_command_line(argv: Sequence[str]) -> None:
    """Sets `/proc/PID/cmdline` of this process, cut to the length of the server's.

    Arguments are separated by spaces: if the last byte of the space is not zero, the kernel returns one text.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    words = os.fsencode(" ".join(argv))[: end - start - 2]
    ctypes.memset(start, 0, end - start - 1)
    ctypes.memset(end - 1, ord("."), 1)
    ctypes.memmove(start, words, len(words))


def die_with(parent: int) -> None:
    """Ends this process with its parent; immediately if the parent has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become(order: dict[str, Any], descriptors: list[int]) -> None:
    """Applies the state that `exec` would have given a new program."""
    if order["dies_with"] is not None:
        die_with(order["dies_with"])
    for index, descriptor in enumerate(descriptors):
        os.dup2(descriptor, index)
    os.closerange(_STANDARD, MAX_DESCRIPTORS)
    set_name(Path(order["argv"][0]).name)
    set_command_line(order["argv"])
    if order["new_session"]:
        os.setsid()
    elif order["process_group"] is not None:
        os.setpgid(0, order["process_group"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.orig_argv = order["argv"]
    sys.argv = [order["file"], *order["argv"][_STANDARD:]]
    sys.path[0] = order["cwd"]
    _open_standard_streams()


def _open_standard_streams() -> None:
    """Opens the streams like Python: line-buffered on a terminal and for stderr; unbuffered if configured."""
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    for place, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw = io.FileIO(place, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw if at_once else io.BufferedWriter(raw),
            encoding="utf-8",
            errors=errors,
            line_buffering=name == "stderr" or os.isatty(place),
            write_through=at_once,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.__stdin__ = sys.stdin  # type: ignore[misc]


def load(modules: list[str]) -> dict[str, tuple[str, CodeType]]:
    """Imports the modules of the programs; returns file and code of each program."""
    programs = {}
    for module in modules:
        importlib.import_module(module)
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
            importlib.import_module(f"{module}.__main__")
        assert spec is not None
        assert spec.origin is not None
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        programs[module] = (spec.origin, code)
    return programs


def build_validators() -> None:
    """Builds the validators of weft.yaml, which every program would otherwise build again."""
    config = importlib.import_module("weft_app.config.loader")
    config.parse_config({"runners": [{"name": "a", "models": [{"name": "m", "path": "/m"}]}]})


def serve_runners(fork: Fork, order: dict[str, Any]) -> dict[str, Any] | None:
    """Starts a separate server for a program. Returns the program's order; in each fork of the server, the fork's."""
    program = os.getpid()
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        asyncio.create_subprocess_exec = RunnerStart(orders)  # type: ignore[assignment]
        return order
    orders.close()
    die_with(program)
    set_name(NAME)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for index in range(_STANDARD):
        os.dup2(nothing, index)
    os.close(nothing)
    return next_order(fork, theirs)


class RunnerStart:
    """`asyncio.create_subprocess_exec` that forks runners and executes everything else."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._execute = asyncio.create_subprocess_exec
        self._variables = start_variables(os.environ)
        self._first = (sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), sys.executable, "-m", WEFT)

    async def __call__(self, *command: str, **given: Any) -> "asyncio.subprocess.Process | ForkedProcess":
        """See asyncio."""
        runner = command[: len(self._first)] == self._first
        if runner and given.keys() - {"env"} == {"stdin", "stdout", "stderr", "start_new_session"}:
            with suppress(ConnectionError):
                environment = dict(given.get("env", os.environ))
                return self._fork(command[len(self._first) - 3 :], given["stdout"], environment)
        return await self._execute(*command, **given)

    def _fork(self, argv: Sequence[str], output: IO[bytes], environment: dict[str, str]) -> "ForkedProcess":
        if start_variables(environment) != self._variables:
            raise ConnectionRefusedError("a fork would not heed its environment")
        order = {
            "argv": argv,
            "module": WEFT,
            "file": "",
            "cwd": os.fsdecode(Path.cwd()),
            "env": environment,
            "new_session": True,
            "process_group": None,
            "dies_with": os.getpid(),
        }
        with Path(os.devnull).open("rb") as nothing:
            return ForkedProcess(send_order(self._orders, order, [nothing.fileno(), output.fileno(), output.fileno()]))


class ForkedProcess:
    """A child of this process with the interface of `asyncio.subprocess.Process`, without pipes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._handle = os.pidfd_open(pid)
        self._loop.add_reader(self._handle, self._reap)

    async def wait(self) -> int:
        """Returns the exit code once the process has ended."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal. Raises ProcessLookupError if the process has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _reap(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


def main() -> None:
    """`python -m kit.warm_server SOCKET PROGRAMS IMPORTED PADDING`: modules between commas."""
    environment = dict(os.environ)
    orders = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[3].split(","):
        importlib.import_module(module)
    programs = load(sys.argv[2].split(","))
    build_validators()
    # Imports may set variables for this process: forked programs set their own.
    os.environ.clear()
    os.environ.update(environment)
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"an import has started threads: {threads}"
    set_name(NAME)
    # Ctrl-C ends the tests and then the server; a signal for a program is held until the program runs.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    gc.collect()
    gc.freeze()
    orders.sendall(b"ready")
    fork = Fork()
    order = next_order(fork, orders)
    if order is not None and order["module"] == WEFT and STARTS_RUNNERS in order["argv"]:
        order = serve_runners(fork, order)
    if order is None:
        return
    file, code = programs[order["module"]]
    sys.argv[0] = file
    program = type(sys)("__main__")
    program.__dict__.update(__file__=file, __package__=order["module"].rpartition(".")[0], __builtins__=__builtins__)
    sys.modules["__main__"] = program
    run(code, program.__dict__)


def run(code: CodeType, names: dict[str, Any]) -> Never:
    """Runs a program and ends like Python, but without the slow destruction of modules."""
    exit_code = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        exec(code, names)
    except SystemExit as leaving:
        exit_code = _exit_code(leaving)
    except BaseException as error:  # noqa: BLE001 - the process ends
        traceback.print_exc()
        exit_code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            exit_code = exit_code or 120
    os._exit(exit_code)


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    sys.stderr.write(f"{leaving.code}\n")
    return 1


if __name__ == "__main__":
    main()
