"""Routes on the command line, and `weft config`."""

import json
import re
from pathlib import Path

import pytest
from cli_harness import ScriptedMesh
from cli_samples import some_route
from kit.resources import gone, put

from weft.api.registry.v1 import route_pb2
from weft.documents.resources import declared_document

pytest_plugins = ("cli_mesh",)

ROUTE = "kind: Route\nname: fast\ncandidates: [qwen, solo]\nkeepAlive: 5m\n"


def test_describe_route_shows_its_candidates(mesh: ScriptedMesh) -> None:
    text = mesh.run("describe", "route", "summaries").stdout
    for line in ("Candidates: qwen, big", "Budget seconds: 60 s", "Keep alive: 300", "Description: Short ones"):
        assert line in re.sub(" +", " ", text), text
    assert "Ready  True    Active  a candidate is active" in text


def test_only_get_lists_requests_and_clients_in_its_help(mesh: ScriptedMesh) -> None:
    assert "requests" in mesh.run("get", "--help").stdout
    for command in (("mesh", "wait"), ("describe",)):
        assert "requests and" not in mesh.run(*command, "--help").stdout
    assert mesh.run("mesh", "wait", "requests", "x").exit_code == 2


def test_wide_routes_show_keep_alive_and_pinned_primary(mesh: ScriptedMesh) -> None:
    header, row = mesh.run("get", "routes", "-o", "wide").stdout.splitlines()
    assert header.split() == ["NAME", "STATUS", "CANDIDATES", "BUDGET", "KEEP", "PINNED", "ID", "AGE", "DESCRIPTION"]
    assert row.split()[:6] == ["summaries", "active", "qwen,big", "60s", "300s", "yes"]


def test_route_is_applied_changed_and_deleted(mesh: ScriptedMesh) -> None:
    assert mesh.run("apply", "-f", "-", stdin=ROUTE).stdout == "route/fast created\n"
    declared = declared_document(mesh.applied[-1].declarations[0]).declared
    assert (list(declared.candidates), declared.keep_alive.ToSeconds()) == (["qwen", "solo"], 300)
    assert mesh.run("apply", "-f", "-", stdin=ROUTE).stdout == "route/fast unchanged\n"
    changed = ROUTE.replace("5m", "-1")
    diff = mesh.run("config", "diff", "-f", "-", stdin=changed)
    assert diff.exit_code == 1
    assert "-keepAlive: 300\n+keepAlive: -1\n" in diff.stdout
    assert mesh.run("apply", "-f", "-", stdin=changed).stdout == "route/fast configured\n"
    assert "keepAlive: -1\n" in mesh.run("get", "route", "fast", "-o", "yaml").stdout
    assert mesh.run("delete", "route", "fast").stdout == "route/fast deleted\n"
    assert mesh.run("get", "route/fast").exit_code == 3


def test_routes_are_deleted_before_the_models_they_reference(mesh: ScriptedMesh, tmp_path: Path) -> None:
    mesh.run("delete", "agent", "coder")
    file = tmp_path / "all.yaml"
    file.write_text("kind: model\nname: qwen\n---\nkind: route\nname: summaries\ncandidates: [qwen]\n")
    assert mesh.run("delete", "-f", str(file)).stdout == "route/summaries deleted\nmodel/qwen deleted\n"


def test_invalid_route_error_names_position_and_field(mesh: ScriptedMesh) -> None:
    refused = mesh.run("apply", "-f", "-", stdin=ROUTE.replace("5m", "soon"))
    assert refused.exit_code == 2
    assert "document 1 (line 4): keepAlive: must be seconds such as 300" in refused.stderr
    assert mesh.applied == []


def test_wait_for_a_route_ends_when_it_is_ready(mesh: ScriptedMesh) -> None:
    asleep = some_route("slow")
    asleep.status = route_pb2.Route.STATUS_INACTIVE
    mesh.add(asleep)
    mesh.changes.put(put(some_route("slow")))
    waited = mesh.run("mesh", "wait", "route", "slow", "--for", "status=active", "--timeout", "20s")
    assert (waited.exit_code, waited.stdout) == (0, "route/slow: status=active\n")
    late = mesh.run("mesh", "wait", "route/gone", "--timeout", "0")
    assert late.exit_code == 5
    assert mesh.run("mesh", "wait", "route/slow", "--for", "condition=Awake").exit_code == 2


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
    assert table[1].split(maxsplit=2) == [
        "allowCloudFallback",
        "true",
        "routes may fall back to remote models",
    ]
    assert json.loads(mesh.run("config", "get", "-o", "json").stdout) == {"allowCloudFallback": True}
    changed = mesh.run("config", "set", "allowCloudFallback=false", "-o", "json")
    assert json.loads(changed.stdout) == {"allowCloudFallback": False}
    assert not mesh.settings.allow_cloud_fallback
    assert mesh.run("config", "get", "-o", "yaml").stdout == "allowCloudFallback: false\n"
    assert mesh.run("config", "set", "allowCloudFallback=ON").exit_code == 0
    assert mesh.settings.allow_cloud_fallback


def test_mesh_journal_setting_is_shown_and_set(mesh: ScriptedMesh) -> None:
    assert mesh.run("config", "get").stdout.splitlines()[2].split(maxsplit=2)[:2] == ["journal", "none"]
    changed = mesh.run("config", "set", "journal=keep", "-o", "json")
    assert json.loads(changed.stdout) == {"allowCloudFallback": True, "journal": "keep"}
    assert mesh.settings.allow_cloud_fallback
    mesh.run("config", "set", "journal=NONE")
    assert json.loads(mesh.run("config", "get", "-o", "json").stdout)["journal"] == "none"


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
