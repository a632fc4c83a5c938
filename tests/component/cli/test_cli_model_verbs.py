"""`weft mesh restart model`, and `-l` of `weft unload` and `models flush`, against a scripted mesh with operations."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_harness import ScriptedMesh, scripted_mesh
from cli_samples import some_model
from operations_script import ScriptedOperations, ScriptedRegistry, an_operation

from weft.api.operations.v1 import operation_service_pb2_grpc
from weft.api.registry.v1 import runner_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


@pytest.fixture
def script(tmp_path: Path) -> ScriptedRegistry:
    return ScriptedRegistry(tmp_path / "home", told=[an_operation("SUCCEEDED")])


@pytest.fixture
def mesh(tmp_path: Path, script: ScriptedRegistry) -> Iterator[ScriptedMesh]:
    servicer = ScriptedOperations(script)  # type: ignore[abstract]  # only what the CLI calls
    add = operation_service_pb2_grpc.add_OperationServiceServicer_to_server
    with scripted_mesh(tmp_path / "home", add=lambda server: add(servicer, server)) as mesh:
        for name in ("qwen", "llama", "other"):
            model = some_model(name, name)
            model.runner = "r1"
            if name == "other":
                model.manifest.tags.labels["team"] = "b"
            mesh.add(model)
        mesh.add(runner_pb2.Runner(name="r1", address=_address(mesh), status=runner_pb2.Runner.STATUS_ACTIVE))
        yield mesh


def _address(mesh: ScriptedMesh) -> str:
    return str(json.loads((mesh.home / "run" / "up.json").read_text())["grpc"])


def _done(script: ScriptedRegistry) -> list[str]:
    """What was asked for, in order."""
    actions = [request.action for request in script.created]
    return [
        f"{action.WhichOneof('kind')} {getattr(action, str(action.WhichOneof('kind'))).model}" for action in actions
    ]


@pytest.mark.parametrize("words", [("model", "qwen"), ("model/qwen",)])
def test_restart_unloads_a_model_and_reloads_it_with_its_last_options(
    mesh: ScriptedMesh, script: ScriptedRegistry, words: tuple[str, ...]
) -> None:
    done = mesh.run("mesh", "restart", *words)
    assert done.exit_code == 0, done.stderr
    assert _done(script) == ["unload_model qwen", "load_model qwen"]
    options = script.created[1].action.load_model.options
    assert (options.quantization, options.pin) == ("q8_0", True)


def test_restart_of_an_unknown_model_starts_nothing(mesh: ScriptedMesh, script: ScriptedRegistry) -> None:
    unknown, bare = mesh.run("mesh", "restart", "model", "qwem"), mesh.run("mesh", "restart", "qwen")
    assert (unknown.exit_code, bare.exit_code) == (3, 2)
    assert "qwen" in unknown.stderr
    assert "weft mesh restart model qwen" in bare.stderr
    assert script.created == []


def test_model_that_fails_to_unload_is_not_loaded(mesh: ScriptedMesh, script: ScriptedRegistry) -> None:
    script.refusal = WeftError(Reason.UNSUPPORTED_OPERATION, "weft did not start it")
    done = mesh.run("mesh", "restart", "model", "qwen")
    assert done.exit_code == 1
    assert "weft did not start it" in done.stderr
    assert script.created == []


@pytest.mark.parametrize(
    ("words", "done"),
    [
        ("unload -l team=a", ["unload_model llama", "unload_model qwen"]),
        ("models flush -l team=b", ["flush_cache other"]),
    ],
)
def test_selected_models_are_unloaded_or_flushed_in_turn(
    mesh: ScriptedMesh, script: ScriptedRegistry, words: str, done: list[str]
) -> None:
    result = mesh.run(*words.split())
    assert (result.exit_code, sorted(_done(script))) == (0, done), result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("unload",),
        ("unload", "qwen", "-l", "team=a"),
        ("unload", "-l", "team=a", "--request-id", "mine"),
        ("models", "flush", "--all", "-l", "team=a"),
        ("unload", "-l", "team="),
    ],
)
def test_selector_excludes_single_model_options(
    mesh: ScriptedMesh, script: ScriptedRegistry, words: tuple[str, ...]
) -> None:
    assert mesh.run(*words).exit_code == 2
    assert script.created == []


def test_selector_without_matches_is_reported(mesh: ScriptedMesh, script: ScriptedRegistry) -> None:
    done = mesh.run("unload", "-l", "team=none")
    assert (done.exit_code, script.created) == (0, [])
    assert "no models match these labels" in done.stderr


def test_rejection_for_one_model_does_not_stop_the_others(mesh: ScriptedMesh, script: ScriptedRegistry) -> None:
    script.refusal = WeftError(Reason.NO_RUNNER_AVAILABLE, "its runner is away")
    done = mesh.run("unload", "-l", "team=a")
    assert done.exit_code == 1
    assert done.stderr.count("its runner is away") == 2


SLASHED = ("acme/tiny", "accounts/acme/models/tiny")
"""A name that a repository of the hub may also have, and a longer one."""


@pytest.fixture(params=SLASHED)
def slashed(mesh: ScriptedMesh, request: pytest.FixtureRequest) -> str:
    """The name of a model of the mesh."""
    mesh.add(some_model(request.param, "others"))
    return str(request.param)


@pytest.mark.parametrize("words", ["logs model/{}", "logs {}"])
def test_logs_of_a_model_with_a_slash_in_its_name_are_those_of_its_engine(
    mesh: ScriptedMesh, slashed: str, words: str
) -> None:
    done = mesh.run(*words.format(slashed).split())
    assert (done.exit_code, done.stdout) == (0, f"engine of {slashed}\n"), done.stderr


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_model_with_a_slash_in_its_name_is_loaded_and_unloaded(
    mesh: ScriptedMesh, script: ScriptedRegistry, slashed: str, verb: str
) -> None:
    done = mesh.run(verb, slashed)
    assert (done.exit_code, _done(script)) == (0, [f"{verb}_model {slashed}"]), done.stderr
