"""What the Python client makes of a chat's options."""

import pytest

from weft.client._messages import ChatOptions, chat_request, embed_request
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_objects import plain_object


def test_every_option_reaches_the_payload() -> None:
    options: ChatOptions = {
        "max_tokens": 5,
        "stop": ["a", "b"],
        "thinking": False,
        "extra_parameters": {"mirostat": 2, "dry": {"base": 1.5, "breakers": ["\n"]}},
    }
    payload = chat_request("m", "hi", options).payload
    assert payload.sampling.max_tokens == 5
    assert list(payload.sampling.stop) == ["a", "b"]
    assert payload.HasField("thinking")
    assert not payload.thinking
    assert plain_object(payload.extra_parameters) == {"mirostat": 2, "dry": {"base": 1.5, "breakers": ["\n"]}}


def test_unset_options_are_not_sent() -> None:
    payload = chat_request("m", "hi", {}).payload
    assert not payload.HasField("thinking")
    assert not payload.HasField("extra_parameters")
    assert not payload.sampling.ListFields()


@pytest.mark.parametrize(
    ("options", "field"),
    [({"extra_parameters": {"x": object()}}, "extra_parameters"), ({"max_tokens": 2**40}, "max_tokens")],
)
def test_invalid_option_error_names_the_option(options: ChatOptions, field: str) -> None:
    with pytest.raises(FieldError) as refused:
        chat_request("m", "hi", options)
    assert refused.value.reason is Reason.INVALID_ARGUMENT
    assert refused.value.field == field


def test_unknown_role_is_refused_by_name() -> None:
    """The client raised the ValueError of protobuf."""
    with pytest.raises(FieldError, match="must be one of system") as refused:
        chat_request("m", [{"role": "owl", "content": "hi"}], {})  # type: ignore[typeddict-item]  # the role
    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, "messages[0].role")


def test_one_stop_text_is_not_read_as_its_characters() -> None:
    assert list(chat_request("m", "hi", {"stop": "END"}).payload.sampling.stop) == ["END"]


def test_one_text_is_embedded_whole_and_not_by_character() -> None:
    inputs = embed_request("m", "hello").payload.inputs
    assert [each.text for each in inputs] == ["hello"]
