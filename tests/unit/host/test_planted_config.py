"""A configuration that nothing names is not taken from another user, who could put it into a folder such as /tmp."""

import os
from pathlib import Path

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.config.loader import config_files

NOBODY = 65_534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like /tmp, in which a command is called."""
    tmp_path.chmod(0o1777)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _planted(path: Path) -> Path:
    path.write_text("port: 1\n")
    os.chown(path, NOBODY, NOBODY)
    return path


@AS_ROOT
@pytest.mark.parametrize("has_own", [False, True], ids=["weft.yaml", "weft.local.yaml beside an own file"])
def test_file_of_another_user_in_a_folder_for_all_users_is_refused(folder: Path, has_own: bool) -> None:
    own = folder / "weft.yaml"
    _planted(folder / "weft.local.yaml" if has_own else own)
    if has_own:
        own.write_text("port: 1\n")
    for path in (None, own) if has_own else (None,):
        with pytest.raises(WeftError, match="belongs to another user") as refused:
            config_files(path, {})
        assert refused.value.reason is Reason.PERMISSION_DENIED


@AS_ROOT
def test_link_of_another_user_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.mktemp("own") / "other.yaml"
    own.write_text("port: 1\n")
    (folder / "weft.yaml").symlink_to(own)
    os.chown(folder / "weft.yaml", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(WeftError, match="belongs to another user"):
        config_files(None, {})


@AS_ROOT
def test_named_file_of_another_user_is_read(folder: Path) -> None:
    file = _planted(folder / "weft.yaml")
    assert config_files(file, {}) == (file,)


@AS_ROOT
def test_file_of_another_user_in_a_folder_that_only_that_user_writes_is_read(folder: Path) -> None:
    folder.chmod(0o755)
    _planted(folder / "weft.yaml")
    assert config_files(None, {}) == (Path("weft.yaml"),)


def test_own_file_in_a_folder_for_all_users_is_read(folder: Path) -> None:
    (folder / "weft.yaml").write_text("port: 1\n")
    assert config_files(None, {}) == (Path("weft.yaml"),)
