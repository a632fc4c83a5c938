"""Pydantic AI: agents with tools and typed results."""

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.exceptions import ModelAPIError
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import (
    BROKEN,
    KEY,
    MISSING,
    TALK,
    THINK,
    THINK_TEXT,
    THOUGHT,
    TOOLS,
    TOOLS_TEXT,
    TYPED,
    V1,
    breaks_off,
    fails,
    holds,
    is_talk,
    run,
    same,
)


class City(BaseModel):
    """A city."""

    city: str
    population: int


def agent(model: str, **options: object) -> Agent:
    provider = OpenAIProvider(base_url=V1, api_key=KEY)
    return Agent(OpenAIChatModel(model, provider=provider), instructions="Be brief.", **options)


def responder(model: str, **options: object) -> Agent:
    provider = OpenAIProvider(base_url=V1, api_key=KEY)
    return Agent(OpenAIResponsesModel(model, provider=provider), instructions="Be brief.", **options)


def chat_text() -> None:
    result = agent(TALK).run_sync("Hello", model_settings={"max_tokens": 32})
    is_talk(result.output)


async def chat_stream() -> None:
    async with agent(TALK).run_stream("Hello", model_settings={"max_tokens": 32}) as result:
        pieces = [piece async for piece in result.stream_text(delta=True)]
    is_talk("".join(pieces))


def chat_agent() -> None:
    weather = agent(TOOLS)
    asked = []

    @weather.tool_plain
    def get_weather(city: str) -> str:
        asked.append(city)
        return "sunny"

    same(weather.run_sync("How is the weather in Oslo?").output, TOOLS_TEXT)
    same(asked, ["Oslo"])


def chat_typed() -> None:
    same(agent(TYPED, output_type=City).run_sync("Which city?").output, City(city="Oslo", population=700000))


def chat_structured() -> None:
    answer = agent(TALK, output_type=NativeOutput(City)).run_sync("Which city?").output
    holds(isinstance(answer, City), f"not a City: {answer}")


def chat_reasoning() -> None:
    result = agent(THINK).run_sync("Six times seven?")
    parts = result.new_messages()[-1].parts
    same([part.content for part in parts if isinstance(part, ThinkingPart)], [THOUGHT])
    same(result.output, THINK_TEXT)


def chat_errors() -> None:
    error = fails(lambda: agent(MISSING).run_sync("Hello"), ModelHTTPError)
    same((error.status_code, error.body["code"]), (404, "model_not_found"))


def chat_broken_stream() -> None:
    got = []

    async def read() -> None:
        async with agent(BROKEN).run_stream("Hello") as result:
            async for piece in result.stream_text(delta=True, debounce_by=None):
                got.append(piece)  # noqa: PERF401 - what came before the failure counts

    breaks_off(read, ModelAPIError)
    holds(got, "nothing came before the failure")


def responses_text() -> None:
    is_talk(responder(TALK).run_sync("Hello", model_settings={"max_tokens": 32}).output)


async def responses_stream() -> None:
    async with responder(TALK).run_stream("Hello", model_settings={"max_tokens": 32}) as result:
        is_talk("".join([piece async for piece in result.stream_text(delta=True)]))


def responses_agent() -> None:
    weather = responder(TOOLS)

    @weather.tool_plain
    def get_weather(city: str) -> str:
        return f"sunny in {city}"

    same(weather.run_sync("How is the weather in Oslo?").output, TOOLS_TEXT)


def responses_typed() -> None:
    same(responder(TYPED, output_type=City).run_sync("Which city?").output, City(city="Oslo", population=700000))


def responses_reasoning() -> None:
    result = responder(THINK).run_sync("Six times seven?")
    same(result.output, THINK_TEXT)
    kinds = [part.part_kind for part in result.new_messages()[-1].parts]
    same(kinds, ["thinking", "text"])


run(globals())
