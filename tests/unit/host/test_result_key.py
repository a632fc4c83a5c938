"""The key that signs addresses of results: made once, kept, and nobody else's to read."""

import stat
from pathlib import Path

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft_app.compose.gateway import result_key
from weft_app.compose.home import WeftHome
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_config


def home_in(folder: Path) -> WeftHome:
    home = WeftHome(folder)
    home.create()
    return home


def test_key_is_created_at_the_first_start_and_read_at_the_next(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    key = result_key(WeftConfig(), home)
    assert (len(key), result_key(WeftConfig(), home)) == (32, key)
    assert stat.S_IMODE((home.state / "results.key").stat().st_mode) == 0o600


def test_gateways_with_the_same_key_file_sign_alike(tmp_path: Path) -> None:
    config = parse_config({"gateway": {"results": {"key_file": str(tmp_path / "shared.key")}}})
    assert result_key(config, home_in(tmp_path / "a")) == result_key(config, home_in(tmp_path / "b"))


@pytest.mark.parametrize(("content", "mode"), [(b"short", 0o600), (bytes(33), 0o600), (bytes(32), 0o644)])
def test_key_of_wrong_length_or_readable_by_others_is_refused(tmp_path: Path, content: bytes, mode: int) -> None:
    home = home_in(tmp_path)
    path = home.state / "results.key"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(WeftError, match=r"results\.key"):
        result_key(WeftConfig(), home)
