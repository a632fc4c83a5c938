"""How programs find a mesh on other machines, and what they show there."""

import asyncio
from pathlib import Path

import pytest

from weft.client import AsyncMesh, connect
from weft.client._channel import mesh_address, open_mesh_channel, security_from
from weft.kernel.errors import FieldError, WeftError


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody whose own home has no mesh."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (
        "WEFT_HOME",
        "WEFT_ROUTER",
        "WEFT_REGISTRY",
        "WEFT_CA_FILE",
        "WEFT_CERTIFICATE_FILE",
        "WEFT_KEY_FILE",
        "WEFT_API_KEY",
    ):
        monkeypatch.delenv(name, raising=False)


def test_variables_say_where_the_services_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_ROUTER", "mesh.example:7071")
    monkeypatch.setenv("WEFT_REGISTRY", "mesh.example:7070")
    assert mesh_address() == "mesh.example:7071"
    assert mesh_address("~/.weft", "registry") == "mesh.example:7070"


def test_a_home_that_somebody_has_chosen_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_ROUTER", "mesh.example:7071")
    with pytest.raises(WeftError, match="weft is not running"):
        mesh_address(tmp_path / "other")
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "other"))
    with pytest.raises(WeftError, match="weft is not running"):
        mesh_address()


def test_without_variables_nobody_is_anywhere() -> None:
    with pytest.raises(WeftError, match="weft is not running"):
        connect()
    assert security_from({}).files.paths == ()


def test_a_file_that_is_wrong_is_named_by_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_key_is_taken_from_its_variable_and_not_shown() -> None:
    security = security_from({"WEFT_API_KEY": "weft_abc_secret\n"})
    assert security.api_key == "weft_abc_secret"
    assert "secret" not in repr(security)


@pytest.mark.parametrize("key", ["two words", "zwei\nzeilen", "schlüssel", "\x00"])
def test_what_cannot_be_a_key_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(FieldError, match="WEFT_API_KEY: is no key") as refused:
        security_from({"WEFT_API_KEY": key})
    assert key not in refused.value.message


def test_on_this_machine_no_file_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CA_FILE", str(tmp_path / "none.pem"))
    open_mesh_channel(f"unix:{tmp_path}/registry.sock").close()

    async def connect_async() -> None:
        await AsyncMesh(f"unix:{tmp_path}/registry.sock").close()

    asyncio.run(connect_async())
