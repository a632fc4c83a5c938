"""The addresses of a home whose path has characters with a meaning in URLs, and those of its services."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import typer

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.sql.address import address_of
from weft_app.cli import serve
from weft_app.compose.home import WeftHome, is_socket_address
from weft_app.compose.serving import Announce
from weft_app.config.config import WeftConfig


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


def test_service_that_fails_beside_another_of_its_name_leaves_the_addresses_of_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that was started twice was not found any more by commands, because the second one had no port."""
    monkeypatch.setattr(serve, "configure_logging", lambda *_, **__: None)
    monkeypatch.setattr(WeftHome, "log_file", lambda *_: None)
    (tmp_path / "weft.yaml").write_text("port: 1\n")
    home = WeftHome(tmp_path / "home")

    def gateway() -> AbstractContextManager[tuple[WeftConfig, WeftHome, Announce]]:
        return serve._service("gateway", home.root, tmp_path / "weft.yaml", {"registry": "127.0.0.1:7070"}, {})

    with gateway() as (_, _, announce):
        announce("http://127.0.0.1:8080")
        with pytest.raises(typer.Exit), gateway():
            raise WeftError(Reason.ALREADY_EXISTS, "port 8080 is taken")
        assert home.served() == {"gateway": "http://127.0.0.1:8080"}
        assert home.target_file("gateway", "registry").read_text() == "127.0.0.1:7070"
    assert not list(home.run.iterdir())
