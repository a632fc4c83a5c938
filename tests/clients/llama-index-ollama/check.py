"""LlamaIndex through its classes for Ollama: chat and embeddings."""

import ollama
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.llms.ollama import Ollama
from pydantic import BaseModel
from report import (
    BROKEN,
    KEY,
    MISSING,
    TALK,
    THINK,
    THINK_TEXT,
    THOUGHT,
    TOOLS,
    URL,
    breaks_off,
    fails,
    holds,
    is_talk,
    run,
    same,
)

HEADERS = {"Authorization": f"Bearer {KEY}"}


class City(BaseModel):
    """A city."""

    name: str
    population: int


def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def model(name: str, **options: object) -> Ollama:
    clients = {"client": ollama.Client(URL, headers=HEADERS), "async_client": ollama.AsyncClient(URL, headers=HEADERS)}
    return Ollama(model=name, base_url=URL, context_window=4096, **clients, **options)


HELLO = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello")]


def talk_text() -> None:
    is_talk(model(TALK).chat(HELLO).message.content)
    is_talk(model(TALK).complete("Hello").text)


def talk_stream() -> None:
    is_talk("".join(part.delta or "" for part in model(TALK).stream_chat(HELLO)))


async def talk_async() -> None:
    is_talk((await model(TALK).achat(HELLO)).message.content)


def talk_tools() -> None:
    speaker = model(TOOLS)
    tools = [FunctionTool.from_defaults(get_weather)]
    asked = speaker.chat_with_tools(tools, user_msg="How is the weather in Oslo?")
    calls = speaker.get_tool_calls_from_response(asked)
    same([(call.tool_name, call.tool_kwargs) for call in calls], [("get_weather", {"city": "Oslo"})])


def talk_structured() -> None:
    answer = model(TALK).as_structured_llm(City).complete("Which city?")
    holds(isinstance(answer.raw, City), f"not a City: {answer}")


def talk_thinking() -> None:
    answer = model(THINK, thinking=True).chat(HELLO)
    same(answer.message.content, THINK_TEXT)
    holds(THOUGHT in str(answer.message.model_dump()), f"no thinking: {answer.message}")


def talk_errors() -> None:
    error = fails(lambda: model(MISSING).chat(HELLO), ollama.ResponseError)
    same(error.status_code, 404)


def talk_broken_stream() -> None:
    got = []

    def read() -> None:
        got.extend(model(BROKEN).stream_chat(HELLO))

    breaks_off(read, ollama.ResponseError)
    holds(got, "nothing came before the failure")


def embed_vectors() -> None:
    embedder = OllamaEmbedding(model_name=TALK, base_url=URL, client_kwargs={"headers": HEADERS})
    vectors = embedder.get_text_embedding_batch(["a cat", "a kitten"])
    same(len(vectors), 2)
    holds(len(vectors[0]) > 1, "no vector")


run(globals())
