"""The addresses of a home whose path has characters with a meaning in URLs."""

from pathlib import Path

import pytest

from weft.sql.address import address_of
from weft_app.compose.home import WeftHome, is_socket_address


@pytest.mark.parametrize("name", ["pct%20", "hash#1", "q?x", "long" * 30])
def test_home_path_unusable_as_a_socket_uses_loopback_ports(name: str) -> None:
    """gRPC decoded '%20', and took what follows '#' and '?' for parts of a URI: no command found the mesh."""
    assert WeftHome(Path("/tmp") / name).address("weft") == "127.0.0.1:0"


@pytest.mark.parametrize("name", ["sp ace", "ü", "a&b", "a:b", "a;b", "a@b", "a+b"])
def test_home_path_with_other_characters_uses_sockets(name: str) -> None:
    home = WeftHome(Path("/tmp") / name)
    assert home.address("weft") == f"unix:/tmp/{name}/run/weft.sock"
    assert is_socket_address(home.run / "weft.sock")


@pytest.mark.parametrize("name", ["pct%20", "hash#1", "q?x=1&y", "sp ace", "ü"])
def test_database_path_is_used_as_its_file(name: str) -> None:
    path = Path("/tmp") / name / "state" / "router.db"
    assert address_of(path).path == path


def test_database_url_is_used_unchanged() -> None:
    assert address_of("sqlite:////tmp/router.db?timeout=3").path == Path("/tmp/router.db")
