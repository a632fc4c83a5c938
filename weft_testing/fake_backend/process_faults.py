"""Misbehaviour of the process as a whole: signals, descendants, pipes, sudden death."""

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys

from weft_testing.fake_backend.behaviour import Behaviour, Control

GRANDCHILD_SECONDS = 120
"""A grandchild that nobody ends goes away by itself, so that a failing test leaves nothing behind for long."""
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
    """End this process by this signal: SIGKILL as the kernel's out-of-memory killer would, others as a fault would."""
    _keep_no_core()
    os.kill(os.getpid(), number)


def run_out_of_memory() -> None:
    """End this process as llama.cpp does when a GPU's memory runs out while it works."""
    _say(_OUT_OF_MEMORY_AT_WORK)
    _keep_no_core()
    os.abort()


def fail_to_fit() -> None:
    """End this process as llama.cpp does when the model is larger than the GPU's memory."""
    _say(_OUT_OF_MEMORY_AT_START)
    os._exit(1)


def _keep_no_core() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)  # noqa: T201 - a server's log


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def flood_stderr(count: int) -> None:
    """Write `count` bytes to stderr; blocks while nobody reads, as any careless program does."""
    left = count
    while left > 0:
        left -= os.write(sys.stderr.fileno(), _FLOOD_LINE[: min(left, len(_FLOOD_LINE))])


def start_grandchild(*, setsid: bool) -> int:
    """Start a process that inherits stdout and stderr and outlives this one; returns its id."""
    grandchild = subprocess.Popen(  # noqa: S603 - fixed arguments
        [sys.executable, "-S", "-c", f"import time; time.sleep({GRANDCHILD_SECONDS})"],
        stdin=subprocess.DEVNULL,
        start_new_session=setsid,
    )
    # Popen would warn about a child it lost sight of; outliving us is the point here.
    grandchild.returncode = 0
    print(f"grandchild {grandchild.pid}", flush=True)  # noqa: T201
    return grandchild.pid


class ProcessFaults:
    """Keeps the process in step with its behaviour."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._sigterms_seen = 0
        self._flooded_bytes = 0
        self.grandchild_pid: int | None = None

    def apply(self, behaviour: Behaviour) -> None:
        """Do what has just been switched on."""
        if behaviour.fork_grandchild and self.grandchild_pid is None:
            self.grandchild_pid = start_grandchild(setsid=behaviour.grandchild_setsid)
        if behaviour.stderr_flood_bytes != self._flooded_bytes:
            self._flooded_bytes = behaviour.stderr_flood_bytes
            flood_stderr(behaviour.stderr_flood_bytes)

    def handle_signals(self, stop: asyncio.Event) -> None:
        """Set `stop` at SIGINT and at a SIGTERM that the behaviour lets through."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stop.set)
        loop.add_signal_handler(signal.SIGTERM, self._sigterm, stop)

    def _sigterm(self, stop: asyncio.Event) -> None:
        self._sigterms_seen += 1
        behaviour = self._control.behaviour
        if behaviour.ignore_sigterm or (behaviour.second_sigterm and self._sigterms_seen < 2):
            print("SIGTERM ignored", file=sys.stderr, flush=True)  # noqa: T201
        else:
            stop.set()
