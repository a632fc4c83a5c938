"""`weft launch`: programs get the mesh's address, a key and a model, and no file of theirs is written."""

import ast
import json
import re
import shlex
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cli_harness import scripted_mesh
from cli_samples import some_model, some_runner
from typer.testing import CliRunner, Result
from typing_extensions import override

from weft.api.registry.v1.model_pb2 import MODEL_SKILL_TOOLS, Model, ModelAbilities, ModelManifest
from weft.api.registry.v1.runner_pb2 import Capability, InstanceState
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
    for name in ("WEFT_API_KEY", "WEFT_URL", "WEFT_REGISTRY", "WEFT_ROUTER", "WEFT_CA_FILE"):
        monkeypatch.delenv(name, raising=False)
    return folder


def launch(*arguments: str, home: Path | None = None, **environment: str) -> Result:
    given = {"WEFT_HOME": str(home), **environment} if home else environment
    return CliRunner().invoke(app, ("launch", *arguments), env=given)


@contextmanager
def gateway(*, asks_for_keys: bool, models: Sequence[str] = ()) -> Iterator[str]:
    """Yields the base URL of an HTTP API elsewhere, which takes the key weft_k where it asks for one."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_refused = asks_for_keys and self.headers["authorization"] != "Bearer weft_k"
            self.send_response(401 if is_refused else 200)
            self.end_headers()
            known = self.path.removeprefix("/v1/models/") in models
            found = {"meta": {"context_tokens": 8192 if known else None}, "data": [{"id": name} for name in models]}
            self.wfile.write(json.dumps(found).encode())

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of a mesh that runs."""
    run = tmp_path / "home" / "run"
    run.mkdir(parents=True)
    (run / "up.json").write_text(json.dumps({"url": "https://127.0.0.1:7", "caFile": "/ca.pem", "asksForKeys": False}))
    return tmp_path / "home"


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_receives_url_key_and_model(name: str) -> None:
    tool = TOOLS[name]
    said = json.dumps(dict(tool.environment(ACCESS))) + shlex.join(tool.arguments(ACCESS))
    assert ACCESS.url in said
    assert ACCESS.key in said
    # Open WebUI lists the models itself.
    assert (ACCESS.model in said) is (name != "openwebui")


