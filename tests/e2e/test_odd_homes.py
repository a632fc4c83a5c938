"""A mesh whose home, output or working folder is unusual, from its start to its stop."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from mesh_process import COLD_WEFT, START_SECONDS, run_weft, user_environment

from weft.kernel.telemetry.structured_logs import FOLLOW_SECONDS
from weft_app.cli.options import EXIT_OK

pytestmark = pytest.mark.slow("starts meshes")
UP = ("up", "-d", "--no-demo", "--discover", "no", "--port", "0")


async def test_commands_find_a_mesh_if_its_home_contains_url_characters(tmp_path: Path) -> None:
    """'%' was refused as in use; with '#' and '?' the start hung, and no command found the mesh."""
    home = tmp_path / "pct%20 q?x hash#1 ü"
    code, _, error = await run_weft(*UP, home=home)
    assert code == EXIT_OK, error
    try:
        code, _, error = await run_weft("ps", home=home)
        assert code == EXIT_OK, error
        assert (home / "state" / "router.db").exists()
    finally:
        code, _, error = await run_weft("stop", home=home)
    assert code == EXIT_OK, error


WITHOUT_A_PASSWD_ENTRY = "unshare --user --map-user=12345"
"""A user whom the user database does not have; only root and some kernels permit it to others."""


@pytest.mark.parametrize(
    "shell",
    [
        'umask 077; LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=0 "$@" <&- >&- 2>&-',
        'cd gone; rmdir ../gone; umask 000; TZ=Pacific/Chatham LC_ALL=tr_TR.ISO-8859-9 "$@" > /dev/full',
        f'unset HOME; {WITHOUT_A_PASSWD_ENTRY} true && set -- {WITHOUT_A_PASSWD_ENTRY} "$@"; "$@"',
    ],
)
async def test_mesh_starts_in_the_background_with_any_inherited_environment(tmp_path: Path, shell: str) -> None:
    """It ended with a traceback; with a full disk behind stdout the mesh ran on, and the command failed."""
    home = tmp_path / "höme"
    (tmp_path / "gone").mkdir()
    process = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", shell, "sh", *COLD_WEFT, *UP, "--home", str(home)),
        env=user_environment(),
        cwd=tmp_path,
    )
    try:
        async with asyncio.timeout(START_SECONDS):
            assert await process.wait() == EXIT_OK
        assert (home / "run" / "up.json").exists()
        shared = [str(path) for path in (home, *home.iterdir()) if path.is_dir() and path.stat().st_mode & 0o077]
        assert not shared, "other users of the machine can read them"
        first, *_ = (home / "logs" / "host.log").read_text().splitlines()
        written = datetime.fromisoformat(json.loads(first)["timestamp"])
        assert abs(datetime.now(UTC) - written) < timedelta(minutes=5)
    finally:
        code, _, error = await run_weft("stop", home=home)
    assert code == EXIT_OK, error


async def test_logs_continue_in_a_new_file_after_rotation(tmp_path: Path) -> None:
    """They went to the moved file, and `weft logs` had no lines."""
    home = tmp_path / "home"
    code, _, error = await run_weft(*UP, home=home)
    assert code == EXIT_OK, error
    try:
        log = home / "logs" / "host.log"
        log.rename(log.with_name("host.log.old"))
        # The file is looked up once in this time.
        await asyncio.sleep(FOLLOW_SECONDS)
        url = json.loads((home / "run" / "up.json").read_text())["url"]
        async with aiohttp.ClientSession() as session, session.get(f"{url}/nowhere") as answer:
            request = answer.headers["x-request-id"]
        assert request in log.read_text()
        code, shown, error = await run_weft("logs", home=home)
        assert (code, request in shown) == (EXIT_OK, True), error
    finally:
        await run_weft("stop", home=home)
