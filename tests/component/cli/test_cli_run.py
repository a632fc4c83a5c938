"""`weft run` against a scripted mesh: names and sources, what it says of a choice, documents, and Ctrl-C."""

import fcntl
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_harness import ScriptedMesh, scripted_mesh
from cli_samples import some_model
from operations_script import Operation, ScriptedOperations, ScriptedRegistry, an_operation

from weft.api.operations.v1 import operation_pb2, operation_service_pb2_grpc
from weft.api.runner.v1 import added_model_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.short_names import SHORT_NAMES, short_source
from weft_app.cli.options import EXIT_NOT_FOUND, EXIT_USAGE

SOURCE = "hf:acme/tiny-GGUF:Q4_K_M"


class Stage:
    """A mesh with one model, whose operations are scripted."""

    def __init__(self, mesh: ScriptedMesh, script: ScriptedRegistry) -> None:
        self.run = mesh.run
        self.mesh = mesh
        self.script = script

    @property
    def load(self) -> operation_pb2.LoadModel:
        """The load that was asked for."""
        (request,) = self.script.created
        return request.action.load_model


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    home = tmp_path / "home"
    script = ScriptedRegistry(home)
    servicer = ScriptedOperations(script)  # type: ignore[abstract]  # only what the CLI calls

    def add(server: object) -> None:
        operation_service_pb2_grpc.add_OperationServiceServicer_to_server(servicer, server)  # type: ignore[arg-type]  # a server

    with scripted_mesh(home, add=add) as mesh, (home / "run" / "up.lock").open("w") as lock:
        # As the mesh that has written up.json.
        fcntl.flock(lock, fcntl.LOCK_EX)
        mesh.add(some_model("tiny"))
        script.told = [an_operation("RUNNING", stage="pulling", progress=0.5), _loaded()]
        yield Stage(mesh, script)


def _loaded() -> Operation:
    added = added_model_pb2.AddedModel(
        name="tiny", source=SOURCE, runtime="llama_server", reasons=["context 2048 of 8192: memory", "1 slot: memory"]
    )
    return an_operation("SUCCEEDED", result=operation_pb2.OperationResult(models=["tiny"], added=added))


def test_source_is_loaded_and_answers_with_its_choices_on_stderr(stage: Stage) -> None:
    done = stage.run("run", SOURCE, "hi")
    assert done.exit_code == 0, done.output
    assert done.stdout == "I am tiny\n"
    assert (stage.load.source, stage.load.model) == (SOURCE, "")
    assert not stage.load.options.parameters
    assert "weft: pulling: 50%" in done.stderr
    said = [f"weft: {SOURCE} is served as tiny", "weft:   context 2048 of 8192: memory", "weft:   1 slot: memory"]
    assert "\n".join(said) in done.stderr
    assert [request.model for request in stage.mesh.asked] == ["tiny"]


def test_signal_handlers_are_restored_after_the_command(stage: Stage) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    stage.run("run", "tiny", "hi")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_given_name_and_size_are_passed_to_the_load(stage: Stage) -> None:
    stage.run("run", SOURCE, "hi", "--name", "mine", "--runner", "box", "--context", "4096", "--slots", "2")
    assert (stage.load.model, stage.load.runner) == ("mine", "box")
    parameters = {name: value.integer for name, value in stage.load.options.parameters.items()}
    assert parameters == {"context_tokens": 4096, "slots": 2}


def test_served_model_is_used_without_a_load(stage: Stage) -> None:
    done = stage.run("run", "tiny", "-v", stdin="hi")
    assert (done.stdout, stage.script.created) == ("I am tiny\n", [])
    assert "Model: tiny" in done.stderr


def test_served_model_is_reloaded_for_another_size(stage: Stage) -> None:
    stage.run("run", "tiny", "hi", "--context", "512")
    assert (stage.load.model, stage.load.source) == ("tiny", "")
    assert stage.load.options.parameters["context_tokens"].integer == 512


def test_short_name_runs_from_its_source_under_that_name(stage: Stage) -> None:
    done = stage.run("run", "llama3.2:1b", "hi")
    assert done.exit_code == 0, done.stderr
    assert (stage.load.model, stage.load.source) == ("llama3.2:1b", SHORT_NAMES["llama3.2:1b"])
    assert f"llama3.2:1b is {SHORT_NAMES['llama3.2:1b']}" in done.stderr


def test_mesh_model_takes_precedence_over_a_short_name(stage: Stage) -> None:
    stage.mesh.add(some_model("llama3.2"))
    stage.run("run", "llama3.2", "hi")
    assert stage.script.created == []


def test_misspelled_short_name_lists_close_matches(stage: Stage) -> None:
    assert "by a short name: did you mean llama3.2" in stage.run("run", "lama3.2", "hi").stderr


def test_unknown_name_error_explains_the_source_format(stage: Stage) -> None:
    done = stage.run("run", "tini", "hi")
    assert done.exit_code == EXIT_NOT_FOUND
    assert "did you mean tiny" in done.stderr.lower()
    assert "a model of the hub is named as hf:OWNER/REPO" in done.stderr


def test_rejected_load_sends_no_request_and_reports_why(stage: Stage) -> None:
    stage.script.refusal = WeftError(Reason.INSUFFICIENT_MEMORY, "it needs 5.3 GiB, and there are 4 GiB")
    done = stage.run("run", SOURCE, "hi")
    assert done.exit_code == 1
    assert "weft: it needs 5.3 GiB, and there are 4 GiB" in done.stderr
    assert stage.mesh.asked == []


def test_json_answer_includes_the_choices_and_the_receipt(stage: Stage) -> None:
    document = json.loads(stage.run("run", SOURCE, "hi", "-o", "json").stdout)
    assert (document["kind"], document["model"], document["text"]) == ("RunAnswer", "tiny", "I am tiny")
    assert document["added"]["reasons"] == ["context 2048 of 8192: memory", "1 slot: memory"]
    assert document["receipt"]["host"] == "box"


def test_short_name_accepts_source_options(stage: Stage) -> None:
    """They were refused as not for a name, though its source was pulled and served."""
    done = stage.run("run", "llama3.2", "hi", "--runner", "box", "--name", "mine")
    assert done.exit_code == 0, done.stderr
    assert (stage.load.model, stage.load.source, stage.load.runner) == ("mine", short_source("llama3.2"), "box")
    assert f"llama3.2 is {short_source('llama3.2')}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("hf:acme", "hi"), "MODEL: the repository 'acme' must be OWNER/REPO"),
        (("ftp:/x", "hi"), "MODEL"),
        (("not a name", "hi"), "MODEL: must be 1 to"),
        ((SOURCE, " "), "PROMPT: the message is empty"),
        (("tiny", "hi", "--runner", "box"), "--runner: is for a source such as hf:OWNER/REPO"),
        ((SOURCE, "hi", "--name", "two words"), "--name: must be 1 to"),
    ],
)
def test_invalid_model_or_message_is_rejected_by_its_name(stage: Stage, arguments: tuple[str, ...], named: str) -> None:
    done = stage.run("run", *arguments)
    assert done.exit_code == EXIT_USAGE
    assert named in done.stderr
    assert stage.script.created == []
