"""What tokens cost at remote models: in receipts, and which model savings are compared with."""

import pytest
from kit.fleet import model_view

from weft.api.common.v1.receipt_pb2 import Receipt
from weft.api.common.v1.usage_pb2 import Usage
from weft.api.registry.v1.model_pb2 import ModelPrice
from weft.dispatch.fleet import FleetView
from weft.dispatch.prices import MAX_NANODOLLARS, cheapest, known_price, price_of
from weft.kernel.requests.request_values import Operation

PRICE = ModelPrice(
    prompt_dollars=2.0, cached_prompt_dollars=0.5, cache_write_prompt_dollars=2.5, completion_dollars=10.0
)


@pytest.mark.parametrize(
    ("usage", "price", "dollars"),
    [
        (Usage(prompt_tokens=1_000_000, completion_tokens=100_000), PRICE, 3.0),
        (Usage(prompt_tokens=1_000_000, cached_prompt_tokens=600_000), PRICE, 1.1),
        (Usage(prompt_tokens=1_000_000, cached_prompt_tokens=600_000, cache_write_prompt_tokens=400_000), PRICE, 1.3),
        (Usage(prompt_tokens=1_000_000, cached_prompt_tokens=600_000), ModelPrice(prompt_dollars=2.0), 2.0),
        (Usage(prompt_tokens=10, cached_prompt_tokens=99, cache_write_prompt_tokens=99), PRICE, 5e-6),
    ],
)
def test_price_of_tokens(usage: Usage, price: ModelPrice, dollars: float) -> None:
    assert price_of(price, usage) == round(dollars * 1e9)


def test_tokens_that_no_provider_can_have_counted_have_a_price_that_fits_a_receipt() -> None:
    price = price_of(PRICE, Usage(prompt_tokens=2**63 - 1, completion_tokens=2**63 - 1))
    assert Receipt(price_nanodollars=1000 * price).price_nanodollars == 1000 * MAX_NANODOLLARS


def test_only_remote_chat_models_with_a_price_are_compared_with() -> None:
    models = (
        model_view("local", price=ModelPrice(completion_dollars=0.1)),
        model_view("unknown", remote=True),
        model_view("embedder", remote=True, price=ModelPrice(), operations=frozenset({Operation.EMBEDDING})),
        model_view("dear", remote=True, price=PRICE),
        model_view("cheap", remote=True, price=ModelPrice(completion_dollars=1.0)),
    )
    view = FleetView(1, {}, {each.name: each for each in models})
    assert cheapest(view, view.models) == "cheap"
    assert cheapest(view, ["local", "unknown", "embedder"]) == ""
    assert (known_price(view, "dear"), known_price(view, "local"), known_price(view, "none")) == (PRICE, None, None)
