"""The commands of extensions: listed and run like others, absent if weft.yaml disables them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft_app.cli import extension_commands
from weft_app.cli.main import app
from weft_app.config import loader
from weft_app.config.config import CONFIG_NAME


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    extension_commands.extension_commands.cache_clear()
    extension_commands._disabled_here.cache_clear()


def test_a_command_of_an_extension_is_in_the_help_of_its_group() -> None:
    assert "simulate" in CliRunner().invoke(app, ["mesh", "--help"]).stdout


def test_a_disabled_extension_leaves_the_help(folder: Path) -> None:
    (folder / "weft.yaml").write_text("extensions: {disabled: [simulate]}\n")
    assert "Simulate a mesh" not in CliRunner().invoke(app, ["mesh", "--help"]).stdout


def test_a_command_of_a_disabled_extension_says_why_it_does_not_run(folder: Path) -> None:
    (folder / "weft.yaml").write_text("extensions: {disabled: [simulate]}\n")
    refused = CliRunner().invoke(app, ["mesh", "simulate", "x.yaml"])
    assert refused.exit_code == 2
    assert "mesh simulate belongs to the extension simulate, which is off" in refused.output
    assert "extensions.disabled names it" in refused.output


def test_the_files_that_may_disable_are_those_of_the_loader() -> None:
    assert extension_commands.FILE_VARIABLES == (loader.SETTINGS_VARIABLE, loader.LOCAL_SETTINGS_VARIABLE)
    assert extension_commands.FILES[0] == CONFIG_NAME


def test_a_configuration_that_cannot_be_read_disables_nothing(folder: Path) -> None:
    (folder / "weft.yaml").write_text("extensions: {disabled: simulate\n")
    assert "simulate" in CliRunner().invoke(app, ["mesh", "--help"]).stdout


def test_a_command_of_the_core_looks_for_no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("reading the packages of an environment takes 20 ms")

    monkeypatch.setattr("weft.extension.all_extensions", fail)
    for words in (["keys", "create", "--help"], ["mesh", "version", "--help"], ["ps", "--help"]):
        assert CliRunner().invoke(app, words).exit_code == 0
