"""Routes on the command line, and `weft config`."""

import json
from pathlib import Path

import pytest
from cli_harness import ScriptedMesh
from kit.resource_samples import some_route
from kit.resources import gone, put

from weft.api.registry.v1.journal_pb2 import JOURNAL_MODE_NONE

pytest_plugins = ("cli_mesh",)


def test_wide_routes_show_keep_alive_and_pinned_primary(mesh: ScriptedMesh) -> None:
    row = mesh.run("get", "routes", "-o", "wide").stdout.splitlines()[1]
    assert row.split()[:6] == ["summaries", "active", "qwen,big", "90.5s", "300s", "yes"]


def test_routes_are_deleted_before_the_models_they_reference(mesh: ScriptedMesh, tmp_path: Path) -> None:
    mesh.run("delete", "agent", "coder")
    file = tmp_path / "all.yaml"
    file.write_text("kind: model\nname: qwen\n---\nkind: route\nname: summaries\ncandidates: [qwen]\n")
    assert mesh.run("delete", "-f", str(file)).stdout == "route/summaries deleted\nmodel/qwen deleted\n"


def test_route_watch_shows_each_changed_route(mesh: ScriptedMesh) -> None:
    mesh.changes.put(put(some_route("new")))
    mesh.changes.put(gone("route", "summaries"))
    mesh.changes.put(gone("route", "never-there"))
    lines = mesh.run("get", "routes", "-w").stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["summaries", "active"],
        ["new", "active"],
        ["summaries", "deleted"],
    ]


@pytest.mark.parametrize("name", ["summaries", "route/summaries"])
def test_chat_with_a_route_sends_it_as_the_model(mesh: ScriptedMesh, name: str) -> None:
    answered = mesh.run("chat", name, "-v", "-m", "hello")
    assert answered.exit_code == 0, answered.stderr
    assert mesh.asked[-1].model == "route/summaries"
    assert "Route: summaries → qwen, big" in answered.stderr


def test_chat_with_an_unknown_route_lists_the_existing_ones(mesh: ScriptedMesh) -> None:
    refused = mesh.run("chat", "route/nothing", "-m", "hello")
    assert refused.exit_code == 3
    assert "there is no route nothing; there is route/summaries" in refused.stderr


def test_mesh_settings_are_shown_and_set(mesh: ScriptedMesh) -> None:
    table = mesh.run("config", "get").stdout.splitlines()
    assert table[1].split(maxsplit=2) == ["allowCloudFallback", "true", "routes may fall back to remote models"]
    assert table[2].split(maxsplit=2)[:2] == ["journal", "none"]
    changed = mesh.run("config", "set", "allowCloudFallback=false", "-o", "json")
    assert json.loads(changed.stdout) == {"allowCloudFallback": False}
    assert mesh.run("config", "get", "-o", "yaml").stdout == "allowCloudFallback: false\n"
    changed = mesh.run("config", "set", "journal=keep", "allowCloudFallback=ON", "-o", "json")
    assert json.loads(changed.stdout) == {"allowCloudFallback": True, "journal": "keep"}
    mesh.run("config", "set", "journal=NONE")
    assert (mesh.settings.allow_cloud_fallback, mesh.settings.journal) == (True, JOURNAL_MODE_NONE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("journal=always",), "journal: must be none, wait, keep"),
        (("allowCloudFallback",), "has no '='"),
        (("allowCloudFallback=perhaps",), "allowCloudFallback: must be true or false"),
        (("allowCloudFallback=",), "allowCloudFallback: must be true or false"),
        (("cloud=true",), "cloud: unknown setting; the settings are allowCloudFallback"),
        (("=true",), "NAME: unknown setting"),
        (("allowCloudFallback=true", "allowCloudFallback=false"), "is given twice"),
    ],
)
def test_invalid_setting_changes_nothing(mesh: ScriptedMesh, arguments: tuple[str, ...], words: str) -> None:
    refused = mesh.run("config", "set", *arguments)
    assert refused.exit_code == 2
    assert words in refused.stderr
    assert mesh.settings.revision == 1
