"""`weft ui`: the address of the workbench, and the browser that it is opened in."""

import json
import os
import webbrowser
from pathlib import Path

import pytest

from weft.client._home import FoundHome
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.ui import ui

URL = "http://127.0.0.1:8080"


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody names a mesh elsewhere."""
    for name in ("WEFT_URL", "WEFT_REGISTRY", "WEFT_ROUTER", "WEFT_CA_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of a mesh that runs: this process."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "up.json").write_text(json.dumps({"pid": os.getpid(), "url": URL, "grpc": "127.0.0.1:7"}))
    return tmp_path


@pytest.mark.parametrize("only_print", [True, False])
def test_page_is_opened_unless_only_its_address_is_requested(
    only_print: bool, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def open_page(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", open_page)
    ui(only_print=only_print, home=home)
    assert capsys.readouterr() == (f"{URL}/ui/\n", "")
    assert opened == ([] if only_print else [f"{URL}/ui/"])


def test_machine_without_a_browser_prints_the_address(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _: False)
    ui(home=home)
    assert "no browser" in capsys.readouterr().err


def test_remote_mesh_takes_precedence_over_an_implicit_home(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_URL", "https://mesh.example/")
    for named, url in (
        (FoundHome(home), "https://mesh.example"),
        (home, URL),
        (FoundHome(tmp_path / "x"), "https://mesh.example"),
    ):
        ui(only_print=True, home=named)
        assert capsys.readouterr().out == f"{url}/ui/\n"
    monkeypatch.setenv("WEFT_URL", "mesh.example")
    with pytest.raises(FieldError, match=r"WEFT_URL: must be http:// or https://"):
        ui(only_print=True, home=FoundHome(home))


@pytest.mark.parametrize("variable", ["WEFT_REGISTRY", "WEFT_ROUTER"])
def test_remote_mesh_without_an_http_address_does_not_use_that_of_the_home(
    variable: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "mesh.example:7070")
    for found in (FoundHome(home), FoundHome(tmp_path / "x")):
        with pytest.raises(WeftError, match=f"{variable} names a mesh elsewhere, .* Set it in WEFT_URL, or .* --home"):
            ui(only_print=True, home=found)
    # The same mesh by another way.
    monkeypatch.setenv(variable, "127.0.0.1:7")
    ui(only_print=True, home=FoundHome(home))
    assert capsys.readouterr().out == f"{URL}/ui/\n"


def test_gateway_of_a_home_is_found_and_a_home_without_one_suggests_the_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "router.address").write_text("127.0.0.1:7071")
    with pytest.raises(WeftError, match=r"no gateway runs on the home .*; name the address in WEFT_URL"):
        ui(only_print=True, home=tmp_path)
    (tmp_path / "run" / "gateway.address").write_text("http://10.0.0.9:8080")
    ui(only_print=True, home=tmp_path)
    assert capsys.readouterr().out == "http://10.0.0.9:8080/ui/\n"


def test_error_without_a_mesh_names_the_start_command(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="weft up") as refused:
        ui(home=tmp_path)
    assert refused.value.reason is Reason.SERVICE_UNAVAILABLE
