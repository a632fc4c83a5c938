"""What is said of a server whose models are not all served."""

from weft.api.operations.v1 import operation_pb2
from weft.api.registry.v1 import runner_pb2
from weft.documents.codec import document_of
from weft.documents.conditions import left_out_words, runner_conditions
from weft.documents.left_out import left_out
from weft_app.cli.operations import outcome_text

WORDS = "runner here serves 64 of 152 models of server box; raise its max_listed_models in weft.yaml"


def _runner(served: int) -> runner_pb2.Runner:
    runner = runner_pb2.Runner(name="here", status=runner_pb2.Runner.STATUS_ACTIVE)
    runner.capability.followed_servers.add(name="box", served_count=served, listed_count=152)
    return runner


def test_runner_reports_served_and_total_models_and_the_setting_that_changes_it() -> None:
    served = {each.type: each for each in runner_conditions(_runner(64))}["Served"]
    assert (served.message, left_out_words(_runner(64))) == (WORDS, WORDS)


def test_runner_serving_all_models_has_no_such_condition() -> None:
    assert left_out_words(_runner(152)) == ""
    assert {each.type for each in runner_conditions(_runner(152))} == {"Connected", "Ready"}


def test_attachment_outcome_shows_served_and_total_models() -> None:
    operation = operation_pb2.Operation()
    operation.action.load_model.source = "http://box:1"
    operation.result.added.name = "box"
    operation.result.added.server.listed_count = 152
    operation.result.added.server.models.add(name="org/a")
    operation.result.models.append("org/a")
    assert outcome_text(document_of(operation)) == (
        "server/box attached: 1 of 152 models are served (limit: max_listed_models of its runner): org/a"
    )


def test_models_left_out_for_another_reason_are_told_with_it_and_without_the_limit() -> None:
    runner = _runner(64)
    runner.capability.followed_servers[0].left_out_count = 88
    runner.capability.left_out.append(left_out("model", "good", "the name is taken", server="box"))
    assert left_out_words(runner) == "runner here leaves out model good: the name is taken"


def test_attachment_outcome_names_what_is_left_out_and_why() -> None:
    operation = operation_pb2.Operation()
    operation.action.load_model.source = "http://box:1"
    added = operation.result.added
    added.name, added.server.listed_count, added.server.left_out_count = "box", 1, 1
    added.server.left_out.append(left_out("model", "good", "the name is taken"))
    assert outcome_text(document_of(operation)) == (
        "server/box attached: 0 of 1 models are served: none\n  left out: good: the name is taken"
    )
