"""The record of a server that is attached, from what a caller says."""

import pytest
from kit.failures import fails

from runner_svc.followed_servers import record_models, remembered_of, server_record
from runner_svc.policy.followed_models import FollowedModel
from weft.api.runner.v1 import load_pb2
from weft.kernel.errors import FieldError
from weft.kernel.model_source import ServerSource
from weft.kernel.principal import KEY_VARIABLES

BOX = ServerSource(url="http://box:11434")


def word(text: str) -> load_pb2.LoadOptions:
    return load_pb2.LoadOptions(parameters={"api_key_env": load_pb2.LoadValue(word=text)})


def test_record_has_the_variable_of_the_key_and_never_its_value() -> None:
    options = word("BOX_KEY")
    options.parameters["remote"].flag = False
    record = server_record(BOX, "box", options)
    assert (record.server.api_key_env, record.server.HasField("remote"), record.server.remote) == (
        "BOX_KEY",
        True,
        False,
    )


@pytest.mark.parametrize("variable", [*sorted(KEY_VARIABLES), "NOT A NAME", "a" * 200, "9X"])
def test_no_mesh_key_is_sent_to_a_server(variable: str) -> None:
    with pytest.raises(FieldError):
        server_record(BOX, "box", word(variable))


def test_other_parameters_are_refused() -> None:
    with fails(field="options.parameters.slots"):
        server_record(BOX, "box", load_pb2.LoadOptions(parameters={"slots": load_pb2.LoadValue(integer=4)}))


def test_server_models_are_remembered() -> None:
    record = server_record(BOX, "box", load_pb2.LoadOptions())
    models = (FollowedModel(name="smol", upstream="acme/smol"), FollowedModel(name="b", upstream="b"))
    record_models(record, models)
    record_models(record, models)
    assert remembered_of(record) == models
