"""`weft top` and `weft chat` in a terminal, and `weft top` as documents for scripts."""

import json
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
from kit.tmux import Tmux, needs_tmux, shell_in_tmux
from mesh_process import (
    COLD_WEFT,
    POOL,
    MeshProcess,
    eventually,
    fake_runner,
    run_weft,
    running_mesh,
    write_config,
)

CHAT = {"model": POOL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
REQUEST = "req-seen-in-top"
ENDLESS = {"answer_tokens": 0, "tokens_per_second": 20}


@contextmanager
def _shell(home: Path, columns: int = 100) -> Iterator[Tmux]:
    """A shell with a function `weft` for the mesh of a home."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with shell_in_tmux({**environment, "WEFT_HOME": str(home)}, columns) as terminal:
        terminal.run(f'weft() {{ {shlex.join(COLD_WEFT)} "$@"; }}; clear; echo be"fore"')
        terminal.until("before")
        yield terminal


def _is_restored(terminal: Tmux) -> bool:
    """Whether the shell has its lines and a terminal that shows what is typed."""
    terminal.until_prompt()
    terminal.run("stty -a | tr ' ' '\\n' | grep -x -e icanon -e echo | paste -sd,; echo d'one'")
    screen = terminal.until("done")
    return "before" in screen and "icanon,echo" in screen and not terminal.is_page()


async def test_top_prints_documents_for_scripts(common_mesh: MeshProcess) -> None:
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
    assert [host["cpuCount"] > 0 for host in once["hosts"]] == [True]
    code, text, _ = await run_weft("top", "--once", home=mesh.home)
    assert code == 0
    assert "MODEL" in text


@needs_tmux
async def test_top_shows_and_cancels_a_running_answer_and_opens_logs(common_mesh: MeshProcess) -> None:
    async with await common_mesh.backend("a") as backend:
        await backend.set_behaviour(**ENDLESS)
    with _shell(common_mesh.home) as terminal, _shell(common_mesh.home) as other:
        other.run("weft chat m-a 'count'; echo e'nded'")
        other.until("tok2")
        terminal.run("weft top")
        page = terminal.until("generating")
        assert "█" in page or "░" in page
        terminal.type("s")
        terminal.until("s sort (load)")
        terminal.type("p")
        terminal.until("p go on")
        terminal.type("p", "c")
        terminal.until("Select a request")
        terminal.type("Down", "l")
        terminal.until("weft logs model/m-a -f")
        assert not terminal.is_page()
        terminal.until("listening on")
        terminal.type("C-c")
        terminal.until("q quit")
        terminal.type("Down", "c")
        terminal.until("? y: yes")
        terminal.type("n")
        terminal.until("? y: yes", is_shown=False)
        terminal.type("c")
        terminal.until("? y: yes")
        terminal.type("y")
        terminal.until("Cancelled")
        other.until("ended")
        terminal.resize(60, 12)
        # The next key replaces the message.
        terminal.type("s")
        terminal.until("q quit")
        assert max(map(len, terminal.screen().splitlines())) <= 60
        terminal.type("q")
        terminal.until("q quit", is_shown=False)
        assert not terminal.is_page()


@needs_tmux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_terminal_is_restored_after_a_signal(mesh_of_the_session: MeshProcess, number: signal.Signals) -> None:
    with _shell(mesh_of_the_session.home) as terminal:
        terminal.run("weft top")
        # Ctrl-Z would leave the page to the shell.
        terminal.until("q quit")
        terminal.type("C-z")
        if number is signal.SIGINT:
            terminal.type("C-c")
        else:
            (program,) = psutil.Process(int(terminal.ask("display-message", "-p", "#{pane_pid}"))).children()
            program.send_signal(number)
        terminal.until("q quit", is_shown=False)
        assert _is_restored(terminal)


@needs_tmux
async def test_ctrl_c_stops_an_answer_and_the_chat_continues(common_mesh: MeshProcess) -> None:
    async with await common_mesh.backend("a") as backend:
        await backend.set_behaviour(**ENDLESS)
    with _shell(common_mesh.home) as terminal:
        terminal.run("weft chat m-a")
        terminal.until("Ctrl-C stops an answer")
        terminal.run("count")
        terminal.until("tok2")
        terminal.type("C-c")
        terminal.until("[stopped]")

        async def is_idle() -> bool:
            return not (await common_mesh.describe("a")).active_request_ids

        await eventually(is_idle, 10.0, "the engine still answers")
        terminal.run("/quit")
        assert _is_restored(terminal)


@needs_tmux
def test_top_says_that_the_mesh_is_gone_and_reconnects(tmp_path: Path) -> None:
    home, config = tmp_path / "home", write_config(tmp_path, fake_runner("a"))
    with _shell(home, columns=160) as terminal:
        with running_mesh(home, "--config", str(config)):
            terminal.run("weft top")
            terminal.until("m-a")
        terminal.until("No answer since")
        with running_mesh(home, "--config", str(config)):
            screen = terminal.until("No answer since", is_shown=False)
            assert "m-a" in screen
            terminal.type("q")
            terminal.until("q quit", is_shown=False)
            assert _is_restored(terminal)
