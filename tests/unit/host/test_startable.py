"""What is checked before a mesh starts."""

from pathlib import Path

import pytest

from weft.kernel.errors.error_tree import FieldError
from weft_app.compose.home import WeftHome
from weft_app.compose.startable import require_startable
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_config


def test_home_whose_path_is_too_long_for_sockets_is_refused_with_api_keys(tmp_path: Path) -> None:
    """Its processes used ports, where they rejected each other's calls for lack of an API key."""
    home = WeftHome(tmp_path / ("deep" * 30))
    require_startable(WeftConfig(), home)
    with pytest.raises(FieldError, match=r"run/weft\.sock is longer than 100 bytes") as caught:
        require_startable(parse_config({"auth": {"required": True}}), home)
    assert caught.value.field == "--home"


def test_home_with_short_paths_starts_with_api_keys() -> None:
    require_startable(parse_config({"auth": {"required": True}}), WeftHome(Path("/tmp/weft")))
