"""What tokens cost at remote models, by the prices that runners find or operators declare."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from weft.api.common.v1.usage_pb2 import Usage
from weft.api.registry.v1.model_pb2 import ModelPrice
from weft.kernel.requests.request_values import Operation

if TYPE_CHECKING:
    from weft.dispatch.fleet import FleetView

NANODOLLARS = 1_000
"""Billionths of a dollar per token at a price of one dollar per million tokens."""
MAX_NANODOLLARS = 10**15
"""Largest price of a request: providers report the tokens, and a sum of larger prices does not fit its field."""


def price_of(price: ModelPrice, usage: Usage) -> int:
    """Returns the price of tokens in billionths of a dollar."""
    cached = min(usage.cached_prompt_tokens, usage.prompt_tokens)
    written = min(usage.cache_write_prompt_tokens, usage.prompt_tokens - cached)
    per_million = (
        (usage.prompt_tokens - cached - written) * price.prompt_dollars
        + cached * (price.cached_prompt_dollars or price.prompt_dollars)
        + written * (price.cache_write_prompt_dollars or price.prompt_dollars)
        + usage.completion_tokens * price.completion_dollars
    )
    return round(min(NANODOLLARS * per_million, MAX_NANODOLLARS))


def known_price(view: "FleetView", name: str) -> ModelPrice | None:
    """Returns the price of a remote model; None: it is not remote, or its price is unknown."""
    model = view.models.get(name)
    return model.price if model is not None and model.remote else None


def cheapest(view: "FleetView", names: Iterable[str]) -> str:
    """Returns the remote chat model with the lowest price for as many prompt as answer tokens; empty: none is known."""
    models = (model for name in names if (model := view.models.get(name)) is not None)
    priced = (
        (model.price.prompt_dollars + model.price.completion_dollars, model.name)
        for model in models
        if model.remote and model.price is not None and Operation.CHAT in model.operations
    )
    return min(priced, default=(0.0, ""))[1]
