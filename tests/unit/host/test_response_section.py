from dataclasses import fields

import pytest
from pydantic import ValidationError

from gateway.config import KeepResponses
from router_svc.durable.responses.config import ResponseLimits
from weft_app.compose.gateway import gateway_config
from weft_app.config.config import WeftConfig
from weft_app.config.response_section import ResponsesSection


def test_every_limit_of_kept_responses_has_a_name_in_the_file_and_the_same_default() -> None:
    assert set(ResponsesSection.model_fields) == {entry.name for entry in fields(ResponseLimits)}
    assert ResponseLimits(**WeftConfig().router.responses.model_dump()) == ResponseLimits()


@pytest.mark.parametrize("said", KeepResponses)
def test_what_the_file_says_of_keeping_reaches_the_gateway(said: KeepResponses) -> None:
    config = WeftConfig.model_validate({"gateway": {"keep_responses": said.value}})
    assert gateway_config(config).keep_responses is said


def test_responses_are_kept_by_default_and_a_word_that_is_none_is_refused() -> None:
    assert gateway_config(WeftConfig()).keep_responses is KeepResponses.BY_DEFAULT
    with pytest.raises(ValidationError):
        WeftConfig.model_validate({"gateway": {"keep_responses": "sometimes"}})
