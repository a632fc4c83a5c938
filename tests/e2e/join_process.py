"""`weft runner join` as a real process, and a proxy that keeps what goes over the wire."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from mesh_process import POLL_SECONDS, START_SECONDS, STOP_SECONDS, WEFT, alive, run_weft, user_environment

BACKEND_KEY = "sk-only-the-laptop-knows-this"


class JoinProcess:
    """A running `weft runner join`."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text()

    async def until(self, text: str) -> None:
        """Wait until it has printed `text`."""
        deadline = time.monotonic() + START_SECONDS
        while text not in self.output:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no {text!r} (exit {self.process.returncode}):\n{self.output}")
            await asyncio.sleep(POLL_SECONDS)

    async def exit_code(self) -> int:
        """How it ends by itself."""
        return await asyncio.to_thread(self.process.wait, STOP_SECONDS)

    def kill(self) -> None:
        """As a laptop that is gone."""
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    async def stop(self) -> int:
        """End it as a user would; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return await self.exit_code()


@contextmanager
def running_join(
    home: Path, url: str, token: str, *arguments: str, within: tuple[str, ...] = (), weft: tuple[str, ...] = WEFT
) -> Iterator[JoinProcess]:
    """`weft runner join` for the length of the block; `within` is a command that it is started by.

    Without a `url` it looks for announced meshes.
    """
    output = home.parent / f"{home.name}.out"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*within, *weft, "runner", "join", *filter(None, [url]), "--home", str(home), *arguments],
            env={**user_environment(), "WEFT_JOIN_TOKEN": token, "LAPTOP_KEY": BACKEND_KEY},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=home.parent,
        )
    family: list[psutil.Process] = []
    try:
        yield JoinProcess(process, output)
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_SECONDS)
    assert not alive(family), "weft runner join left processes behind"


def laptop_server(url: str) -> tuple[str, ...]:
    """Options that publish the OpenAI-compatible server at `url` as model `llama` of runner `laptop`."""
    return ("--name", "laptop", "--url", f"{url}/v1", "--model", "llama", "--api-key-env", "LAPTOP_KEY")


def relay_facts(home: Path) -> dict[str, str]:
    """Where runners join the mesh of a home."""
    found: dict[str, str] = json.loads((home / "run" / "relay.json").read_text())
    return found


async def make_token(home: Path, *options: str) -> dict[str, Any]:
    """A new join token, as `weft runner token create -o json` shows it."""
    code, out, err = await run_weft("runner", "token", "create", "-d", "test", "-o", "json", *options, home=home)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


class CapturingProxy:
    """Keeps every byte that goes through, both ways."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.captured = bytearray()
        self.address = ""
        self._copies: list[asyncio.Task[None]] = []

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection to its end."""
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._copies += [
            asyncio.create_task(self._copy(reader, onward_writer)),
            asyncio.create_task(self._copy(onward_reader, writer)),
        ]

    async def close(self) -> None:
        """Closes every connection: one that is left to the garbage collector fails a later test."""
        for copy in self._copies:
            copy.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while data := await reader.read(65_536):
                    self.captured += data
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def capturing_proxy(url: str) -> AsyncIterator[CapturingProxy]:
    """A proxy in front of an http:// URL on this machine."""
    proxy = CapturingProxy(int(url.rpartition(":")[2]))
    server = await asyncio.start_server(proxy.carry, "127.0.0.1", 0)
    proxy.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
