"""A Python process that has imported what many programs need, and forks one of them per order.

A forked program is a child of the process that asked for it (CLONE_PARENT), with a pid, signals and an exit code of
its own; `kit.warm_python` is the other side. Nothing that is imported here may start a thread: only the thread that
forks lives on in a child.
"""

import array
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
from pathlib import Path
from types import CodeType
from typing import Any, Never

CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
MAX_ORDER_BYTES = 1 << 20
MAX_DESCRIPTORS = 4096
NAME = "warm-python"
"""Of the server's process; a program has that of the interpreter."""
_PR_SET_NAME = 15
_STANDARD = 3


class Fork:
    """`os.fork`, except that the child has this process's own parent."""

    def __init__(self) -> None:
        self._number = SYS_CLONE[platform.machine()]
        self._libc = ctypes.PyDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long
        self._libc.pthread_self.restype = ctypes.c_void_p
        self._thread_id = self._find_thread_id()

    def __call__(self) -> int:
        """The child's pid, and 0 in the child."""
        python = ctypes.pythonapi
        python.PyOS_BeforeFork()
        pid = int(self._libc.syscall(self._number, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
        if pid == 0:
            # glibc keeps the id of the thread, and learns of a fork only from its own `fork`.
            self._thread_id.value = os.getpid()
            python.PyOS_AfterFork_Child()
        else:
            python.PyOS_AfterFork_Parent()
        if pid < 0:
            raise OSError(ctypes.get_errno(), "clone")
        return pid

    def _find_thread_id(self) -> ctypes.c_int:
        """Where glibc keeps the id of this thread: the first field of the thread's record that holds it."""
        record = int(self._libc.pthread_self())
        for offset in range(0, 1024, 4):
            field = ctypes.c_int.from_address(record + offset)
            if field.value == os.getpid():
                return field
        raise OSError("this C library keeps the thread id elsewhere")


def next_order(fork: Fork, orders: socket.socket) -> dict[str, Any] | None:
    """In the parent it returns None once nobody orders any more; in each child, what it is to run."""
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
    """What `ps` and psutil call this process."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def become(order: dict[str, Any], descriptors: list[int]) -> None:
    """Take over what `exec` would have given a new program."""
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
    os.closerange(_STANDARD, MAX_DESCRIPTORS)
    set_name(Path(order["argv"][0]).name)
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
    """As at the start of Python: text by lines on a terminal, and for stderr always; bytes at once if unbuffered."""
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
    """Import what the programs import; the file and the code of each program."""
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


def main() -> None:
    """`python -m kit.warm_server SOCKET PROGRAMS IMPORTED`: modules between commas."""
    environment = dict(os.environ)
    orders = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[3].split(","):
        importlib.import_module(module)
    programs = load(sys.argv[2].split(","))
    # Importing a module may set variables for its own process: a forked program sets them for itself.
    os.environ.clear()
    os.environ.update(environment)
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"an import has started threads: {threads}"
    set_name(NAME)
    # Ctrl-C ends the tests, and the server with them; one that is meant for a program waits until the program runs.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    gc.collect()
    gc.freeze()
    orders.sendall(b"ready")
    order = next_order(Fork(), orders)
    if order is None:
        return
    file, code = programs[order["module"]]
    sys.argv[0] = file
    program = type(sys)("__main__")
    program.__dict__.update(__file__=file, __package__=order["module"].rpartition(".")[0], __builtins__=__builtins__)
    sys.modules["__main__"] = program
    run(code, program.__dict__)


def run(code: CodeType, names: dict[str, Any]) -> Never:
    """Run a program and end as Python does, except that what was imported is not taken apart: that takes longer."""
    exit_code = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        exec(code, names)
    except SystemExit as leaving:
        exit_code = _exit_code(leaving)
    except BaseException as error:  # noqa: BLE001 - it ends with the process
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
