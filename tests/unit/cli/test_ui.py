"""`weft ui`: the address of the workbench, and the browser that it is opened in."""

import json
import os
import webbrowser
from pathlib import Path

import pytest

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_app.cli.ui import ui

URL = "http://127.0.0.1:8080"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of a mesh that runs: this process."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "up.json").write_text(json.dumps({"pid": os.getpid(), "url": URL}))
    return tmp_path


@pytest.mark.parametrize("only_print", [True, False])
def test_the_page_is_opened_unless_only_its_address_is_wanted(
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


def test_a_machine_without_a_browser_is_told_to_open_the_address_elsewhere(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _: False)
    ui(home=home)
    assert "no browser" in capsys.readouterr().err


def test_without_a_mesh_the_command_that_starts_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="weft up") as refused:
        ui(home=tmp_path)
    assert refused.value.reason is Reason.SERVICE_UNAVAILABLE
