"""`weft top` over a real mesh: as documents for scripts, and on a terminal."""

import asyncio
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
from pathlib import Path

import aiohttp
from mesh_process import (
    COLD_WEFT,
    POOL,
    STOP_SECONDS,
    MeshProcess,
    run_weft,
    user_environment,
)

CHAT = {"model": POOL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
REQUEST = "req-seen-in-top"
READ_BYTES = 65_536
SHOWN_SECONDS = 30.0
"""The longest silence of a page that is awaited."""


class Terminal:
    """`weft top` on a terminal of its own."""

    def __init__(self, home: Path, columns: int, rows: int) -> None:
        self.ours, theirs = pty.openpty()
        self.resize(columns, rows)
        environment = {**user_environment(), "TERM": "xterm-256color", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *COLD_WEFT, "top", "--home", str(home)],
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.shown = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def until(self, text: str) -> None:
        """Reads until a text has been shown since the last call; AssertionError with what was shown instead."""
        while text not in self.shown:
            ready, _, _ = await asyncio.to_thread(select.select, [self.ours], [], [], SHOWN_SECONDS)
            assert ready, f"{text!r} is not shown (exit code {self.process.poll()}): {self.shown[-2000:]!r}"
            self.shown += os.read(self.ours, READ_BYTES).decode(errors="replace")
        self.shown = ""

    async def ended(self) -> int:
        """The exit code; what it writes last is read."""
        waiting = asyncio.create_task(asyncio.to_thread(self.process.wait, STOP_SECONDS))
        code = await waiting
        os.close(self.ours)
        return code


async def test_top_prints_a_document_for_scripts_and_an_interactive_page_on_a_terminal(
    common_mesh: MeshProcess,
) -> None:
    mesh = common_mesh
    headers = {"X-Request-Id": REQUEST}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{mesh.url}/v1/chat/completions", json=CHAT) as answer,
    ):
        assert answer.status == 200
    _, written, _ = await run_weft("top", "--once", "-o", "json", home=mesh.home)
    once = json.loads(written)
    assert "m-a" in [model["model"] for model in once["models"]]
    own = [ended for ended in once["ended"] if ended["id"] == REQUEST]
    assert [(ended["outcome"], ended["target"]) for ended in own] == [("completed", POOL)]
    code, text, _ = await run_weft("top", "--once", home=mesh.home)
    assert code == 0
    assert "MODEL" in text

    top = Terminal(mesh.home, columns=80, rows=24)
    await top.until("(now name)")
    os.write(top.ours, b"m")
    await top.until("(now memory)")
    os.write(top.ours, b"p")
    await top.until("p go on")
    top.resize(30, 8)
    await top.until("weft top")
    os.write(top.ours, b"q")
    assert await top.ended() == 0

    top = Terminal(mesh.home, columns=80, rows=24)
    await top.until("(now name)")
    top.process.send_signal(signal.SIGINT)
    assert await top.ended() == 0
