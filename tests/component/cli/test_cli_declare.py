"""`weft apply`, `diff`, `delete` and `wait` against a scripted mesh."""

import json
from pathlib import Path

import pytest
from cli_harness import ScriptedMesh
from cli_samples import some_model
from jsonschema import Draft202012Validator
from kit.resources import gone, put

from gateway.resources.documents import apply_answer
from weft.api.registry.v1.registry_service_pb2 import Change
from weft.documents.json_schema import SchemaSet
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason

pytest_plugins = ("cli_mesh",)

NAMES = {"models": "solo", "agents": "coder", "runners": "r1", "pools": "big", "routes": "summaries"}
AGENT = "kind: agent\nname: {name}\nmodel: qwen\n"


@pytest.mark.parametrize("output", ["yaml", "json"])
@pytest.mark.parametrize("kind", ["models", "agents", "runners", "pools", "routes"])
def test_output_of_get_applies_without_a_change(mesh: ScriptedMesh, kind: str, output: str) -> None:
    for words in ((kind,), (kind, NAMES[kind])):
        got = mesh.run("get", *words, "-o", output)
        assert got.exit_code == 0
        applied = mesh.run("apply", "-f", "-", stdin=got.stdout)
        assert applied.exit_code == 0, applied.output
        assert {line.split()[1] for line in applied.stdout.splitlines()} == {"unchanged"}
        assert mesh.run("config", "diff", "-f", "-", stdin=got.stdout).exit_code == 0


def test_empty_list_can_be_applied(mesh: ScriptedMesh) -> None:
    mesh.state.declared[ResourceKind.AGENT].clear()
    got = mesh.run("get", "agents", "-o", "yaml").stdout
    result = mesh.run("apply", "-f", "-", stdin=got)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "nothing to apply" in result.stderr


