"""What cannot start says why in one sentence, with the exit code of docs/cli.md and without a traceback."""

import asyncio
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.warm_python import warm
from mesh_process import START_SECONDS, WEFT, fake_runner, user_environment, write_config

IN_MOUNTS = warm("kit.in_mounts")
FAILED, USAGE = 1, 2
SMALL_DISK_BYTES = 40 * 1024
"""Enough for the folders and locks of a home, and too little for a database."""
SERVICES = ("registry", "router", "gateway", "runner")


async def _start(
    command: list[str], home: Path, *, within: tuple[str, ...] = (), prepare: Callable[[], None] | None = None
) -> tuple[int, list[str]]:
    """Exit code and the lines on stderr of a command that must end by itself."""
    config = write_config(home.parent, fake_runner("a"))
    process = await asyncio.create_subprocess_exec(
        *(*within, *WEFT, *command, "--home", str(home), "--config", str(config)),
        env=user_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=prepare,
    )
    try:
        async with asyncio.timeout(START_SECONDS):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert b"Traceback" not in out + err, (out + err).decode()
    assert process.returncode is not None
    return process.returncode, [line for line in err.decode().splitlines() if line]


def _can_mount() -> bool:
    """Whether this user may have mounts of its own."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return tried.returncode == 0


needs_mounts = pytest.mark.skipif(not _can_mount(), reason="no mount namespaces here: `unshare --mount` is refused")


@needs_mounts
@pytest.mark.parametrize(
    "command",
    [
        ["up"],
        *(pytest.param(["serve", each], marks=pytest.mark.nightly("the same, another command")) for each in SERVICES),
    ],
    ids=" ".join,
)
async def test_read_only_home_fails_with_one_sentence(tmp_path: Path, command: list[str]) -> None:
    home = tmp_path / "home"
    for folder in ("run", "state", "logs"):
        (home / folder).mkdir(parents=True)
    # A read-only bind mount in a namespace of its own: permissions would not stop root.
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"'
    code, lines = await _start(command, home, within=(*IN_MOUNTS, mount, str(home)))
    why = f"Read-only file system ({home / 'run'})"
    assert lines == [f"weft: the home {home} cannot be used: {why}; choose another with --home"]
    assert code == USAGE


def _small_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_DISK_BYTES, SMALL_DISK_BYTES))


@pytest.mark.parametrize(
    ("command", "owner"),
    [
        pytest.param(["up"], "registry", marks=pytest.mark.nightly("the same, another command")),
        (["serve", "registry"], "registry"),
        pytest.param(["serve", "router"], "router", marks=pytest.mark.nightly("the same, another command")),
    ],
    ids=["up", "registry", "router"],
)
async def test_disk_full_before_database_creation_fails_with_one_sentence(
    tmp_path: Path, command: list[str], owner: str
) -> None:
    home = tmp_path / "home"
    code, lines = await _start(command, home, prepare=_small_disk)
    (line,) = lines
    assert line.startswith(f"weft: the {owner}'s database {home / 'state' / owner}.db cannot be ")
    assert "(SQLITE_" in line
    assert code == FAILED


async def test_unopenable_log_fails_with_one_sentence(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "logs" / "registry.log").mkdir(parents=True)
    code, lines = await _start(["serve", "registry"], home)
    (line,) = lines
    assert line.startswith(f"weft: the home {home} cannot be used: Is a directory ({home / 'logs' / 'registry.log'})")
    assert code == USAGE
