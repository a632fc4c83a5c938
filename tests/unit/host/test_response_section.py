import pytest

from gateway.gateway_config import KeepResponses, ResponseEnvelope
from weft.kernel.errors.error_tree import FieldError
from weft_app.compose.service_configs import gateway_config
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_config


@pytest.mark.parametrize("said", KeepResponses)
def test_response_storage_settings_reach_the_gateway(said: KeepResponses) -> None:
    config = parse_config({"gateway": {"keep_responses": said.value}})
    assert gateway_config(config).keep_responses is said


@pytest.mark.parametrize("said", ResponseEnvelope)
def test_response_envelope_setting_reaches_the_gateway(said: ResponseEnvelope) -> None:
    config = parse_config({"gateway": {"response_envelope": said.value}})
    assert gateway_config(config).response_envelope is said
    assert gateway_config(WeftConfig()).response_envelope is ResponseEnvelope.OPENAI


def test_responses_are_stored_by_default_and_an_invalid_mode_is_refused() -> None:
    assert gateway_config(WeftConfig()).keep_responses is KeepResponses.BY_DEFAULT
    with pytest.raises(FieldError):
        parse_config({"gateway": {"keep_responses": "sometimes"}})
