"""List prices of providers, from the data in the package genai-prices."""

from urllib.parse import urlsplit

from weft.api.registry.v1.model_pb2 import ModelPrice
from weft.kernel.values.address import is_loopback

_TOKENS = 1_000
"""Priced tokens: below all surcharges for long prompts."""


def list_price(url: str, model: str) -> ModelPrice | None:
    """Returns the price of a model at the provider with this URL; None: unknown. Takes about a second at first."""
    if is_loopback(urlsplit(url).hostname or ""):
        return None
    # Importing it takes a third of a second, and its data as long again.
    from genai_prices import Usage, calc_price  # noqa: PLC0415

    def dollars(**tokens: int) -> float:
        price = calc_price(Usage(**tokens), model_ref=model, provider_api_url=url)
        return float(price.input_price + price.output_price) * 1_000_000 / _TOKENS

    try:
        return ModelPrice(
            prompt_dollars=dollars(input_tokens=_TOKENS),
            cached_prompt_dollars=dollars(input_tokens=_TOKENS, cache_read_tokens=_TOKENS),
            cache_write_prompt_dollars=dollars(input_tokens=_TOKENS, cache_write_tokens=_TOKENS),
            completion_dollars=dollars(output_tokens=_TOKENS),
        )
    except (LookupError, ValueError):
        return None
