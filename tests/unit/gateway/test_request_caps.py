from typing import Any

import pytest

from gateway.gateway_config import RequestLimits
from gateway.intake.request_model import require_within
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.embeddings import EmbeddingRequest
from weft.kernel.errors.error_tree import FieldError

TIGHT = RequestLimits(
    max_user_chars=3, max_metadata=1, max_logit_bias=1, max_top_logprobs=2, max_stop_chars=2, max_choice_tokens=100
)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"user": "four"}, "user"),
        ({"metadata": {"a": "1", "b": "2"}}, "metadata"),
        ({"logit_bias": {"1": 0.0, "2": 0.0}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"stop": "abc"}, "stop"),
        ({"stop": ["a", "abc"]}, "stop[1]"),
        ({"n": 2, "max_tokens": 51}, "max_tokens"),
        ({"n": 2, "max_tokens": 1, "max_completion_tokens": 51}, "max_completion_tokens"),
    ],
    ids=str,
)
def test_request_beyond_configured_caps_is_refused_with_its_field(fields: dict[str, Any], field: str) -> None:
    asked = ChatRequest.model_validate({**CHAT, **fields})
    require_within(asked, RequestLimits())
    with pytest.raises(FieldError) as refused:
        require_within(asked, TIGHT)
    assert refused.value.field == field


def test_values_at_the_limits_pass() -> None:
    chat = {"user": "abc", "metadata": {"a": "1"}, "logit_bias": {"1": 0.0}, "top_logprobs": 2, "logprobs": True}
    require_within(ChatRequest.model_validate({**CHAT, **chat, "stop": ["ab"], "n": 2, "max_tokens": 50}), TIGHT)
    require_within(ChatRequest.model_validate({**CHAT, "max_tokens": 2**31 - 1}), TIGHT)
    require_within(EmbeddingRequest.model_validate({"model": "m", "input": "long enough"}), TIGHT)


def test_text_completion_count_has_the_same_limit() -> None:
    asked = CompletionRequest.model_validate({"model": "m", "prompt": "x", "logprobs": 3})
    with pytest.raises(FieldError) as refused:
        require_within(asked, TIGHT)
    assert refused.value.field == "logprobs"
