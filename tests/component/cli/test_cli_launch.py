"""`weft launch`: programs get the mesh's address, a key and a model, and no file of theirs is written."""

import ast
import json
import shlex
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cli_harness import scripted_mesh
from typer.testing import CliRunner, Result

from weft.api.registry.v1.model_pb2 import Model, ModelManifest
from weft_app.cli import launch_tools
from weft_app.cli.launch_tools import TOOLS, Access
from weft_app.cli.main import app

ACCESS = Access(url="http://box:8080", key="weft_k", model="route/coding")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, the only one that is searched; `aider` prints what it is started with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "aider"
    program.write_text('#!/bin/sh\necho "$OPENAI_API_BASE $OPENAI_API_KEY $*"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("WEFT_API_KEY", raising=False)
    return folder


def launch(*arguments: str, home: Path | None = None) -> Result:
    return CliRunner().invoke(app, ("launch", *arguments), env={"WEFT_HOME": str(home)} if home else {})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of a mesh that runs."""
    run = tmp_path / "home" / "run"
    run.mkdir(parents=True)
    (run / "up.json").write_text(json.dumps({"url": "http://127.0.0.1:7", "caFile": "/ca.pem", "asksForKeys": False}))
    return tmp_path / "home"


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_is_told_address_key_and_model(name: str) -> None:
    tool = TOOLS[name]
    said = json.dumps(dict(tool.environment(ACCESS))) + shlex.join(tool.arguments(ACCESS))
    assert ACCESS.url in said
    assert ACCESS.key in said
    # Open WebUI lists the models itself.
    assert (ACCESS.model in said) is (name != "openwebui")


def test_the_settings_of_opencode_are_json() -> None:
    config = json.loads(TOOLS["opencode"].environment(ACCESS)["OPENCODE_CONFIG_CONTENT"])
    assert config["provider"]["weft"]["options"] == {"baseURL": "http://box:8080/v1", "apiKey": "weft_k"}


def test_the_tools_are_listed_with_what_installs_them(tools: Path) -> None:
    del tools
    found: Any = json.loads(launch("-o", "json").stdout)
    assert {each["tool"]: each["installed"] for each in found["items"]} == {name: name == "aider" for name in TOOLS}
    assert all(each["install"] for each in found["items"])


def test_a_tool_that_is_not_installed_is_refused_with_its_install_line(tools: Path, home: Path) -> None:
    del tools
    said = launch("codex", "--model", "m", home=home)
    assert said.exit_code == 3
    assert "npm install -g @openai/codex" in said.stderr


def test_an_unknown_tool_is_answered_with_those_that_there_are(tools: Path) -> None:
    del tools
    said = launch("emacs")
    assert said.exit_code == 2
    assert all(name in said.stderr for name in TOOLS)


def test_without_a_mesh_nothing_is_started(tools: Path, tmp_path: Path) -> None:
    del tools
    said = launch("aider", "--model", "m", home=tmp_path / "none")
    assert said.exit_code != 0
    assert "weft up" in said.stderr


def test_print_shows_lines_for_a_shell_and_starts_nothing(tools: Path, home: Path) -> None:
    del tools
    said = launch("claude", "--print", "--model", "m x", "--key", "k'", "--", "--continue", home=home).stdout
    assert "export ANTHROPIC_BASE_URL=http://127.0.0.1:7\n" in said
    assert "export NODE_EXTRA_CA_CERTS=/ca.pem\n" in said
    assert shlex.split("export ANTHROPIC_AUTH_TOKEN='k'\"'\"''") == shlex.split(
        next(line for line in said.splitlines() if "AUTH_TOKEN" in line)
    )
    assert said.endswith("# claude --model 'm x' --continue\n")


def test_where_callers_need_no_key_none_is_made(tools: Path, home: Path) -> None:
    del tools
    assert "export OPENAI_API_KEY=local\n" in launch("aider", "--print", "--model", "m", home=home).stdout


def _printed_key(home: Path) -> str:
    said = launch("aider", "--print", "--model", "m", home=home)
    assert said.exit_code == 0, said.stderr
    return next(line for line in said.stdout.splitlines() if "OPENAI_API_KEY" in line).partition("=")[2]


def test_a_launch_uses_the_key_of_the_one_before_until_it_is_revoked_or_about_to_expire(
    tools: Path, tmp_path: Path
) -> None:
    del tools
    with scripted_mesh(tmp_path / "scripted") as mesh:
        facts = mesh.home / "run" / "up.json"
        facts.write_text(json.dumps(json.loads(facts.read_text()) | {"url": "http://127.0.0.1:7", "asksForKeys": True}))
        first = _printed_key(mesh.home)
        assert (mesh.home / "launch-keys" / "aider").stat().st_mode & 0o777 == 0o600
        assert _printed_key(mesh.home) == first
        assert len(mesh.keys) == 1
        mesh.keys[0].expire_time.FromDatetime(datetime.now(UTC) + timedelta(hours=23))
        second = _printed_key(mesh.home)
        mesh.keys[1].revoke_time.GetCurrentTime()
        third = _printed_key(mesh.home)
    assert len({first, second, third}) == 3


def test_without_a_model_the_only_one_is_meant_and_of_several_one_must_be_said(tools: Path, tmp_path: Path) -> None:
    del tools
    with scripted_mesh(tmp_path / "scripted") as mesh:
        mesh.add(Model(manifest=ModelManifest(name="only"), runner="r1"))
        assert "# aider --model openai/only\n" in launch("aider", "--print", home=mesh.home).stdout
        mesh.add(Model(manifest=ModelManifest(name="other"), runner="r1"))
        said = launch("aider", "--print", home=mesh.home)
    assert said.exit_code == 2
    assert "there are only, other" in said.stderr


def test_the_settings_of_programs_need_the_standard_library_alone() -> None:
    """Checks of clients read them in environments without weft."""
    tree = ast.parse(Path(launch_tools.__file__).read_text())
    imported = {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
