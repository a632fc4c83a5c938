"""List prices of providers' models, from the package's data alone."""

import sys

import pytest

from runner_svc.runtimes.openai_remote.list_price import list_price


def test_price_of_a_listed_model_is_found_by_the_url_of_its_provider() -> None:
    price = list_price("https://api.openai.com/v1", "gpt-4o-mini")
    assert price is not None
    assert (price.prompt_dollars, price.completion_dollars) == (0.15, 0.6)
    assert 0 < price.cached_prompt_dollars < price.prompt_dollars


@pytest.mark.parametrize(
    ("url", "model"), [("https://example.com/v1", "gpt-4o-mini"), ("https://api.openai.com/v1", "no-such-model")]
)
def test_unlisted_model_has_no_price(url: str, model: str) -> None:
    assert list_price(url, model) is None


def test_prices_are_not_imported_for_a_server_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    assert list_price("http://127.0.0.1:8000/v1", "gpt-4o-mini") is None
