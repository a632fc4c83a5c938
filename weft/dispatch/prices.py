"""What tokens cost at remote models, by the prices that runners find or operators declare."""

from collections.abc import Iterable

from weft.api.common.v1.usage_pb2 import Usage
from weft.api.registry.v1.model_pb2 import ModelPrice
from weft.dispatch.fleet import FleetView
from weft.kernel.request import Operation

NANODOLLARS = 1_000
"""Billionths of a dollar per token at a price of one dollar per million tokens."""


def price_of(price: ModelPrice, usage: Usage) -> int:
    """Returns the price of tokens in billionths of a dollar."""
    cached = min(usage.cached_prompt_tokens, usage.prompt_tokens)
    written = min(usage.cache_write_prompt_tokens, usage.prompt_tokens - cached)
    return round(
        NANODOLLARS
        * (
            (usage.prompt_tokens - cached - written) * price.prompt_dollars
            + cached * (price.cached_prompt_dollars or price.prompt_dollars)
            + written * (price.cache_write_prompt_dollars or price.prompt_dollars)
            + usage.completion_tokens * price.completion_dollars
        )
    )


def known_price(view: FleetView, name: str) -> ModelPrice | None:
    """Returns the price of a remote model; None: it is not remote, or its price is unknown."""
    model = view.models.get(name)
    return model.price if model is not None and model.remote else None


def cheapest(view: FleetView, names: Iterable[str]) -> str:
    """Returns the remote chat model with the lowest price for as many prompt as answer tokens; empty: none is known."""
    chats = (name for name in names if Operation.CHAT in view.models[name].operations)
    priced = ((price, name) for name in chats if (price := known_price(view, name)) is not None)
    return min(((price.prompt_dollars + price.completion_dollars, name) for price, name in priced), default=(0, ""))[1]
