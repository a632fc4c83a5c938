"""`weft mesh profile save` and `weft mesh profile switch`, against a scripted registry."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.resources import declared
from operations_script import GIB, ScriptedRegistry, an_operation, scripted_registry

from weft.api.operations.v1 import operation_pb2
from weft.api.registry.v1.agent_pb2 import AgentManifest
from weft.api.registry.v1.declaration_service_pb2 import ApplyResult
from weft.api.registry.v1.profile_pb2 import ProfileLoadSettings
from weft.api.registry.v1.profile_service_pb2 import ProfileStep, SwitchProfileResponse
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[ScriptedRegistry]:
    with scripted_registry(tmp_path / "home") as script:
        yield script


def result(outcome: str, name: str = "coder") -> ApplyResult:
    agent = declared(agent=AgentManifest(name=name, model="qwen", system_prompt="Be terse."))
    before = None if outcome == "CREATED" else agent
    after = None if outcome == "DELETED" else agent
    return ApplyResult(
        kind="agent",
        name=name,
        outcome=ApplyResult.Outcome.Value(f"OUTCOME_{outcome}"),
        before=before,
        after=after,
    )


def switched(*steps: ProfileStep) -> SwitchProfileResponse:
    results = [result("CREATED"), result("UNCHANGED", "same"), result("DELETED", "old")]
    return SwitchProfileResponse(results=results, steps=steps, previous="night")


def load(**fields: str) -> ProfileStep:
    return ProfileStep(kind=ProfileStep.KIND_LOAD, model="qwen", settings=ProfileLoadSettings(pin=True), **fields)


def test_save_reports_its_outcome_and_dry_run_shows_the_profile(registry: ScriptedRegistry) -> None:
    assert registry.run("mesh", "profile", "save", "day", "-d", "Work").stdout == "profile/day created\n"
    assert registry.profile_calls[0].description == "Work"  # type: ignore[union-attr]
    shown = registry.run("mesh", "profile", "save", "day", "--dry-run").stdout
    assert "+name: day\n" in shown
    assert "+unloadOthers: true\n" in shown
    assert shown.endswith("profile/day created (dry run)\n")


def test_switch_dry_run_shows_each_document_diff_and_the_models(registry: ScriptedRegistry) -> None:
    registry.switched = switched(ProfileStep(kind=ProfileStep.KIND_UNLOAD, model="big"), load())
    found = registry.run("mesh", "profile", "switch", "day", "--dry-run")
    assert found.exit_code == 0
    assert "+++ agent/coder (profile/day)" in found.stdout
    assert "-systemPrompt: Be terse.\n" in found.stdout
    assert "same" not in found.stdout
    assert found.stdout.endswith("unload big (dry run)\nload qwen (pin=True) (dry run)\n")


def test_switch_follows_its_operations_to_their_ends(registry: ScriptedRegistry) -> None:
    registry.switched = switched(load(operation="operations/op-1"))
    ended = operation_pb2.OperationResult(memory_bytes=5 * GIB, memory_measured=True, models=["qwen"])
    registry.told = [an_operation("RUNNING", stage="loading"), an_operation("SUCCEEDED", result=ended)]
    found = registry.run("mesh", "profile", "switch", "day")
    assert found.exit_code == 0
    assert found.stdout.splitlines() == [
        "agent/coder created",
        "agent/old deleted",
        "load qwen (pin=True)",
        "switched to profile/day",
        "model/qwen loaded (in 0.0 s, holds 5 GiB)",
    ]


def test_switch_lists_models_that_do_not_match_the_profile(registry: ScriptedRegistry) -> None:
    registry.switched = switched(load(operation="operations/op-1"), load(problem="too many operations wait"))
    registry.told = [an_operation("FAILED", detail="no memory")]
    found = registry.run("mesh", "profile", "switch", "day")
    assert found.exit_code == 1
    assert "cannot load qwen: too many operations wait" in found.stderr
    assert "cannot load qwen: no memory" in found.stderr
    assert "profile/day is active, but 2 of 2 models could not be loaded or unloaded" in found.stderr


def test_switch_without_waiting_prints_json(registry: ScriptedRegistry) -> None:
    registry.switched = switched(load(operation="operations/op-1"))
    document = json.loads(registry.run("mesh", "profile", "switch", "day", "--no-wait", "-o", "json").stdout)
    assert (document["kind"], document["previous"]) == ("SwitchAnswer", "night")
    assert document["steps"] == [
        {"step": "load", "model": "qwen", "settings": {"parameters": {}, "pin": True}, "operation": "operations/op-1"}
    ]
    assert [each["outcome"] for each in document["results"]] == ["created", "unchanged", "deleted"]


def test_rejected_switch_reports_why(registry: ScriptedRegistry) -> None:
    registry.refusal = WeftError(Reason.NOT_FOUND, "there is no profile day")
    found = registry.run("mesh", "profile", "switch", "day")
    assert found.exit_code == 3
    assert "there is no profile day" in found.stderr
