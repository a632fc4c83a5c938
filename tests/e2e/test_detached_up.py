"""`weft up -d`: what a start that fails and the first key show in front of the user.

`test_commands_while_models_load` shows when it returns, and that the mesh then serves and ends with `weft down`.
"""

import asyncio
import re
import sys
from pathlib import Path

from mesh_process import START_SECONDS, WEFT, fake_runner, run_weft, user_environment, write_config

from weft_app.cli.options import EXIT_OK, EXIT_USAGE
from weft_app.cli.ready_text import JOIN_FILE, KEY_FILE
from weft_app.compose.home import WeftHome


async def test_failed_start_is_shown_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "weft.yaml").write_text("runners: [{name: box, models: []}]\n")
    home = tmp_path / "home"
    code, shown, error = await run_weft("up", "-d", "--config", str(tmp_path / "weft.yaml"), home=home)
    assert code == EXIT_USAGE
    assert "runners.0.models: " in error
    assert "in the background" not in shown
    assert not WeftHome(home).is_claimed()


async def test_first_key_is_shown_once_on_the_terminal_like_in_the_foreground(tmp_path: Path) -> None:
    """Only the names of files were shown: the output of the mesh is no terminal, but that of the command is one."""
    home, config = tmp_path / "home", str(write_config(tmp_path, fake_runner("a")))
    options = ("--config", config, "--host", "0.0.0.0", "--port", "0", "--join-port", "0")
    code, shown = await run_on_terminal("up", "-d", *options, home=home)
    assert code == EXIT_OK, shown
    try:
        said, key = re.search(r"(callers need one\. .*)\s+(weft_\S+)", shown).groups()  # type: ignore[union-attr]
        assert said.rstrip() == "callers need one. The first, with the role admin, is shown only now:"
        assert shown.count(key) == 1, "no command uses the admin key"
        assert re.search(r"with this command, shown only now, valid for 30 days:\s+weft runner join ", shown)
        assert "first-" not in shown, "no file is named"
        assert not any((home / name).exists() for name in (KEY_FILE, JOIN_FILE)), "shown only now"
        assert key not in (home / "logs" / "up.out").read_text()
    finally:
        code, shown, error = await run_weft("down", home=home)
    assert code == EXIT_OK, error


async def run_on_terminal(*arguments: str, home: Path) -> tuple[int, str]:
    """A `weft` command on a terminal to its end: exit code, and what the terminal showed."""
    on_a_terminal = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", on_a_terminal, *WEFT, *arguments),
        env={**user_environment(), "WEFT_HOME": str(home), "COLUMNS": "200", "TERM": "dumb"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(START_SECONDS):
        out, _ = await process.communicate()
    return process.returncode or 0, out.decode().replace("\r\n", "\n")
