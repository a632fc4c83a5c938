"""Faults of the whole process: ignored signals, descendants, blocked pipes, crashes."""

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys

from weft_testing.fake_backend.behaviour import Behaviour, Control

GRANDCHILD_SECONDS = 120
"""Lifetime of a grandchild, so that a failing test does not leave a process for long."""
_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY_AT_START = """\
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 40960.00 MiB on device 0: cudaMalloc failed: out of memory
alloc_tensor_range: failed to allocate CUDA0 buffer of size 42949672960
llama_model_load: error loading model: unable to allocate CUDA0 buffer
llama_model_load_from_file_impl: failed to load model
main: exiting due to model loading error"""
_OUT_OF_MEMORY_AT_WORK = """\
CUDA error: out of memory
  current device: 0, in function alloc at ggml-cuda.cu:429
  cuMemCreate(&handle, reserve_size, &prop, 0)
ggml-cuda.cu:99: CUDA error"""
_FLOOD_LINE = b"flood " * 21 + b"\n"


def crash(number: signal.Signals) -> None:
    """Ends this process by a signal: SIGKILL like the kernel's out-of-memory killer, others like a fault."""
    _keep_no_core()
    os.kill(os.getpid(), number)


def run_out_of_memory() -> None:
    """Ends this process like llama.cpp when GPU memory runs out during a request."""
    _say(_OUT_OF_MEMORY_AT_WORK)
    _keep_no_core()
    os.abort()


def fail_to_fit() -> None:
    """Ends this process like llama.cpp when the model does not fit into GPU memory."""
    _say(_OUT_OF_MEMORY_AT_START)
    os._exit(1)


def _keep_no_core() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)  # noqa: T201 - a server's log


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def flood_stderr(count: int) -> None:
    """Writes `count` bytes to stderr; blocks while the pipe is full."""
    left = count
    while left > 0:
        left -= os.write(sys.stderr.fileno(), _FLOOD_LINE[: min(left, len(_FLOOD_LINE))])


def start_grandchild(*, setsid: bool) -> int:
    """Starts a process that inherits stdout and stderr and outlives this one; returns its id."""
    grandchild = subprocess.Popen(  # noqa: S603 - fixed arguments
        [sys.executable, "-S", "-c", f"import time; time.sleep({GRANDCHILD_SECONDS})"],
        stdin=subprocess.DEVNULL,
        start_new_session=setsid,
    )
    # Popen would warn about an unreaped child, which is intended here.
    grandchild.returncode = 0
    print(f"grandchild {grandchild.pid}", flush=True)  # noqa: T201
    return grandchild.pid


class ProcessFaults:
    """Applies the faults of a behaviour to the process."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._flooded_bytes = 0
        self.grandchild_pid: int | None = None

    def apply(self, behaviour: Behaviour) -> None:
        """Applies switches that were just set."""
        if behaviour.fork_grandchild and self.grandchild_pid is None:
            self.grandchild_pid = start_grandchild(setsid=behaviour.grandchild_setsid)
        if behaviour.stderr_flood_bytes != self._flooded_bytes:
            self._flooded_bytes = behaviour.stderr_flood_bytes
            flood_stderr(behaviour.stderr_flood_bytes)

    def handle_signals(self, stop: asyncio.Event) -> None:
        """Sets `stop` at SIGINT and at a SIGTERM that the behaviour does not ignore."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stop.set)
        loop.add_signal_handler(signal.SIGTERM, self._sigterm, stop)

    def _sigterm(self, stop: asyncio.Event) -> None:
        if self._control.behaviour.ignore_sigterm:
            print("SIGTERM ignored", file=sys.stderr, flush=True)  # noqa: T201
        else:
            stop.set()