def test_coding_agents_are_told_the_context_window_of_the_model() -> None:
    access = replace(ACCESS, context_tokens=16_384)
    assert TOOLS["claude"].environment(access)["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "16384"
    codex = TOOLS["codex"].arguments(access)
    assert {"model_context_window=16384", "model_auto_compact_token_limit=13107"} <= set(codex)
    config = json.loads(TOOLS["opencode"].environment(access)["OPENCODE_CONFIG_CONTENT"])
    model = config["provider"]["weft"]["models"]["route/coding"]
    assert model["limit"] == {"context": 16_384, "output": 4_096}
    for name in ("claude", "codex", "opencode"):
        said = json.dumps(dict(TOOLS[name].environment(ACCESS))) + shlex.join(TOOLS[name].arguments(ACCESS))
        assert not re.findall("CONTEXT_TOKENS|context_window|limit", said)


def test_context_window_is_that_of_the_gateway_and_left_out_if_unknown(tools: Path, home: Path) -> None:
    del tools
    with gateway(asks_for_keys=False, models=["m"]) as url:
        known = launch("claude", "--print", "--model", "m", home=home, WEFT_URL=url)
        unknown = launch("claude", "--print", "--model", "other", home=home, WEFT_URL=url)
    assert "export CLAUDE_CODE_MAX_CONTEXT_TOKENS=8192" in known.stdout
    assert (unknown.exit_code, "MAX_CONTEXT_TOKENS" in unknown.stdout) == (0, False)


def test_tools_are_listed_with_their_install_commands(tools: Path) -> None:
    del tools
    found: Any = json.loads(launch("-o", "json").stdout)
    assert {each["tool"]: each["installed"] for each in found["items"]} == {name: name == "aider" for name in TOOLS}
    assert all(each["install"] for each in found["items"])


def test_missing_tool_is_rejected_with_its_install_command(tools: Path, home: Path) -> None:
    del tools
    said = launch("codex", "--model", "m", home=home)
    assert said.exit_code == 3
    assert "npm install -g @openai/codex" in said.stderr


def test_unknown_tool_error_lists_the_supported_ones(tools: Path) -> None:
    del tools
    said = launch("emacs")
    assert said.exit_code == 2
    assert all(name in said.stderr for name in TOOLS)


def test_print_shows_shell_lines_and_starts_nothing(tools: Path, home: Path) -> None:
    del tools
    said = launch("claude", "--print", "--model", "m x", "--key", "k'", "--", "--continue", home=home).stdout
    assert "export ANTHROPIC_BASE_URL=https://127.0.0.1:7\n" in said
    assert "export NODE_EXTRA_CA_CERTS=/ca.pem\n" in said
    assert "export CLAUDE_CODE_ATTRIBUTION_HEADER=0\n" in said, "its billing header changes with each request"
    assert shlex.split("export ANTHROPIC_AUTH_TOKEN='k'\"'\"''") == shlex.split(
        next(line for line in said.splitlines() if "AUTH_TOKEN" in line)
    )
    assert said.endswith("# claude --model 'm x' --continue\n")


def test_key_is_not_created_if_auth_is_disabled(tools: Path, home: Path) -> None:
    del tools
    assert "export OPENAI_API_KEY=local\n" in launch("aider", "--print", "--model", "m", home=home).stdout


def _printed_key(home: Path) -> str:
    said = launch("aider", "--print", "--model", "m", home=home)
    assert said.exit_code == 0, said.stderr
    return next(line for line in said.stdout.splitlines() if "OPENAI_API_KEY" in line).partition("=")[2]


def test_launch_reuses_the_previous_key_until_it_is_revoked_or_expires_soon(tools: Path, tmp_path: Path) -> None:
    del tools
    with scripted_mesh(tmp_path / "scripted") as mesh:
        mesh.serve()
        facts = mesh.home / "run" / "up.json"
        facts.write_text(json.dumps(json.loads(facts.read_text()) | {"asksForKeys": True}))
        first = _printed_key(mesh.home)
        assert (mesh.home / "launch-keys" / "aider").stat().st_mode & 0o777 == 0o600
        assert _printed_key(mesh.home) == first
        assert len(mesh.keys) == 1
        mesh.keys[0].expire_time.FromDatetime(datetime.now(UTC) + timedelta(hours=23))
        second = _printed_key(mesh.home)
        mesh.keys[1].revoke_time.GetCurrentTime()
        third = _printed_key(mesh.home)
    assert len({first, second, third}) == 3


def test_remote_mesh_from_the_environment_is_checked_for_required_keys(tools: Path, tmp_path: Path, home: Path) -> None:
    del tools
    words = ("aider", "--print", "--model", "m")
    for where in (tmp_path / "none", home):
        with gateway(asks_for_keys=False) as url:
            said = launch(*words, home=where, WEFT_URL=f"{url}/").stdout
            assert f"export OPENAI_API_BASE={url}/v1\n" in said
            assert "export OPENAI_API_KEY=local\n" in said
            assert "CA" not in said
        with gateway(asks_for_keys=True) as url:
            assert (
                "export OPENAI_API_KEY=weft_k\n" in launch(*words, "--key", "weft_k", home=where, WEFT_URL=url).stdout
            )
            # No key is made for another mesh.
            refused = launch(*words, home=where, WEFT_URL=url)
            assert refused.exit_code == 2
            assert "WEFT_API_KEY" in refused.stderr
        away = launch(*words, home=where, WEFT_URL=url)
        assert away.exit_code == 1
        assert f"the mesh at {url} does not answer" in away.stderr


def test_url_that_is_no_gateway_is_reported(tools: Path, home: Path) -> None:
    del tools
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"SSH-2.0\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        said = launch("aider", "--print", "--model", "m", home=home, WEFT_URL=url)
        thread.join()
    assert (said.exit_code, said.stderr.startswith(f"weft: the mesh at {url} does not answer: SSH-2.0")) == (1, True)


def test_only_model_of_a_remote_mesh_is_the_default(tools: Path, home: Path) -> None:
    del tools
    words = ("aider", "--print", "--key", "weft_k")
    with gateway(asks_for_keys=True, models=["qwen", "agent/reviewer", "route/coding"]) as url:
        assert "# aider --model openai/qwen\n" in launch(*words, home=home, WEFT_URL=url).stdout
        assert (
            "does not accept "
            "this key" in launch("aider", "--print", "--key", "weft_other", home=home, WEFT_URL=url).stderr
        )
    with gateway(asks_for_keys=False, models=["qwen", "gemma"]) as url:
        assert "there are qwen, gemma" in launch(*words, home=home, WEFT_URL=url).stderr


def test_separately_served_gateway_is_found_by_its_home(tools: Path, tmp_path: Path) -> None:
    del tools
    (tmp_path / "run").mkdir()
    with gateway(asks_for_keys=False) as url:
        (tmp_path / "run" / "gateway.address").write_text(url)
        assert f"export OPENAI_API_BASE={url}/v1\n" in launch("aider", "--print", "--model", "m", home=tmp_path).stdout


def test_only_model_is_the_default_and_several_need_the_option(tools: Path, tmp_path: Path) -> None:
    del tools
    with scripted_mesh(tmp_path / "scripted") as mesh:
        mesh.serve()
        mesh.add(Model(manifest=ModelManifest(name="only"), runner="r1"))
        assert "# aider --model openai/only\n" in launch("aider", "--print", home=mesh.home).stdout
        mesh.add(Model(manifest=ModelManifest(name="other"), runner="r1"))
        said = launch("aider", "--print", home=mesh.home)
    assert said.exit_code == 2
    assert "there are only, other" in said.stderr


def test_a_model_that_calls_no_tools_is_refused_for_an_agent_with_those_that_do(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tools / "aider").rename(tools / "claude")
    monkeypatch.setattr("os.execve", lambda *_: pytest.fail("it was started"))
    with scripted_mesh(tmp_path / "scripted") as mesh:
        demo = InstanceState(model="demo", abilities=ModelAbilities(lacking=[MODEL_SKILL_TOOLS]))
        qwen = InstanceState(model="qwen", abilities=ModelAbilities(skills=[MODEL_SKILL_TOOLS]))
        mesh.add(*(some_model(each.model) for each in (demo, qwen)))
        runner = some_runner(mesh.home.name)
        runner.capability.CopyFrom(Capability(instances=[demo, qwen]))
        mesh.add(runner)
        mesh.serve()
        said = launch("claude", "--model", "demo", home=mesh.home)
    assert said.exit_code == 2
    assert "demo does not support tool calls, which Claude Code needs; these do: qwen" in said.stderr


def test_launch_tool_settings_import_only_the_standard_library() -> None:
    """Checks of clients read them in environments without weft."""
    tree = ast.parse(Path(launch_tools.__file__).read_text())
    imported = {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
