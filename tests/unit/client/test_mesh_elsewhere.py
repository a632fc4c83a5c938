"""How programs find a mesh on other machines, and what they show there."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from weft.client import AsyncMesh, connect
from weft.client._channel import open_mesh_channel, security_from
from weft.client._home import DEFAULT_HOME, mesh_address, mesh_url
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.mesh_api import api_socket
from weft_app.cli.options import HomeOption


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody whose own home has no mesh."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (
        "WEFT_HOME",
        "WEFT_ROUTER",
        "WEFT_REGISTRY",
        "WEFT_URL",
        "WEFT_CA_FILE",
        "WEFT_CERTIFICATE_FILE",
        "WEFT_KEY_FILE",
        "WEFT_API_KEY",
    ):
        monkeypatch.delenv(name, raising=False)


def test_variables_set_the_service_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_ROUTER", "mesh.example:7071")
    monkeypatch.setenv("WEFT_REGISTRY", "mesh.example:7070")
    assert mesh_address() == "mesh.example:7071"
    assert mesh_address(DEFAULT_HOME, "registry") == "mesh.example:7070"


def test_explicit_home_takes_precedence_over_variables_even_if_it_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_ROUTER", "mesh.example:7071")
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "other"))
    for named in (tmp_path / "other", "~/.weft"):
        with pytest.raises(WeftError, match="WEFT_ROUTER is ignored, as a home is named"):
            mesh_address(named)


def test_home_variable_does_not_hide_an_address_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(_home_with(tmp_path / "home", {"up.json": '{"grpc": "127.0.0.1:1"}'})))
    assert mesh_address() == "127.0.0.1:1"
    monkeypatch.setenv("WEFT_ROUTER", "mesh.example:7071")
    assert mesh_address() == "mesh.example:7071"
    assert mesh_address(tmp_path / "home") == "127.0.0.1:1"


def test_home_whose_path_is_too_long_for_sockets_has_none(tmp_path: Path) -> None:
    """Regression: its sockets counted as served, so commands did not use the loopback ports of its mesh."""
    home = _home_with(tmp_path / ("x" * 120), {"up.json": '{"url": "http://127.0.0.1:8080"}'})
    assert api_socket(home) is None
    assert mesh_url(home) == "http://127.0.0.1:8080"
    with pytest.raises(WeftError, match="weft is not running"):
        mesh_address(home)


def test_configured_service_address_is_used_after_running_services_of_the_home(tmp_path: Path) -> None:
    home = _home_with(tmp_path / "home", {"router.registry-target": "mesh.example:7070\n"})
    assert mesh_address(home, "registry") == "mesh.example:7070"
    with pytest.raises(WeftError, match=r"start it with `weft up --home .*home`$"):
        mesh_address(home, "router")
    _home_with(home, {"registry.address": "127.0.0.1:2"})
    assert mesh_address(home, "registry") == "127.0.0.1:2"


def test_registry_addresses_include_its_possible_owners(tmp_path: Path) -> None:
    """Commands on the host of a standby called it alone, and failed with REGISTRY_STANDBY."""
    own = {"registry.address": "10.0.0.2:7070", "router.address": "10.0.0.2:7071"}
    home = _home_with(tmp_path / "home", own)
    assert mesh_address(home, "registry") == "10.0.0.2:7070"
    _home_with(home, {"registry.owner": "10.0.0.3:7070"})
    assert mesh_address(home, "registry") == "10.0.0.2:7070,10.0.0.3:7070"
    _home_with(home, {"registry.registry-target": "10.0.0.1:7070, 10.0.0.2:7070"})
    assert mesh_address(home, "registry") == "10.0.0.2:7070,10.0.0.1:7070,10.0.0.3:7070"
    assert mesh_address(home, "router") == "10.0.0.2:7071"


def test_gateway_of_a_home_is_its_http_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = _home_with(tmp_path / "home", {"gateway.address": "http://127.0.0.1:8080"})
    assert mesh_url(home) == "http://127.0.0.1:8080"
    monkeypatch.setenv("WEFT_HOME", str(home))
    monkeypatch.setenv("WEFT_URL", "https://mesh.example/")
    assert mesh_url() == "https://mesh.example"


@pytest.mark.parametrize(
    ("arguments", "found"), [([], "mesh.example:7070"), (["--home", "HOME"], "127.0.0.1:1")], ids=["variable", "option"]
)
def test_home_option_is_distinguished_from_its_variable(tmp_path: Path, arguments: list[str], found: str) -> None:
    home = str(_home_with(tmp_path / "home", {"up.json": '{"grpc": "127.0.0.1:1"}'}))
    app = typer.Typer()

    @app.command()
    def find(home: HomeOption = DEFAULT_HOME) -> None:
        sys.stdout.write(mesh_address(home.expanduser().absolute(), "registry"))

    words = [home if each == "HOME" else each for each in arguments]
    result = CliRunner().invoke(app, words, env={"WEFT_HOME": home, "WEFT_REGISTRY": "mesh.example:7070"})
    assert result.stdout == found


def _home_with(home: Path, files: Mapping[str, str]) -> Path:
    """A home whose services have written these files."""
    (home / "run").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (home / "run" / name).write_text(text)
    return home


def test_connect_fails_without_variables_or_a_home() -> None:
    with pytest.raises(WeftError, match=r"\(home .*\.weft\); start it with `weft up`, or set WEFT_ROUTER to "):
        connect()
    assert security_from({}).files.paths == ()


def test_invalid_file_error_names_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CA_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(FieldError, match=r"^INVALID_ARGUMENT: WEFT_CA_FILE: cannot be read"):
        open_mesh_channel("mesh.example:7070")

    async def connect_async() -> None:
        AsyncMesh("mesh.example:7070")

    with pytest.raises(FieldError, match=r"^INVALID_ARGUMENT: WEFT_CA_FILE: cannot be read"):
        asyncio.run(connect_async())
    monkeypatch.delenv("WEFT_CA_FILE")
    monkeypatch.setenv("WEFT_CERTIFICATE_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(FieldError, match="WEFT_KEY_FILE: is missing"):
        open_mesh_channel("mesh.example:7070")


def test_key_is_read_from_its_variable_and_not_shown() -> None:
    security = security_from({"WEFT_API_KEY": "weft_abc_secret\n"})
    assert security.api_key == "weft_abc_secret"
    assert "secret" not in repr(security)


@pytest.mark.parametrize("key", ["two words", "zwei\nzeilen", "schlüssel", "\x00"])
def test_invalid_key_is_refused_and_not_echoed(key: str) -> None:
    with pytest.raises(FieldError, match="WEFT_API_KEY: is not a key") as refused:
        security_from({"WEFT_API_KEY": key})
    assert key not in refused.value.message


def test_unix_socket_target_reads_no_certificate_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CA_FILE", str(tmp_path / "none.pem"))
    open_mesh_channel(f"unix:{tmp_path}/registry.sock").close()

    async def connect_async() -> None:
        await AsyncMesh(f"unix:{tmp_path}/registry.sock").close()

    asyncio.run(connect_async())


def test_call_without_time_left_fails_and_does_not_wait() -> None:
    """Regression: a timeout of 0 counted as none."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        connect(f"127.0.0.1:{silent.getsockname()[1]}") as mesh,
        pytest.raises(WeftError) as late,
    ):
        mesh.embed("m", "text", timeout=0)
    assert late.value.reason is Reason.DEADLINE_EXCEEDED


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files to another user")
@pytest.mark.parametrize("find", [mesh_url, mesh_address, api_socket])
def test_home_of_another_user_gets_no_key_and_no_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find: Callable[[Path], object]
) -> None:
    """Another user could create /tmp/mesh, which a command names, after a restart of the machine."""
    run = tmp_path / "trap" / "run"
    run.mkdir(parents=True)
    (run / "up.json").write_text('{"grpc": "127.0.0.1:1", "url": "http://127.0.0.1:1"}')
    find(tmp_path / "trap")
    os.chown(run, 65_534, 65_534)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(WeftError, match="belongs to another user") as refused:
        find(tmp_path / "trap")
    assert refused.value.reason is Reason.PERMISSION_DENIED
