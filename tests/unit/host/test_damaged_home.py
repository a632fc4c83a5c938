"""A home that cannot be used, and small files in it that are damaged: one sentence, or a new file."""

import errno
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.client._home import mesh_address, mesh_url
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.authority import self_signed_certificate
from weft_app.compose.home import WeftHome
from weft_app.compose.relay import known_endpoint


def _failing(code: int, when: str) -> Callable[..., Any]:
    """A temporary file that a file system refuses: to be made, or to be written."""

    class Full(io.BytesIO):
        def write(self, _: Any) -> int:
            raise OSError(code, os.strerror(code))

    def make(*_: object, **__: object) -> io.BytesIO:
        if when == "made":
            raise OSError(code, os.strerror(code))
        return Full()

    return make


@pytest.mark.parametrize(
    ("code", "when", "words"),
    [
        (errno.EROFS, "made", "Read-only file system (RUN); choose another with --home"),
        (errno.ENOSPC, "written", "No space left on device (RUN); free some space on its disk, or choose another"),
        (errno.EFBIG, "written", "File too large (RUN); free some space on its disk"),
        (errno.EACCES, "made", "Permission denied (RUN); choose another"),
    ],
)
def test_home_with_unwritable_folders_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, when: str, words: str
) -> None:
    """Folders that exist were taken for good ones, and the first file that was opened ended in a traceback."""
    home = WeftHome(tmp_path)
    home.create()
    monkeypatch.setattr(tempfile, "TemporaryFile", _failing(code, when))
    with pytest.raises(WeftError) as refused:
        home.create()
    assert words.replace("RUN", str(home.run)) in refused.value.message
    assert refused.value.reason is Reason.INVALID_ARGUMENT
    assert str(tmp_path) in refused.value.message


def test_file_in_place_of_a_home_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(WeftError, match=f"{tmp_path / 'state'}"):
        WeftHome(tmp_path).create()


def test_lock_that_cannot_be_opened_is_one_message(tmp_path: Path) -> None:
    home = WeftHome(tmp_path)
    home.create()
    (home.run / "up.lock").mkdir()
    with pytest.raises(WeftError, match=r"up\.lock") as refused, home.claim():
        pass
    assert refused.value.reason is Reason.INVALID_ARGUMENT


def test_corrupt_lock_still_reports_the_home_as_in_use(tmp_path: Path) -> None:
    home = WeftHome(tmp_path)
    home.create()
    with home.claim():
        (home.run / "up.lock").write_bytes(b"\xff\xfe\x00\n")
        home.up_file.write_bytes(b'{"not": "what it says"}')
        with pytest.raises(WeftError, match=r"another weft \(pid unknown\) runs on") as refused, home.claim():
            pass
    assert refused.value.reason is Reason.ALREADY_EXISTS


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"7", b'{"url"', b"{}"])
def test_damaged_up_file_counts_as_missing(tmp_path: Path, content: bytes) -> None:
    home = WeftHome(tmp_path)
    home.create()
    home.up_file.write_bytes(content)
    (home.run / "relay.json").write_bytes(content)
    assert not home.running()
    assert known_endpoint(home) is None
    for find in (mesh_url, mesh_address):
        with pytest.raises(WeftError, match="weft is not running"):
            find(tmp_path)


def test_mesh_that_follows_a_killed_one_has_not_its_relay(tmp_path: Path) -> None:
    """`weft runner token create` printed an invitation to the relay of the killed one."""
    home = WeftHome(tmp_path)
    home.create()
    home.relay_file.write_text('{"url": "https://box:7443"}')
    assert known_endpoint(home)
    with home.claim():
        assert known_endpoint(home) is None


def _damaged(folder: Path, name: str, content: bytes | None) -> None:
    path = folder / name
    path.unlink()
    if content is None:
        path.mkdir()
    elif content:
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["cert.pem", "key.pem"])
@pytest.mark.parametrize("content", [b"garbage \xff", b"\n", None], ids=["garbage", "empty", "folder"])
def test_damaged_relay_certificate_is_reported_and_never_replaced(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    """It was said that the address was in use. A new one in its place would lock out all who pin the old one."""
    self_signed_certificate(tmp_path, [])
    _damaged(tmp_path, name, content)
    with pytest.raises(WeftError, match="restore both from a backup") as refused:
        self_signed_certificate(tmp_path, [])
    assert str(tmp_path / "cert.pem") in refused.value.message


def test_missing_relay_key_is_reported_and_a_key_without_a_certificate_is_replaced(tmp_path: Path) -> None:
    first = self_signed_certificate(tmp_path, [])
    (tmp_path / "key.pem").unlink()
    with pytest.raises(WeftError, match="No such file"):
        self_signed_certificate(tmp_path, [])
    (tmp_path / "key.pem").write_bytes(b"")
    (tmp_path / "cert.pem").unlink()
    assert self_signed_certificate(tmp_path, []).fingerprint != first.fingerprint
    assert {path.name for path in tmp_path.iterdir()} == {"cert.pem", "key.pem", "lock"}
