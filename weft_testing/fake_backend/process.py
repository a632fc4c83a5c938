"""Starts the fake as a process, and accesses its /fake routes and its fake device memory.

async with run_fake_backend("--parallel", "2", crash_after_tokens=5) as backend:
    ... backend.base_url ...
    await backend.set_behaviour(crash_after_tokens=None)
    state = await backend.wait_for_state(lambda state: state.requests_cancelled == 1)
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from weft_testing.fake_backend.behaviour import Behaviour
from weft_testing.fake_backend.state import FakeState
from weft_testing.fake_nvml import FOLDER_VARIABLE, FakeCards, OutOfCardMemoryError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def take_device_memory(amount: int, tensor_split: Sequence[float], environment: Mapping[str, str]) -> None:
    """Allocates `amount` bytes on the visible cards in these proportions (none: equal), or exits like llama.cpp.

    As with CUDA, an empty CUDA_VISIBLE_DEVICES hides every card, and nothing is allocated.
    """
    cards = FakeCards(Path(environment[FOLDER_VARIABLE]))
    visible = visible_cards(len(cards.total_bytes()), environment)
    parts = split(amount, list(tensor_split) or [1.0] * len(visible)) if visible else []
    if len(parts) > len(visible):
        _die(f"invalid tensor split: {len(parts)} proportions for {len(visible)} devices")
    wanted = [(cards.card_at(index), part) for index, part in zip(visible, parts, strict=False)]
    try:
        cards.take(os.getpid(), wanted)
    except OutOfCardMemoryError as error:
        _die(f"cudaMalloc failed: out of memory\nCUDA error: out of memory\n  {error}")


def visible_cards(count: int, environment: Mapping[str, str]) -> list[int]:
    """Returns the numbers of the visible cards on the PCI bus."""
    named = environment.get(_VISIBLE)
    if named is None:
        return list(range(count))
    return [int(number) for number in named.split(",") if number]


def split(amount: int, proportions: Sequence[float]) -> list[int]:
    """Splits `amount` in these proportions, exactly."""
    whole = sum(proportions)
    ends = [round(amount * sum(proportions[: at + 1]) / whole) for at in range(len(proportions))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _die(words: str) -> None:
    print(words, file=sys.stderr, flush=True)  # noqa: T201 - a server's log
    os._exit(1)


START_SECONDS = 30.0
STATE_POLL_SECONDS = 0.01
MAX_OUTPUT_LINES = 1000
_LISTENING = "listening on "
_GRANDCHILD = "grandchild "


class FakeControl:
    """A client of the /fake routes of a running fake."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        await self._session.close()

    async def set_behaviour(self, **switches: Any) -> Behaviour:
        """Changes some switches of Behaviour. Raises ValueError with the fake's error message."""
        body = msgspec.json.encode(switches)
        async with self._session.post(f"{self.base_url}/fake/behaviour", data=body) as answer:
            if answer.status != 200:
                raise ValueError(await answer.text())
            return msgspec.json.decode(await answer.read(), type=Behaviour)

    async def state(self) -> FakeState:
        """Returns the fake's counters and last request."""
        async with self._session.get(f"{self.base_url}/fake/state") as answer:
            return msgspec.json.decode(await answer.read(), type=FakeState)

    async def wait_for_state(self, condition: Callable[[FakeState], bool], seconds: float = 5.0) -> FakeState:
        """Polls until `condition` holds. Raises TimeoutError with the last state."""
        deadline = time.monotonic() + seconds
        while not condition(state := await self.state()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"still not so after {seconds} s: {state}")
            await asyncio.sleep(STATE_POLL_SECONDS)
        return state


class FakeBackendProcess(FakeControl):
    """A fake that this process started."""

    def __init__(self, base_url: str, process: asyncio.subprocess.Process, output: deque[str]) -> None:
        super().__init__(base_url)
        self._process = process
        self._output = output

    @property
    def pid(self) -> int:
        """Id of the process and of its process group."""
        return self._process.pid

    @property
    def output(self) -> list[str]:
        """The last lines of stdout and stderr together."""
        return list(self._output)

    async def wait_exit(self, seconds: float = 5.0) -> int:
        """Returns the exit code, negative for a signal. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process only."""
        self._process.send_signal(number)


@asynccontextmanager
async def run_fake_backend(*flags: str, **switches: Any) -> AsyncGenerator[FakeBackendProcess]:
    """Starts the fake on a free port of 127.0.0.1, and ends its process group with the block.

    `flags` are command line arguments, `switches` fields of Behaviour. Raises as `run_fake_backend_command`.
    """
    async with run_fake_backend_command(*fake_backend_command("--die-with-parent", *flags, **switches)) as backend:
        yield backend


@asynccontextmanager
async def run_fake_backend_command(*command: str) -> AsyncGenerator[FakeBackendProcess]:
    """Runs a fake's command line until the block ends.

    Raises ChildProcessError with the output if the process ends before it listens, TimeoutError if it does not listen
    within START_SECONDS.
    """
    output: deque[str] = deque(maxlen=MAX_OUTPUT_LINES)
    read_end, write_end = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            # A separate pipe: with asyncio's, `wait` would wait as long as a grandchild holds it.
            stdout=write_end,
            stderr=write_end,
            start_new_session=True,
        )
    finally:
        os.close(write_end)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    reader = asyncio.create_task(_read_output(read_end, output, listening))
    try:
        base_url = await _wait_until_listening(process, listening, output)
        async with FakeBackendProcess(base_url, process, output) as backend:
            yield backend
    finally:
        await _kill(process, output)
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader


def fake_backend_command(*flags: str, **switches: Any) -> list[str]:
    """Returns the command line of the fake with this interpreter; `--port 0` unless the flags set another."""
    command = [sys.executable, "-m", "weft_testing.fake_backend", "--port", "0", *flags]
    for name, value in switches.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            command.append(flag)
        elif value is not None and value is not False:
            command += [flag, value if isinstance(value, str) else msgspec.json.encode(value).decode()]
    return command


async def _wait_until_listening(
    process: asyncio.subprocess.Process, listening: asyncio.Future[str], output: deque[str]
) -> str:
    waits: set[asyncio.Future[Any]] = {asyncio.create_task(process.wait()), listening}
    done, pending = await asyncio.wait(waits, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    for wait in pending:
        wait.cancel()
    if not done:
        raise TimeoutError(f"does not listen after {START_SECONDS} s: {list(output)}")
    if listening not in done:
        raise ChildProcessError(f"exited with {process.returncode} before it listened: {list(output)}")
    return listening.result()


async def _read_output(read_end: int, output: deque[str], listening: asyncio.Future[str]) -> None:
    """Drains the pipe into `output` until every holder has closed it."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb", buffering=0)
    )
    try:
        while line := await stream.readline():
            text = line.decode(errors="replace").rstrip("\n")
            output.append(text)
            if text.startswith(_LISTENING) and not listening.done():
                listening.set_result(text.removeprefix(_LISTENING))
    finally:
        transport.close()


async def _kill(process: asyncio.subprocess.Process, output: deque[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A grandchild in another session is not in the group.
    for line in output:
        if line.startswith(_GRANDCHILD):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(line.removeprefix(_GRANDCHILD)), signal.SIGKILL)
    await process.wait()
