"""What the Python client says of who asks and how urgently."""

import pytest

from weft.api.router.v1.inference_service_pb2 import RequestOptions
from weft.client._messages import ChatOptions, chat_request
from weft.dispatch.parameter_checks import client_of, labels_of, priority_of, session_of
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.request_values import Priority


def test_band_client_and_session_reach_the_request() -> None:
    options: ChatOptions = {"priority": "low", "client_id": "nightly", "session": "thread 7"}
    sent = chat_request("m", "hi", options).options
    assert (priority_of(sent), client_of(sent), session_of(sent)) == (Priority.LOW, "nightly", "thread 7")


def test_unset_band_defers_to_the_client_profile() -> None:
    sent = chat_request("m", "hi", {}).options
    assert (sent.priority, client_of(sent), session_of(sent)) == (0, "", "")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"priority": "system"}, "priority"),
        ({"client_id": "two words"}, "client_id"),
        ({"client_id": "x" * 65}, "client_id"),
        ({"session": "x" * 257}, "session"),
    ],
)
def test_option_reserved_for_the_mesh_is_refused_by_name(options: ChatOptions, field: str) -> None:
    with pytest.raises(FieldError) as refused:
        chat_request("m", "hi", options)
    assert refused.value.field == field


def test_labels_of_a_request_are_those_of_coding_agents() -> None:
    """A task keeps them in its options; programs may send them over gRPC."""
    options = RequestOptions(labels={"agent": "sub", "purpose": "title"})
    assert labels_of(options) == {"agent": "sub", "purpose": "title"}
    for labels, field in (({"team": "a"}, "options.labels.team"), ({"agent": "two words"}, "options.labels.agent")):
        with pytest.raises(FieldError) as caught:
            labels_of(RequestOptions(labels=labels))
        assert caught.value.field == field
