"""`weft models trial` against a scripted mesh."""

from typing import Any

import pytest
from cli_harness import ScriptedMesh

from weft.api.gateway.v1.trial_report_pb2 import TrialChecks, TrialPair, TrialReport, TrialSpeed, TrialSummary
from weft.api.registry.v1.alias_pb2 import Alias, AliasManifest
from weft.api.registry.v1.tenant_pb2 import Tenant, TenantManifest
from weft.api.registry.v1.trial_pb2 import Trial, TrialManifest, Verdict
from weft.documents.codec import document_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import declared_document
from weft_extensions.trials.command import report_text

pytest_plugins = ("cli_mesh",)
START = ("models", "trial", "start", "qwen-2", "--tenant", "acme", "--against")


@pytest.fixture
def captured(mesh: ScriptedMesh) -> ScriptedMesh:
    mesh.state.declared[ResourceKind.TENANT]["acme"] = Tenant(manifest=TenantManifest(name="acme", capture=True))
    return mesh


def an_alias(name: str, target: str, **fields: Any) -> Alias:
    return Alias(manifest=AliasManifest(name=name, target=target, **{"pattern": name, **fields}))


def declare(mesh: ScriptedMesh, **fields: str) -> None:
    manifest = TrialManifest(
        name="t", candidate="qwen-2", against="solo", tenant="acme", share_percent=10, max_pairs=100, **fields
    )
    mesh.state.declared[ResourceKind.TRIAL]["t"] = Trial(manifest=manifest)


def applied(mesh: ScriptedMesh) -> TrialManifest:
    manifest = declared_document(mesh.applied[-1].declarations[0]).declared
    assert isinstance(manifest, TrialManifest)
    return manifest


def test_start_declares_a_trial_against_the_target_of_the_tenants_alias(captured: ScriptedMesh) -> None:
    captured.add(an_alias("all", "qwen", pattern="chat"), an_alias("own", "solo", pattern="chat", tenant="acme"))
    captured.add(an_alias("other", "qwen", pattern="chat", tenant="other"))
    started = captured.run(*START, "chat", "--share", "2.5%", "--pairs", "7")
    assert started.stdout == "trial/qwen-2-vs-solo created\n", started.output
    assert "weft models trial report qwen-2-vs-solo" in started.stderr
    assert applied(captured) == TrialManifest(
        name="qwen-2-vs-solo",
        candidate="qwen-2",
        against="solo",
        tenant="acme",
        share_percent=2.5,
        max_pairs=7,
        alias="own",
    )


def test_start_against_a_route_has_no_alias_and_a_name_without_slash(captured: ScriptedMesh) -> None:
    assert captured.run(*START, "route/summaries").exit_code == 0
    trial = applied(captured)
    assert (trial.name, trial.against, trial.alias) == ("qwen-2-vs-route-summaries", "route/summaries", "")
    assert (trial.share_percent, trial.max_pairs) == (10, 100)


@pytest.mark.parametrize(
    ("is_declared", "command"),
    [
        (True, "weft config edit tenant/acme, and set capture: true"),
        (False, r"printf 'kind: tenant\nname: acme\ncapture: true\n' | weft apply -f -"),
    ],
)
def test_start_without_capture_names_the_next_command(mesh: ScriptedMesh, command: str, *, is_declared: bool) -> None:
    if is_declared:
        mesh.state.declared[ResourceKind.TENANT]["acme"] = Tenant(manifest=TenantManifest(name="acme"))
    refused = mesh.run(*START, "solo")
    assert (refused.exit_code, mesh.applied) == (1, [])
    assert "the tenant acme has no capture" in refused.stderr
    assert refused.stderr.endswith(f"Set it with: {command}\n")


def test_start_without_a_tenant_uses_that_of_the_caller(mesh: ScriptedMesh) -> None:
    refused = mesh.run("models", "trial", "start", "qwen-2", "--against", "solo")
    assert "the tenant default has no capture" in refused.stderr


@pytest.mark.parametrize("share", ["0", "101%", "ten", "-1"])
def test_start_refuses_a_share_that_is_no_percentage(mesh: ScriptedMesh, share: str) -> None:
    refused = mesh.run(*START, "solo", f"--share={share}")
    assert (refused.exit_code, mesh.applied) == (2, [])
    assert "--share: must be a percentage" in refused.stderr


def test_switch_and_revert_point_the_alias_and_change_nothing_twice(captured: ScriptedMesh) -> None:
    captured.add(an_alias("chat", "solo", description="For all."))
    declare(captured, alias="chat")
    switched = captured.run("models", "trial", "switch", "t")
    assert switched.stdout == "alias/chat points to qwen-2 instead of solo\n", switched.output
    assert switched.stderr == "weft: undo it with: weft models trial revert t\n"
    (expected,) = captured.applied[-1].expected
    assert declared_document(expected).declared.target == "solo"
    (document,) = captured.applied[-1].declarations
    assert declared_document(document).declared == AliasManifest(
        name="chat", pattern="chat", target="qwen-2", description="For all."
    )
    assert captured.run("models", "trial", "switch", "t").stdout == "alias/chat already points to qwen-2\n"
    assert captured.run("models", "trial", "revert", "t").stdout == "alias/chat points to solo instead of qwen-2\n"
    assert captured.run("models", "trial", "revert", "t").stdout == "alias/chat already points to solo\n"


@pytest.mark.parametrize("verb", ["switch", "revert"])
def test_trial_without_an_alias_cannot_be_switched(captured: ScriptedMesh, verb: str) -> None:
    declare(captured)
    refused = captured.run("models", "trial", verb, "t")
    assert (refused.exit_code, captured.applied) == (2, [])
    assert "NAME: trial/t has no alias" in refused.stderr
    assert "weft config edit trial/t" in refused.stderr


def test_delete_says_that_the_pairs_of_a_trial_stay(captured: ScriptedMesh) -> None:
    declare(captured)
    deleted = captured.run("delete", "trial/t")
    assert deleted.stdout == "trial/t deleted\n", deleted.output
    assert "its pairs are tasks, which stay until their retention ends" in deleted.stderr


def test_report_shows_what_was_measured_of_both_models() -> None:
    checks = TrialChecks(
        candidate_valid=True,
        against_valid=False,
        same_tool_calls=False,
        length_ratio=0.5,
        candidate_speed=TrialSpeed(tokens_per_second=20),
    )
    summary = TrialSummary(
        answered=1,
        waiting=2,
        failed=3,
        with_schema=1,
        candidate_valid=1,
        with_tool_calls=1,
        length_ratio=0.5,
        candidate_speed=TrialSpeed(first_token_seconds=0.25, tokens_per_second=20),
        candidate_preferred=1,
    )
    pairs = [
        TrialPair(task="task-1", state="answered", verdict=Verdict.VERDICT_CANDIDATE, checks=checks),
        TrialPair(task="task-2", state="failed", error="no runner"),
    ]
    report = TrialReport(name="t", candidate="new", against="old", summary=summary, pairs=pairs, stopped="it is full")
    assert (
        report_text(document_of(report))
        == """\
Pairs:             1 answered, 2 waiting, 3 failed
Equal tool calls:  0 of 1
Length ratio:      0.50
Equally good:      0
Stopped:           it is full

CHECK            new     old
preferred        1       0
valid by schema  1 of 1  0 of 1
first token      250 ms  -
tokens/s         20.0    -

TASK    STATE     VERDICT    SCHEMA    EQUAL CALLS  LENGTH  TOKENS/S  ERROR
task-1  answered  candidate  yes / no  no           0.50    20.0 / -  -
task-2  failed    -          -         -            -       -         no runner
"""
    )
