"""`weft get`, `describe`, `events` and `ps` against a scripted mesh."""

import json
import platform
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from cli_harness import ScriptedMesh
from cli_samples import some_model, some_runner
from kit.resource_samples import some_agent, some_event, some_route
from kit.resources import gone, put
from typer.testing import CliRunner

from weft import __version__
from weft.api.registry.v1.registry_service_pb2 import Change, WatchedRunner
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import resource_id
from weft_app.cli import follow
from weft_app.cli.main import app
from weft_app.cli.mesh_api import connect

pytest_plugins = ("cli_mesh",)
MODELS = ["model/qwen", "model/qwen-2", "model/solo"]
"""They are two pages of a list."""


def test_accessible_kinds_are_shown_and_the_others_reported(mesh: ScriptedMesh) -> None:
    mesh.denies_routes = True
    found = mesh.run("get", "models,routes,agents")
    assert found.exit_code == 1
    assert ("model/qwen" in found.stdout, "agent/coder" in found.stdout) == (True, True)
    assert found.stderr == "weft: not shown: routes (the key may not see routes)\n"
    # Documents are whole.
    assert mesh.run("get", "models,routes", "-o", "json").stdout == ""
    assert mesh.run("get", "routes").stderr == "weft: the key may not see routes\n"


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (("model/qwen", "agent/coder"), ["model/qwen", "agent/coder"]),
        (("agent/coder", "model/solo", "model/qwen"), ["agent/coder", "model/solo", "model/qwen"]),
        (("routes,agents",), ["route/summaries", "agent/coder"]),
        (("solo", "coder"), ["model/solo", "agent/coder"]),
        (("all",), [*MODELS, "agent/coder", "runner/r1", "pool/big", "pool/solo", "route/summaries"]),
    ],
)
def test_several_kinds_are_shown_each_with_its_own_table(
    mesh: ScriptedMesh, words: tuple[str, ...], labels: list[str]
) -> None:
    tables = mesh.run("get", *words).stdout.split("\n\n")
    assert [line.split()[0] for table in tables for line in table.splitlines()[1:]] == labels
    assert all(table.startswith("NAME ") for table in tables)
    assert len(tables) == len({label.split("/")[0] for label in labels})
    listed = json.loads(mesh.run("get", *words, "-o", "json").stdout)
    assert (listed["kind"], [f"{item['kind']}/{item['name']}" for item in listed["items"]]) == ("List", labels)
    assert mesh.run("get", *words, "-o", "name").stdout.split() == labels


def test_bare_name_finds_the_only_resource_with_it(mesh: ScriptedMesh) -> None:
    assert mesh.run("get", "r1").stdout == mesh.run("get", "runner", "r1").stdout
    assert mesh.run("describe", "coder").stdout == mesh.run("describe", "agent", "coder").stdout
    assert mesh.run("get", "solo", "-o", "name").stdout == "model/solo\n", "the pool of one model is that model"


@pytest.mark.parametrize("command", ["get", "describe"])
def test_name_of_several_kinds_returns_all_of_them(mesh: ScriptedMesh, command: str) -> None:
    mesh.add(some_agent("qwen"), some_agent("big"))
    asked = mesh.run(command, "qwen")
    assert (asked.exit_code, asked.stdout) == (2, "")
    assert "NAME: qwen is the name of a model and an agent; write model/qwen or agent/qwen" in asked.stderr
    assert "big is the name of an agent and a pool" in mesh.run(command, "big").stderr


def test_all_kinds_with_a_selector_lists_only_kinds_with_labels(mesh: ScriptedMesh) -> None:
    assert mesh.run("get", "all", "-l", "team=a", "-o", "name").stdout.split() == MODELS
    assert "nothing matches these labels" in mesh.run("get", "all", "-l", "team=none").stderr


def test_empty_table_suggests_how_to_add_an_entry(mesh: ScriptedMesh) -> None:
    mesh.state.declared[ResourceKind.AGENT].clear()
    empty = mesh.run("get", "agents")
    assert (empty.exit_code, len(empty.stdout.splitlines())) == (0, 1)
    assert "there are no agents; weft apply -f FILE declares them" in empty.stderr
    assert mesh.run("get", "agents", "-o", "json").stderr == ""
    assert "no models match the labels team=none" in mesh.run("get", "models", "-l", "team=none").stderr


