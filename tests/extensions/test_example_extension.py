"""The extension of another package in examples/extension, installed as pip would."""

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from asgi_call import answer_of
from kit.runtime_plugin import write_distribution
from test_extension_apis import app_with
from typer.testing import CliRunner

from weft.extension import all_extensions, installed_extensions
from weft_app.cli import extension_commands
from weft_app.cli.main import app

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "extension"
GROUP = "weft.extensions"


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    points = {f"{GROUP}:{name}": value for name, value in project["entry-points"][GROUP].items()}
    write_distribution(tmp_path, project["name"], project["version"], points)
    found = [str(EXAMPLE), str(tmp_path)]
    monkeypatch.setattr(sys, "path", [*found, *sys.path])
    forget()
    yield found
    forget()
    for name in [each for each in sys.modules if each.startswith("weft_greeting")]:
        del sys.modules[name]


def forget() -> None:
    installed_extensions.cache_clear()
    extension_commands.extension_commands.cache_clear()


@pytest.mark.usefixtures("paths")
async def test_its_endpoint_is_served_and_documented() -> None:
    gateway = app_with(all_extensions())
    assert "weft_greeting.api" not in sys.modules
    answer = await answer_of(gateway, "GET", "/x/greeting")
    assert (answer.status, answer.json) == (200, {"greeting": "hello, local"})
    assert b'"/x/greeting"' in await gateway.document()


@pytest.mark.usefixtures("paths")
def test_its_command_is_listed_and_runs() -> None:
    assert "greet" in CliRunner().invoke(app, ["mesh", "--help"]).stdout
    assert CliRunner().invoke(app, ["mesh", "greet", "you"]).stdout == "hello, you\n"


def test_its_descriptor_imports_neither_web_framework_nor_command(paths: list[str]) -> None:
    code = "import sys, weft_greeting.extension; print({'starlette', 'typer', 'grpc'} & sys.modules.keys())"
    root = str(EXAMPLE.parents[1])
    ended = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join([*paths, root])}, capture_output=True, check=True
    )
    assert ended.stdout == b"set()\n"
