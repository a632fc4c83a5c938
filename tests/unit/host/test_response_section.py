import pytest

from gateway.config import KeepResponses, ResponseEnvelope
from weft.kernel.errors import FieldError
from weft_app.compose.gateway import gateway_config
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_config


@pytest.mark.parametrize("said", KeepResponses)
def test_what_the_file_says_of_keeping_reaches_the_gateway(said: KeepResponses) -> None:
    config = parse_config({"gateway": {"keep_responses": said.value}})
    assert gateway_config(config).keep_responses is said


@pytest.mark.parametrize("said", ResponseEnvelope)
def test_what_the_file_says_of_the_form_of_responses_reaches_the_gateway(said: ResponseEnvelope) -> None:
    config = parse_config({"gateway": {"response_envelope": said.value}})
    assert gateway_config(config).response_envelope is said
    assert gateway_config(WeftConfig()).response_envelope is ResponseEnvelope.OPENAI


def test_responses_are_kept_by_default_and_a_word_that_is_none_is_refused() -> None:
    assert gateway_config(WeftConfig()).keep_responses is KeepResponses.BY_DEFAULT
    with pytest.raises(FieldError):
        parse_config({"gateway": {"keep_responses": "sometimes"}})
