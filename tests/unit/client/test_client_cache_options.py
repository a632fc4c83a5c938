"""What the Python client makes of options about the prefix cache and about keeping a model loaded."""

import pytest

from weft.client._messages import ChatOptions, chat_request
from weft.dispatch.parameter_checks import handling_of
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.request_values import CacheMode, Handling


def test_every_option_reaches_the_request() -> None:
    options: ChatOptions = {"cache_mode": "none", "cache_tag": "session-1", "keep_alive": "5m"}
    expected = Handling(cache_mode=CacheMode.NONE, cache_tag="session-1", keep_alive_seconds=300.0)
    assert handling_of(chat_request("m", "hi", options).options) == expected
    assert handling_of(chat_request("m", "hi", {}).options) == Handling()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cache_mode": "never"}, "cache_mode"),
        ({"cache_tag": "two words"}, "cache_tag"),
        ({"keep_alive": "soon"}, "keep_alive"),
    ],
)
def test_invalid_option_error_names_it(options: ChatOptions, field: str) -> None:
    with pytest.raises(FieldError) as refused:
        chat_request("m", "hi", options)
    assert refused.value.field == field
