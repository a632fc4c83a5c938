"""What the shell is offered after a Tab: live names, and silence where there is no mesh."""

import os
import subprocess
from pathlib import Path

import pytest
from cli_harness import ScriptedMesh
from kit.warm_python import warm

pytestmark = pytest.mark.slow("starts the command line")

pytest_plugins = ("cli_mesh",)
RESOURCES = ["models", "agents", "runners", "pools", "routes", "aliases", "workflows", "tenants", "trials"]


def _offered(home: Path, line: str) -> list[str]:
    """What bash would be offered for `line`, whose last word is being typed."""
    words = line.split(" ")
    done = subprocess.run(
        [*warm("kit.patient_weft")],
        env={
            **os.environ,
            "WEFT_HOME": str(home),
            "_WEFT_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("weft get ", [*RESOURCES, "clients", "requests", "tasks", "leases", "routers", "all"]),
        ("weft mesh wait ", [*RESOURCES, "tasks"]),
        ("weft describe ta", ["tasks"]),
        ("weft delete task ", []),
        ("weft cancel ", ["requests", "tasks", "batches", "operations"]),
        ("weft cancel tasks ", []),
        ("weft batch r", ["results"]),
        ("weft get req", ["requests"]),
        ("weft get requests ", []),
        ("weft get mo", ["models"]),
        ("weft logs ", ["gateway", "mesh", "qwen", "qwen-2", "registry", "router", "solo"]),
        ("weft logs task/a ", []),
        ("weft get model ", ["qwen", "qwen-2", "solo"]),
        ("weft get models s", ["solo"]),
        ("weft describe agent/", ["agent/coder"]),
        ("weft delete runner ", ["r1"]),
        ("weft mesh wait pool b", ["big"]),
        ("weft events model so", ["solo"]),
        ("weft chat ", ["big", "coder", "qwen", "qwen-2", "solo"]),
        ("weft chat agent/", ["agent/coder"]),
        ("weft run qw", ["qwen", "qwen-2"]),
        ("weft chat route/", ["route/summaries"]),
        ("weft get route ", ["summaries"]),
        ("weft get widgets x", []),
        ("weft get qw", ["qwen", "qwen-2"]),
        ("weft describe r1", ["r1"]),
        ("weft load --ctx 8192 qw", ["qwen", "qwen-2"]),
        ("weft delete --force model qw", ["qwen", "qwen-2"]),
        ("weft mesh wait --timeout 5m pool b", ["big"]),
    ],
)
def test_kinds_and_current_names_are_completed(mesh: ScriptedMesh, line: str, offered: list[str]) -> None:
    mesh.serve()
    assert _offered(mesh.home, line) == offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [("weft app", ["apply"]), *((line, []) for line in ("weft get model ", "weft chat ", "weft describe agent/"))],
)
def test_commands_are_completed_and_names_silently_not_without_a_mesh(
    tmp_path: Path, line: str, offered: list[str]
) -> None:
    assert _offered(tmp_path / "none", line) == offered


def test_completion_is_silent_after_the_mesh_was_killed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "up.json").write_text('{"grpc": "127.0.0.1:1"}')
    assert _offered(tmp_path, "weft get model ") == []
