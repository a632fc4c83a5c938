"""Other users of the machine neither read nor replace what is in a home, whatever mode and umask made it."""

import os
from pathlib import Path

import pytest

from gateway.http.server import _listen_at
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.grpc_host import GrpcHost
from weft_app.compose.home import WeftHome

NOBODY = 65_534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


def _mode(path: Path) -> str:
    return f"{path.stat().st_mode & 0o777:03o}"


def _open_home(root: Path) -> WeftHome:
    for folder in (root, *(root / name for name in ("run", "state", "logs", "runtimes", "models"))):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
    return WeftHome(root)


def test_open_folders_of_a_home_are_closed_to_other_users(tmp_path: Path) -> None:
    home = _open_home(tmp_path)
    home.create()
    assert {_mode(each) for each in (home.root, home.run, home.state, home.logs)} == {"700"}
    assert {_mode(each) for each in (home.models, home.root / "runtimes")} == {"755"}, (
        "others could replace its entries"
    )


def test_modes_of_a_closed_home_are_kept(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    WeftHome(tmp_path).create()
    assert _mode(tmp_path) == "750"


def test_mode_of_a_folder_for_all_users_is_kept(tmp_path: Path) -> None:
    """Nobody but the owner replaces an entry of such a folder, and a start of root would close /tmp to everyone."""
    tmp_path.chmod(0o1777)
    home = WeftHome(tmp_path)
    home.create()
    assert (_mode(tmp_path), _mode(home.run)) == ("777", "700")


@AS_ROOT
@pytest.mark.parametrize("entry", ["run", "key"])
def test_open_home_with_an_entry_of_another_user_is_refused(tmp_path: Path, entry: str) -> None:
    home = _open_home(tmp_path)
    (tmp_path / entry).mkdir(exist_ok=True)
    os.chown(tmp_path / entry, NOBODY, NOBODY)
    with pytest.raises(WeftError, match=f"{tmp_path / entry} belongs to another user") as refused:
        home.create()
    assert refused.value.reason is Reason.INVALID_ARGUMENT


@AS_ROOT
@pytest.mark.parametrize("name", ["run", "models", "runtimes"])
def test_folder_of_another_user_in_a_folder_for_all_users_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    os.chown(tmp_path / name, NOBODY, NOBODY)
    tmp_path.chmod(0o1777)
    with pytest.raises(WeftError, match="belongs to another user"):
        WeftHome(tmp_path).create()


@AS_ROOT
def test_link_of_another_user_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    home, other = WeftHome(tmp_path / "home"), tmp_path / "other"
    home.root.mkdir()
    other.mkdir()
    home.run.symlink_to(other)
    os.chown(home.run, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(WeftError, match="belongs to another user"):
        home.create()


@AS_ROOT
def test_folder_for_all_users_that_another_user_owns_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner can replace every entry."""
    tmp_path.chmod(0o1777)
    os.chown(tmp_path, NOBODY, NOBODY)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(WeftError, match=f"{tmp_path} belongs to another user"):
        WeftHome(tmp_path).create()


def _modes(folder: Path) -> dict[str, str]:
    return {each.name: _mode(each) for each in folder.iterdir()}


async def test_sockets_are_closed_to_other_users_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    host = GrpcHost()
    try:
        host.bind(f"unix:{tmp_path / 'weft.sock'}")
        _listen_at(tmp_path / "http.sock").close()
        modes = _modes(tmp_path)
        await host.start([])
    finally:
        os.umask(before)
        await host.stop(0.0)
    assert modes == {"http.sock": "600", "weft.sock": "600"}
