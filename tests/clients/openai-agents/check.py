"""OpenAI's Agents SDK: agents with tools, over chat completions and over responses."""

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from agents.exceptions import AgentsException
from openai import AsyncOpenAI
from pydantic import BaseModel
from report import BROKEN, KEY, MISSING, TALK, TOOLS, TOOLS_TEXT, V1, breaks_off, fails, holds, is_talk, run, same


class City(BaseModel):
    name: str
    population: int


@function_tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def agent(model: str, api: type = OpenAIChatCompletionsModel, **options: object) -> Agent:
    speaker = api(model=model, openai_client=AsyncOpenAI(base_url=V1, api_key=KEY))
    return Agent(name="helper", instructions="Be brief.", model=speaker, **options)


async def deltas(of: Agent, question: str) -> list[str]:
    result = Runner.run_streamed(of, question)
    return [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]


async def chat_text() -> None:
    is_talk((await Runner.run(agent(TALK), "Hello")).final_output)


async def chat_stream() -> None:
    is_talk("".join(await deltas(agent(TALK), "Hello")))


async def chat_agent() -> None:
    result = await Runner.run(agent(TOOLS, tools=[get_weather]), "How is the weather in Oslo?")
    same(result.final_output, TOOLS_TEXT)
    same([item.output for item in result.new_items if item.type == "tool_call_output_item"], ["sunny in Oslo"])


async def chat_structured() -> None:
    answer = (await Runner.run(agent(TALK, output_type=City), "Which city?")).final_output
    holds(isinstance(answer, City), f"not a City: {answer}")


def chat_errors() -> None:
    fails(lambda: Runner.run_sync(agent(MISSING), "Hello"), openai.NotFoundError)


def chat_broken_stream() -> None:
    breaks_off(lambda: deltas(agent(BROKEN), "Hello"), openai.APIError)


async def responses_text() -> None:
    is_talk((await Runner.run(agent(TALK, OpenAIResponsesModel), "Hello")).final_output)


async def responses_stream() -> None:
    is_talk("".join(await deltas(agent(TALK, OpenAIResponsesModel), "Hello")))


async def responses_agent() -> None:
    helper = agent(TOOLS, OpenAIResponsesModel, tools=[get_weather])
    same((await Runner.run(helper, "How is the weather in Oslo?")).final_output, TOOLS_TEXT)


async def responses_handoff() -> None:
    """The second agent gets the conversation of the first, tool calls and all."""
    first = await Runner.run(agent(TOOLS, OpenAIResponsesModel, tools=[get_weather]), "How is the weather in Oslo?")
    again = [*first.to_input_list(), {"role": "user", "content": "Thanks."}]
    is_talk((await Runner.run(agent(TALK, OpenAIResponsesModel), again)).final_output)


async def responses_conversation() -> None:
    """The mesh keeps the turns of a run, tool calls and all, and a session continues them."""
    client = AsyncOpenAI(base_url=V1, api_key=KEY)
    made = await client.conversations.create()
    helper = agent(TOOLS, OpenAIResponsesModel, tools=[get_weather])
    asked = await Runner.run(helper, "How is the weather in Oslo?", conversation_id=made.id)
    same(asked.final_output, TOOLS_TEXT)
    kinds = [item.type async for item in client.conversations.items.list(made.id, order="asc")]
    same(kinds, ["message", "function_call", "function_call_output", "message"])
    session = OpenAIConversationsSession(conversation_id=made.id, openai_client=client)
    is_talk((await Runner.run(agent(TALK, OpenAIResponsesModel), "Thanks.", session=session)).final_output)
    same(len(await session.get_items()), 6)
    await session.clear_session()


async def responses_structured() -> None:
    answer = (await Runner.run(agent(TALK, OpenAIResponsesModel, output_type=City), "Which city?")).final_output
    same(answer, City(name="tok0", population=1))


def responses_broken_stream() -> None:
    breaks_off(lambda: deltas(agent(BROKEN, OpenAIResponsesModel), "Hello"), openai.APIError, AgentsException)


run(globals())
