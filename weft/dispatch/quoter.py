"""Quotes for requests as callers write them; see `router_svc.policy.quotes`."""

from collections.abc import Sequence

from weft.api.common.v1.usage_pb2 import Usage
from weft.api.router.v1.quote_pb2 import Quote
from weft.dispatch.agents import skills_lacking_behind
from weft.dispatch.aliases import resolve_names
from weft.dispatch.dispatcher import placement_request
from weft.dispatch.fleet import FleetSource
from weft.dispatch.labelers import Labelers
from weft.dispatch.payload_description import Payload, cache_scope, describe
from weft.dispatch.placement import QuoteSource
from weft.dispatch.prices import known_price, price_of
from weft.dispatch.request_receipt import RequestContext
from weft.dispatch.token_counts import PromptCounts


class Quoter:
    """Asks the router when each place would answer a request."""

    def __init__(self, router: QuoteSource, fleet: FleetSource, counts: PromptCounts) -> None:
        """`counts`: learned from the requests of this process."""
        self._router = router
        self._counts = counts
        self._fleet = fleet
        self._labelers = Labelers()

    async def quote(self, context: RequestContext, payload: Payload) -> Sequence[Quote]:
        """Returns the quotes, the soonest first. Raises what a refusal of the request would."""
        view, behaviour = self._fleet.view, None
        if (found := resolve_names(view, context, payload)) is not None:
            context, payload, behaviour = found.context, found.payload, found.behaviour
        description = describe(
            payload,
            salt=cache_scope(context.tenant, context.handling.cache_tag),
            behaviour=behaviour,
            unread=lambda: skills_lacking_behind(view, context.model),
        )
        request = placement_request(
            context,
            description,
            prompt_tokens=self._counts.expected_of(payload, context.model, description.prompt_tokens),
            seconds_left=context.timeout_seconds,
            labels=self._labelers.labels(context, payload),
        )
        quotes = await self._router.quote(request)
        for quote in quotes:
            if (price := known_price(view, quote.model)) is not None:
                tokens = Usage(prompt_tokens=quote.prompt_tokens, completion_tokens=quote.completion_tokens)
                quote.price_nanodollars = price_of(price, tokens)
        return quotes