def test_watch_of_several_kinds_uses_the_columns_of_each(mesh: ScriptedMesh) -> None:
    mesh.state.declared[ResourceKind.ROUTE].clear()
    changes = [gone("agent", "coder"), put(some_model("solo", pool="", status="HIBERNATING"))]
    _, lines = _watch(mesh, "all", changes=[*changes, put(some_route())])
    titles = [line.split()[1] for line in lines if line.startswith("NAME")]
    assert titles == ["POOL", "SOURCE", "STATUS", "MEMBERS", "STATUS"]
    deleted, *slept = lines[-5:-2]
    assert deleted.split()[:3] == ["agent/coder", "-", "deleted"]
    assert sorted(line.split()[0] for line in slept) == ["model/solo", "pool/solo"]
    assert [line.split()[0] for line in lines[-2:]] == ["NAME", "route/summaries"]


def test_wide_models_show_file_key_and_provider(mesh: ScriptedMesh) -> None:
    central = some_model("frontier", pool="")
    central.manifest.provider.url = "https://api.example.com/v1"
    central.manifest.provider.api_key_ref = "secret/example-key"
    central.manifest.provider.upstream_model = "big-1"
    mesh.add(central)
    header, first, second = mesh.run("get", "models", "frontier", "qwen", "-o", "wide").stdout.splitlines()
    for title, text in (("MODEL", "big-1"), ("KEY", "secret/example-key")):
        assert first[header.index(f" {title} ") + 1 :].startswith(text)
    for title, text in (
        ("MODEL", "qwen.gguf"),
        ("KEY", "-"),
        ("OWNER", "ann"),
        ("LABELS", "team=a,zone=x"),
        ("ID", "model-"),
    ):
        assert second[header.index(f" {title} ") + 1 :].startswith(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ("get", "model", "{}", "-o", "name"),
        ("get", "model/{}", "-o", "json"),
        ("get", "models", "{}", "-o", "wide"),
        ("describe", "model", "{}"),
        ("events", "model", "qwen"),
        ("mesh", "wait", "model", "{}", "--for", "exists"),
    ],
)
def test_commands_accept_a_model_id_instead_of_its_name(mesh: ScriptedMesh, arguments: tuple[str, ...]) -> None:
    by_id = mesh.run(*(word.format(resource_id("model", "qwen", 0)) for word in arguments))
    by_name = mesh.run(*(word.format("qwen") for word in arguments))
    assert (by_id.exit_code, by_name.exit_code) == (0, 0), by_id.output
    if arguments[:2] != ("mesh", "wait"):
        assert by_id.stdout == by_name.stdout


def test_watch_of_an_id_follows_the_name(mesh: ScriptedMesh) -> None:
    mesh.changes.put(gone("model", "qwen"))
    result = mesh.run("get", "model", resource_id("model", "qwen", 0), "-w", "-o", "name")
    assert result.stdout.split() == ["model/qwen", "model/qwen"], result.output


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("models", "-l", "tier=heavy"), ["model/heavy"]),
        (("models", "--selector", "team=a,tier!=heavy"), MODELS),
        (("model", "qwen", "heavy", "-l", "tier=heavy"), ["model/heavy"]),
        (("agents", "-l", "tier=heavy"), []),
        (("agents", "-l", "!tier"), ["agent/coder"]),
    ],
)
def test_selector_filters_by_labels(mesh: ScriptedMesh, arguments: tuple[str, ...], names: list[str]) -> None:
    heavy = some_model("heavy")
    heavy.manifest.tags.tier = "heavy"
    mesh.add(heavy)
    assert mesh.run("get", *arguments, "-o", "name").stdout.split() == names


@pytest.mark.parametrize("arguments", [("runners", "-l", "a=b"), ("tasks", "-l", "a=b"), ("models", "-l", "a=b c")])
def test_selector_unsupported_by_the_listed_kind_is_rejected(mesh: ScriptedMesh, arguments: tuple[str, ...]) -> None:
    result = mesh.run("get", *arguments)
    assert result.exit_code == 2
    assert "--selector" in result.stderr