def test_apply_reports_an_outcome_per_document(mesh: ScriptedMesh, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("kind: model\nname: new\n---\n" + AGENT.format(name="coder"))
    dry = mesh.run("apply", "-f", str(file), "--dry-run")
    assert dry.stdout == "model/new created (dry run)\nagent/coder configured (dry run)\n"
    assert mesh.applied[-1].dry_run
    assert mesh.run("apply", "-f", str(file)).stdout == "model/new created\nagent/coder configured\n"
    again = mesh.run("apply", "-f", str(file), "-o", "json", "--adopt")
    assert mesh.applied[-1].adopt
    answer = json.loads(again.stdout)
    published = SchemaSet()
    reference = apply_answer(ResourceKind).add(published)
    Draft202012Validator({**reference, "$defs": published.definitions}).validate(answer)
    assert (answer["kind"], answer["dryRun"]) == ("ApplyAnswer", False), "as /api/v1/apply answers"
    first = answer["results"][0]
    assert (first["kind"], first["name"], first["outcome"]) == ("model", "new", "unchanged")
    assert mesh.run("apply", "-f", str(file), "-o", "name").stdout == "model/new\nagent/coder\n"


def test_folder_applies_all_its_files(mesh: ScriptedMesh, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "b.yml").write_text(AGENT.format(name="b"))
    (folder / "a.json").write_text(json.dumps({"kind": "agent", "name": "a", "model": "qwen"}))
    (folder / "notes.txt").write_text("not: [yaml")
    assert mesh.run("apply", "-f", str(folder)).stdout == "agent/a created\nagent/b created\n"


@pytest.mark.parametrize(
    "broken",
    ["kind: agent\nname: [\n", "kind: agent\nname: x\nmodel: m\nsystemPromt: x\n", "kind: agent\nname: ok\nmodel: m\n"],
)
def test_broken_document_in_the_middle_applies_nothing(mesh: ScriptedMesh, broken: str) -> None:
    text = f"{AGENT.format(name='ok')}---\n{broken}---\n{AGENT.format(name='later')}"
    result = mesh.run("apply", "-f", "-", stdin=text)
    assert result.exit_code == 2
    assert "standard input, document 2 (line" in result.stderr
    assert not mesh.applied


def test_broken_file_among_valid_ones_applies_nothing(mesh: ScriptedMesh, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(AGENT.format(name="ok"))
    bad.write_bytes(b"kind: \xff\n")
    result = mesh.run("apply", "-f", str(good), "-f", str(bad))
    assert result.exit_code == 2
    assert "bad.yaml (line 1)" in result.stderr
    assert not mesh.applied
    assert mesh.run("apply", "-f", str(tmp_path / "none.yaml")).exit_code == 2


def test_rejection_names_the_file_position(mesh: ScriptedMesh) -> None:
    mesh.apply_error = invalid_field("declarations[1].agent.model", "is odd")
    result = mesh.run("apply", "-f", "-", stdin=f"{AGENT.format(name='a')}---\n{AGENT.format(name='b')}")
    assert result.exit_code == 2
    assert "standard input, document 2 (line 5): model: is odd" in result.stderr
    mesh.apply_error = invalid_field("declarations[0].agent.system_prompt", "is odd")
    result = mesh.run("apply", "-f", "-", stdin=AGENT.format(name="a"))
    assert "document 1 (line 1): systemPrompt: is odd" in result.stderr, "as it is called in documents"


@pytest.mark.parametrize(
    ("reason", "code", "diff_code"),
    [
        (Reason.ALREADY_EXISTS, 4, 4),
        (Reason.MODEL_NOT_FOUND, 3, 3),
        (Reason.TOO_MANY_RESOURCES, 1, 2),
        (Reason.PERMISSION_DENIED, 1, 2),
    ],
)
def test_rejection_exits_with_the_code_of_its_reason(
    mesh: ScriptedMesh, reason: Reason, code: int, diff_code: int
) -> None:
    mesh.apply_error = WeftError(reason, "no")
    assert mesh.run("apply", "-f", "-", stdin=AGENT.format(name="a")).exit_code == code
    assert mesh.run("config", "diff", "-f", "-", stdin=AGENT.format(name="a")).exit_code == diff_code


def test_delete_accepts_names_and_files_and_deletes_agents_first(mesh: ScriptedMesh, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("kind: model\nname: qwen\n---\nkind: agent\nname: coder\nmodel: qwen\n")
    mesh.state.declared[ResourceKind.ROUTE].clear()
    assert mesh.run("delete", "model", "qwen").exit_code == 4
    assert mesh.run("delete", "-f", str(file)).stdout == "agent/coder deleted\nmodel/qwen deleted\n"
    assert mesh.run("delete", "model/solo", "model/qwen-2").stdout == "model/solo deleted\nmodel/qwen-2 deleted\n"


def test_delete_accepts_a_kind_with_a_selector_but_no_names_beside_it(mesh: ScriptedMesh) -> None:
    assert mesh.run("delete", "models", "-l", "tier=heavy").stdout == ""
    for wrong in (
        ("models", "solo", "-l", "tier=fast"),
        ("aliases", "-l", "a=b"),
        ("task", "t1", "-l", "a=b"),
        ("-l", "a"),
    ):
        result = mesh.run("delete", *wrong)
        assert result.exit_code == 2
        assert "--selector" in result.stderr
    heavy = some_model("heavy")
    heavy.manifest.tags.tier = "heavy"
    mesh.add(heavy)
    assert mesh.run("delete", "models", "-l", "tier=heavy").stdout == "model/heavy deleted\n"
    mesh.add(*(some_model(f"many-{number}") for number in range(100)))
    result = mesh.run("delete", "models", "-l", "tier=fast")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "at most 100" in result.stderr


def test_delete_of_a_loaded_model_is_a_conflict_unless_forced(mesh: ScriptedMesh) -> None:
    mesh.loaded.add("solo")
    refused = mesh.run("delete", "model", "solo")
    assert (refused.exit_code, refused.stdout) == (4, "")
    forced = mesh.run("delete", "model", "solo", "--force")
    assert (forced.exit_code, forced.stdout) == (0, "model/solo deleted\n")


def test_delete_of_a_missing_resource_fails(mesh: ScriptedMesh) -> None:
    result = mesh.run("delete", "model", "sollo", "solo")
    assert result.exit_code == 3
    assert "did you mean solo" in result.stderr
    assert "model/solo deleted" in result.stdout, "the others are deleted all the same"
    assert mesh.run("delete", "model", "sollo", "--ignore-not-found").exit_code == 0
    assert mesh.run("delete", "model").exit_code == 2
    assert mesh.run("delete").exit_code == 2


@pytest.mark.parametrize(
    "expected", ["exists", "status=active", "condition=Ready", "condition=hasrunner=true", "condition=Awake"]
)
def test_wait_for_a_met_condition_ends_immediately(mesh: ScriptedMesh, expected: str) -> None:
    for timeout in ("60s", "0"):
        result = mesh.run("mesh", "wait", "model/qwen", "--for", expected, "--timeout", timeout)
        assert result.exit_code == 0, result.output
        assert result.stdout == f"model/qwen: {expected}\n"


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        ("status=inactive", [put(some_model("qwen", status="INACTIVE"))]),
        ("delete", [gone("model", "qwen")]),
        ("condition=Ready=false", [put(some_model("qwen", status="HIBERNATING"))]),
    ],
)
def test_wait_ends_with_the_expected_change(mesh: ScriptedMesh, expected: str, changes: list[Change]) -> None:
    for change in changes:
        mesh.changes.put(change)
    result = mesh.run("mesh", "wait", "model", "qwen", "--for", expected)
    assert result.exit_code == 0, result.output


def test_unservable_model_is_failed_in_every_command(mesh: ScriptedMesh) -> None:
    """`get` said failed; `describe`, `status` and `wait` said active, and its pool was ready."""
    mesh.state.models.clear()
    mesh.add(some_model("qwen", status="FAILED"))
    for command in (("get", "model", "qwen"), ("describe", "model", "qwen")):
        shown = mesh.run(*command).stdout
        assert "failed" in shown, command
    assert "Status:       failed" in shown
    assert json.loads(mesh.run("get", "model", "qwen", "-o", "json").stdout)["status"]["state"] == "failed"
    assert mesh.run("mesh", "wait", "model", "qwen", "--for", "status=failed", "--timeout", "0").exit_code == 0
    for target, expected in (("model/qwen", "status=active"), ("model/qwen", "ready"), ("pool/big", "ready")):
        late = mesh.run("mesh", "wait", target, "--for", expected, "--timeout", "0")
        assert (late.exit_code, "fail" in late.stderr) == (5, True), late.stderr


def test_wait_timeout_reports_the_current_state(mesh: ScriptedMesh) -> None:
    mesh.add(some_model("qwen", status="HIBERNATING"))
    result = mesh.run("mesh", "wait", "model", "qwen", "--for", "status=active", "--timeout", "100ms")
    assert result.exit_code == 5
    assert "it is hibernating" in result.stderr
    assert mesh.run("mesh", "wait", "model", "nix", "--for", "exists", "--timeout", "0").exit_code == 5


@pytest.mark.parametrize(
    "arguments",
    [
        ("pool/big", "--for", "status=active"),
        ("model/qwen", "--for", "status=happy"),
        ("model/qwen", "--for", "condition=Blue"),
        ("model/qwen", "--for", "condition=Ready=maybe"),
        ("model/qwen", "--for", "coffee"),
        ("model/qwen", "--timeout", "soon"),
        ("model/qwen", "--timeout", "9999h"),
        ("model/qwen", "--timeout", "-1"),
        ("model",),
    ],
)
def test_wait_rejects_unsupported_conditions(mesh: ScriptedMesh, arguments: tuple[str, ...]) -> None:
    assert mesh.run("mesh", "wait", *arguments).exit_code == 2
