"""`/v1/quotes` says when a chat request would be answered; X-Max-Wait-Seconds makes such a time a condition."""

from dataclasses import replace

from gateway_script import FixedFleet, ScriptedDispatcher, model, serving
from task_script import ScriptedTasks

from weft.api.registry.v1.model_pb2 import ModelPrice
from weft.api.router.v1.quote_pb2 import Quote
from weft.dispatch.quoter import Quoter
from weft.dispatch.token_counts import PromptCounts
from weft.kernel.requests.placement_request import PlacementRequest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 7}
JSON = {"content-type": "application/json"}


class ScriptedRouter:
    """Offers always the same; records what is asked for."""

    def __init__(self) -> None:
        self.asked: list[PlacementRequest] = []

    async def quote(self, request: PlacementRequest) -> list[Quote]:
        self.asked.append(request)
        offered = Quote(model="tiny", runner="a", completion_tokens=7)
        offered.first_token.p50.FromMilliseconds(200)
        offered.first_token.p90.FromMilliseconds(500)
        return [offered]


async def test_quote_is_asked_for_what_the_request_would_be() -> None:
    router, dispatcher = ScriptedRouter(), ScriptedDispatcher()
    quoter = Quoter(router, FixedFleet.of(model("tiny")), PromptCounts())
    async with serving(dispatcher, quotes=quoter) as gateway:
        answer = await gateway.request("POST", "/v1/quotes", CHAT, JSON)
    assert (answer.status, answer.json) == (
        200,
        {
            "kind": "QuoteList",
            "items": [
                {
                    "model": "tiny",
                    "runner": "a",
                    "remote": False,
                    "firstToken": {"p50Seconds": 0.2, "p90Seconds": 0.5},
                    "completionTokens": 7,
                    "measuredCount": 0,
                }
            ],
        },
    )
    (asked,) = router.asked
    assert (asked.model, asked.max_output_tokens, asked.prompt_tokens > 0) == ("tiny", 7, True)
    assert dispatcher.calls == []


async def test_quote_of_a_remote_model_with_a_known_price_has_the_price() -> None:
    remote = replace(model("tiny"), remote=True, price=ModelPrice(completion_dollars=3.0))
    async with serving(quotes=Quoter(ScriptedRouter(), FixedFleet.of(remote), PromptCounts())) as gateway:
        answer = await gateway.request("POST", "/v1/quotes", CHAT, JSON)
    assert answer.json["items"][0]["priceNanodollars"] == 7 * 3_000


async def test_labels_of_the_header_and_the_metadata_reach_the_router() -> None:
    router = ScriptedRouter()
    body = CHAT | {"model": "route/r", "metadata": {"team": "b", "kind": "review"}}
    async with serving(quotes=Quoter(router, FixedFleet.of(model("tiny")), PromptCounts())) as gateway:
        await gateway.request("POST", "/v1/quotes", body, JSON | {"x-labels": "team=a, difficulty=hard"})
    assert router.asked[0].labels == {"team=a", "kind=review", "difficulty=hard"}


async def test_limit_of_the_wait_is_rejected_for_a_task() -> None:
    async with serving(tasks=ScriptedTasks()) as gateway:
        body, headers = CHAT | {"durable": "wait"}, JSON | {"x-max-wait-seconds": "5"}
        answer = await gateway.request("POST", "/v1/chat/completions", body, headers)
    assert answer.refusal[::2] == (400, "X-Max-Wait-Seconds")
    assert "is not for requests that run as tasks" in answer.error["message"]


async def test_limit_of_the_wait_reaches_the_dispatcher() -> None:
    dispatcher = ScriptedDispatcher()
    async with serving(dispatcher) as gateway:
        headers = JSON | {"x-max-wait-seconds": "2.5"}
        await gateway.request("POST", "/v1/chat/completions", CHAT, headers)
    assert dispatcher.calls[0].context.max_wait_seconds == 2.5