def test_foreign_text_is_stripped_of_terminal_escapes(mesh: ScriptedMesh) -> None:
    mesh.add(some_agent("evil", "\x1b]0;owned\x07[bold]\nagent/fake"))
    out = mesh.run("get", "agents").stdout
    assert "\x1b" not in out
    assert len(out.splitlines()) == 3
    assert "[bold]" in out, "markup is text"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("get", "widgets"), 3, "there is no resource widgets; there are big"),
        (("get", "profiles"), 3, "profiles were removed; use: weft apply -f FILE"),
        (("get", "profile", "night"), 3, "profiles were removed; use: weft apply -f FILE"),
        (("get", "profile/night"), 3, "profiles were removed; use: weft apply -f FILE"),
        (("get", "pods"), 3, "pods is not a kind either; the kinds are models, agents, runners, "),
        (("describe", "codre"), 3, "did you mean coder"),
        (("get", "model", "qwem"), 3, "did you mean qwen"),
        (("get", "agent", "zzz"), 3, "there is coder"),
        (("get", "model", "../x"), 2, "NAME"),
        (("get", "model/qwen", "solo"), 2, "KIND/NAME"),
        (("get",), 2, "KIND"),
        (("get", "models", "-o", "xml"), 2, "xml"),
        (("describe", "model"), 2, "one resource"),
        (("describe", "pool", "bug"), 3, "did you mean big"),
        (("events", "agent", "a", "b"), 2, "one resource"),
        (("events", "model", "qwem"), 3, "there is no model qwem; did you mean qwen"),
        (("alias",), 2, "there is no command alias; use: weft get aliases"),
    ],
)
def test_invalid_arguments_suggest_a_fix(mesh: ScriptedMesh, arguments: tuple[str, ...], code: int, words: str) -> None:
    result = mesh.run(*arguments)
    assert result.exit_code == code, result.output
    assert words in result.output


def test_missing_mesh_suggests_the_next_step(tmp_path: Path) -> None:
    for arguments in (("get", "models"), ("apply", "-f", "-"), ("mesh", "wait", "model/x"), ("events",), ("ps",)):
        result = CliRunner().invoke(
            app, arguments, input="kind: model\nname: m\n", env={"WEFT_HOME": str(tmp_path / "none")}
        )
        assert result.exit_code == 1
        assert "weft up" in result.output


