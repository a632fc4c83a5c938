"""LangChain's OpenAI classes, and an agent of LangGraph on top."""

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel
from report import BROKEN, KEY, MISSING, TALK, TOOLS, TOOLS_TEXT, V1, breaks_off, fails, holds, is_talk, run, same


class City(BaseModel):
    """A city."""

    name: str
    population: int


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def model(name: str, **options: object) -> ChatOpenAI:
    return ChatOpenAI(model=name, base_url=V1, api_key=KEY, **options)


def chat_text() -> None:
    answer = model(TALK, max_tokens=32).invoke([("system", "Be brief."), ("human", "Hello")])
    is_talk(answer.content)
    holds(answer.usage_metadata["output_tokens"] > 0, "no usage")


def chat_stream() -> None:
    whole = None
    for chunk in model(TALK, max_tokens=32, stream_usage=True).stream("Hello"):
        whole = chunk if whole is None else whole + chunk
    is_talk(whole.content)
    holds(whole.usage_metadata["output_tokens"] > 0, "no usage")


async def chat_async() -> None:
    is_talk("".join([chunk.content async for chunk in model(TALK, max_tokens=32).astream("Hello")]))


def chat_tools() -> None:
    answer = model(TOOLS).bind_tools([get_weather]).invoke("How is the weather in Oslo?")
    same([(call["name"], call["args"]) for call in answer.tool_calls], [("get_weather", {"city": "Oslo"})])


def chat_agent() -> None:
    agent = create_react_agent(model(TOOLS), [get_weather])
    messages = agent.invoke({"messages": [("human", "How is the weather in Oslo?")]})["messages"]
    same([message.type for message in messages], ["human", "ai", "tool", "ai"])
    same((messages[2].content, messages[3].content), ("sunny in Oslo", TOOLS_TEXT))


def chat_structured() -> None:
    answer = model(TALK).with_structured_output(City).invoke("Which city?")
    holds(isinstance(answer, City), f"not a City: {answer}")


def chat_errors() -> None:
    fails(lambda: model(MISSING).invoke("Hello"), openai.NotFoundError)


def chat_broken_stream() -> None:
    got = []

    def read() -> None:
        got.extend(model(BROKEN).stream("Hello"))

    breaks_off(read, openai.APIError)
    holds(got, "nothing came before the failure")


def responses_text() -> None:
    answer = model(TALK, max_tokens=32, use_responses_api=True).invoke("Hello")
    is_talk(answer.text)
    holds(answer.usage_metadata["output_tokens"] > 0, "no usage")


def responses_stream() -> None:
    whole = None
    for chunk in model(TALK, max_tokens=32, use_responses_api=True).stream("Hello"):
        whole = chunk if whole is None else whole + chunk
    is_talk(whole.text)


def responses_agent() -> None:
    agent = create_react_agent(model(TOOLS, use_responses_api=True), [get_weather])
    messages = agent.invoke({"messages": [("human", "How is the weather in Oslo?")]})["messages"]
    same([message.type for message in messages], ["human", "ai", "tool", "ai"])
    same(messages[3].text, TOOLS_TEXT)


def responses_structured() -> None:
    answer = model(TALK, use_responses_api=True).with_structured_output(City).invoke("Which city?")
    same(answer, City(name="tok0", population=1))


def embeddings_vectors() -> None:
    embedder = OpenAIEmbeddings(model=TALK, base_url=V1, api_key=KEY, check_embedding_ctx_length=False)
    vectors = embedder.embed_documents(["a cat", "a kitten"])
    same(len(vectors), 2)
    holds(len(vectors[0]) > 1, "no vector")


run(globals())