def test_killed_mesh_is_reported_as_not_running() -> None:
    """Its sockets and the file of its address are left."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run.mkdir()
        (run / "up.json").write_text(json.dumps({"grpc": f"unix:{run}/weft.sock"}))
        for name in ("http.sock", "weft.sock", "registry.sock"):
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(run / name))
                listener.listen()
        for words in (["get", "models"], ["ps"], ["get", "requests"], ["chat", "qwen", "hi"]):
            result = CliRunner().invoke(app, words, env={"WEFT_HOME": folder})
            assert result.exit_code == 1
            assert f"weft is not running (home {folder}); start it with `weft up`" in result.output


def test_vanished_mesh_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "up.json").write_text('{"grpc": "127.0.0.1:1", "url": "http://127.0.0.1:1"}')
    result = CliRunner().invoke(app, ["get", "models"], env={"WEFT_HOME": str(tmp_path)})
    assert result.exit_code == 1
    assert "does not answer" in result.output


def _watch(mesh: ScriptedMesh, *arguments: str, changes: list[Any]) -> tuple[int, list[str]]:
    for change in changes:
        mesh.changes.put(change)
    result = mesh.run("get", *arguments, "-w")
    return result.exit_code, result.stdout.splitlines()


def test_watch_shows_the_table_then_each_changed_row(mesh: ScriptedMesh) -> None:
    heartbeat = some_model("solo", pool="")
    heartbeat.last_heartbeat_time.GetCurrentTime()
    changes = [
        put(heartbeat),
        put(some_model("qwen", status="HIBERNATING")),
        put(some_agent("other")),
        gone("model", "qwen-2"),
    ]
    code, lines = _watch(mesh, "models", changes=changes)
    assert code == 0
    assert [line.split()[0] for line in lines] == ["NAME", "qwen", "qwen-2", "solo", "qwen", "qwen-2"]
    assert "hibernating" in lines[4]
    assert "deleted" in lines[5]
    assert lines[4].index("hibernating") == lines[0].index("STATUS")


def test_watch_in_json_prints_one_document_per_line(mesh: ScriptedMesh) -> None:
    heartbeat = some_agent()
    heartbeat.last_heartbeat_time.GetCurrentTime()
    changes = [put(heartbeat), put(some_agent(description="Changed")), gone("agent", "coder")]
    _, lines = _watch(mesh, "agent", "coder", "-o", "json", changes=changes)
    first, changed, deleted = map(json.loads, lines)
    assert (first["description"], changed["description"]) == ("Writes code", "Changed")
    assert deleted == {"kind": "agent", "name": "coder", "deleted": True}


def test_watch_of_pools_follows_their_members(mesh: ScriptedMesh) -> None:
    _, lines = _watch(mesh, "pools", changes=[put(some_model("qwen", status="INACTIVE"))])
    assert lines[-1].split() == ["big", "2", "1", "yes"]


@pytest.mark.parametrize(("reason", "watches"), [(Reason.SERVICE_UNAVAILABLE, 1), (Reason.SHUTTING_DOWN, 2)])
def test_watch_survives_a_brief_registry_or_gateway_outage(
    mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch, reason: Reason, watches: int
) -> None:
    monkeypatch.setattr(follow, "RETRY_PAUSE_SECONDS", 0.0)
    mesh.changes.put(WeftError(reason, "going down"))
    mesh.changes.put(gone("model", "solo"))
    result = mesh.run("get", "models", "-w", "-o", "name")
    assert mesh.watches == watches
    assert "the watch resumes when it is back" in result.stderr
    assert result.stdout.splitlines()[-1] == "model/solo"


def test_watch_fails_if_the_registry_does_not_return(mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(follow, "RETRY_LIMIT_SECONDS", -1.0)
    mesh.changes.put(WeftError(Reason.SERVICE_UNAVAILABLE, "going down"))
    assert mesh.run("get", "models", "-w").exit_code == 1
    assert mesh.watches == 1


def test_restarted_registry_restarts_event_numbering(mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_PAUSE_SECONDS", 0.0)
    mesh.new_events = [some_event(3), WeftError(Reason.SERVICE_UNAVAILABLE, "going down")]
    mesh.reborn = [some_event(1, "reborn")]
    lines = mesh.run("events", "-w", "-o", "json").stdout.splitlines()
    assert [json.loads(line)["sequence"] for line in lines] == [1, 2, 3, 1]


def test_events_of_one_resource_continue_after_the_registry_restarted_without_any(
    mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "RETRY_PAUSE_SECONDS", 0.0)
    away = WeftError(Reason.SERVICE_UNAVAILABLE, "going down")
    mesh.new_events = [some_event(3), away, some_event(2)]
    mesh.reborn = [some_event(1, "solo")]
    lines = mesh.run("events", "model", "qwen", "-w", "-o", "json").stdout.splitlines()
    assert [json.loads(line)["sequence"] for line in lines][-2:] == [3, 2]


def test_watch_of_a_missing_resource_is_rejected(mesh: ScriptedMesh) -> None:
    assert mesh.run("get", "model", "nix", "-w").exit_code == 3


def test_describe_model_shows_conditions_process_and_events(mesh: ScriptedMesh) -> None:
    out = mesh.run("describe", "model", "qwen").stdout
    assert "Pool name:" in out
    assert "Ready" in out
    assert "TakesRequests" in out
    assert "4711" in out
    assert "Last restart reason: it died" in out
    assert "asked for r1" in out, "a relayed runner is asked by its name"
    assert "\x1b" not in out
    assert "it woke up" in out
    assert not [line for line in out.splitlines() if line.rstrip().endswith(("Voices:", "Base model:", "Journal:"))]


def test_describe_hides_wake_recipes(mesh: ScriptedMesh) -> None:
    """Its headers may hold secrets."""
    model = some_model()
    model.manifest.wake.by_mesh.http.url = "http://box/wake"
    model.manifest.wake.by_mesh.http.headers["authorization"] = "Bearer hidden"
    mesh.add(model)
    out = mesh.run("describe", "model", "qwen").stdout
    assert ("mesh:http" in out, "hidden" in out) == (True, False)


def test_unreachable_runner_does_not_fail_describe(mesh: ScriptedMesh) -> None:
    mesh.state.runners["r1"].address = "127.0.0.1:1"
    out = mesh.run("describe", "model", "qwen").stdout
    assert "its runner cannot be reached" in out
    assert "Conditions:" in out


def test_followed_events_have_no_duplicates(mesh: ScriptedMesh) -> None:
    mesh.new_events = [some_event(2, "solo"), some_event(3, "new")]
    result = mesh.run("events", "-w", "-o", "json")
    assert [json.loads(line)["sequence"] for line in result.stdout.splitlines()] == [1, 2, 3]


def test_followed_events_are_aligned_with_their_headers(mesh: ScriptedMesh) -> None:
    header, row, *_ = mesh.run("events", "-w").stdout.splitlines()
    assert header.index("RESOURCE") == row.index("model/")
    assert header.index("REASON") == row.index("woke")


def test_ps_includes_relayed_runners(mesh: ScriptedMesh) -> None:
    (row,) = json.loads(mesh.run("ps", "-o", "json").stdout)["items"]
    assert (row["model"], row["pid"], row["restarts"], row["state"]) == ("qwen", 4711, 2, "ready")


def test_resident_memory_is_the_same_in_ps_describe_and_the_admin_documents(mesh: ScriptedMesh) -> None:
    """A model without accelerators had 381 MiB, 0 B and "-" in three places."""
    mesh.state.runners["r1"].capability.instances[0].memory.resident_bytes = 384 * 1024**2
    header, row = mesh.run("ps").stdout.splitlines()
    assert row[header.index("MEMORY") :].startswith("384 MiB ")
    assert re.search(r"Resident bytes: +384 MiB\n", mesh.run("describe", "model", "qwen").stdout)
    with connect(mesh.home) as api:
        member, *_ = api.get("/v1/admin/models/qwen")["replicas"]["members"]
        (model,) = api.get("/v1/admin/gpu-memory")["models"]
    assert member["memory"]["residentBytes"] == model["memory"]["residentBytes"] == 384 * 1024**2


def test_wide_ps_shows_number_size_and_limit_of_saved_prompts(mesh: ScriptedMesh) -> None:
    header, row = mesh.run("ps", "-o", "wide").stdout.splitlines()
    assert row[header.index("KEPT PROMPTS") :].startswith("2: 3 MiB of 1 GiB ")
    assert row[header.index("STORED PROMPTS") :].rstrip() == "3: 57 MiB of 2 GiB"


def test_ps_includes_engines_of_unpublished_models(mesh: ScriptedMesh) -> None:
    del mesh.state.runners["r1"].capability.instances[:]
    (row,) = json.loads(mesh.run("ps", "-o", "json").stdout)["items"]
    assert (row["model"], row["pid"], row["state"]) == ("qwen", 4711, "unowned")
    assert row["detail"] == "the runner no longer publishes it"


def _processes(mesh: ScriptedMesh, *flags: str, changes: list[Any]) -> list[str]:
    for change in changes:
        mesh.changes.put(change)
    result = mesh.run("ps", "-w", *flags)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def _runner_now(mesh: ScriptedMesh) -> Any:
    runner = some_runner("")
    runner.CopyFrom(mesh.state.runners["r1"])
    return runner


def test_ps_watch_shows_changes_but_no_heartbeats(mesh: ScriptedMesh) -> None:
    heartbeat, asleep = _runner_now(mesh), _runner_now(mesh)
    heartbeat.last_heartbeat_time.GetCurrentTime()
    asleep.capability.instances[0].phase = InstanceState.PHASE_HIBERNATING
    changes = [Change(runner=WatchedRunner(runner=each)) for each in (heartbeat, asleep)]
    changes += [put(some_model("solo", status="HIBERNATING")), Change(deleted_runner="r1")]
    header, *rows = _processes(mesh, changes=changes)
    assert [row.split()[0] for row in rows] == ["qwen"] * 3
    words = [row[header.index("STATE") :].split()[0] for row in rows]
    assert words == ["ready", "hibernating", "gone"]


def test_ps_watch_in_json_prints_one_document_per_line(mesh: ScriptedMesh) -> None:
    asleep = _runner_now(mesh)
    asleep.capability.instances[0].phase = InstanceState.PHASE_HIBERNATING
    lines = _processes(
        mesh, "-o", "json", changes=[Change(runner=WatchedRunner(runner=asleep)), Change(deleted_runner="r1")]
    )
    assert [json.loads(line)["state"] for line in lines] == ["ready", "hibernating", "gone"]


def test_version_shows_client_mesh_and_libraries(mesh: ScriptedMesh, tmp_path: Path) -> None:
    facts = json.loads(mesh.run("mesh", "version", "-o", "json").stdout)
    assert (facts["client"], facts["runners"]) == (__version__, {"r1": "0.2"})
    assert facts["mesh"] == "unknown", "it has not announced one"
    assert (facts["grpc"], facts["python"]) == (grpc.__version__, platform.python_version())
    alone = json.loads(mesh.run("mesh", "version", "-o", "json", "--home", str(tmp_path / "none")).stdout)
    assert alone.keys() == facts.keys() - {"mesh", "runners"} | {"problem"}
    assert mesh.run("mesh", "version").stdout.splitlines()[0].split() == ["Client:", __version__]
